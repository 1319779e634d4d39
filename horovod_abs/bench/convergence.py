"""How long each way of training takes to an accuracy: real training of a real model, in virtual time.

Gradients, updates and averages are real, and made by the production code; how long a micro-batch and an exchange take
follows from the cluster's model, so that the figure does not depend on the machine. Evaluating takes no time.

Every algorithm gets the same effort. For each cluster it is tuned with :attr:`Setting.trials` trials at the middle
exchange, on the validation images and with seeds of their own, by :class:`horovod_abs.bench.search.Search` over
learning rate, momentum and, where it has such a number, micro-batches in a round. What was best is reported on the test
images, with :attr:`Setting.seeds` further seeds at every exchange, and the median counts. *Reached* means two
evaluations in a row at or above the target, of the central model, every quarter epoch of samples; a run that does not
get there within its time counts as that time. A trial is given up when it has taken :data:`HOPELESS` times as long as
the best before it, and any run that after half its time has not come within :data:`FAR` of the target.

The measure is the *ideal machine*: one worker as quick as all together, with no other cost, tuned with as many trials.

Each run is a file in a folder, so that a comparison that was stopped goes on where it was.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, NoReturn

import torch
from tqdm import tqdm

from horovod_abs.bench.algorithms import ALGORITHMS, Made, Trial, ideal
from horovod_abs.bench.search import Point, Search
from horovod_abs.bench.tasks import TASKS, Task
from horovod_abs.examples import mnist
from horovod_abs.observe.progress import open_bar
from horovod_abs.sim.models import ClusterModel

MOMENTA = (0.0, 0.9)
HOPELESS = 1.5
"""A trial is given up after so many times the time of the best before it."""
FAR = 0.05
"""So far from the target a run is given up after half its time, where the learning rate is constant."""
STUCK = 10
"""After so many updates without a sample, because no gradient was finite, a run has diverged."""
LONGEST = 6
"""Where an algorithm has a number of micro-batches in a round, it is tried up to 2 to the power of this."""
TUNING_SEED = 1000
EXCHANGES = {"short": 0.25, "medium": 1.25, "long": 3.1}
"""Length of an exchange, in micro-batches of the slowest rank."""

NAMES = tuple(name for name in ALGORITHMS if name != "ideal")
ALL = tuple(name for name in NAMES if not ALGORITHMS[name].variant)


@dataclass(frozen=True)
class Setting:
    """What is compared.

    Args:
        clusters: On which.
        task: Name of what is trained, in :data:`horovod_abs.bench.tasks.TASKS`.
        algorithms: Names, in :data:`horovod_abs.bench.algorithms.ALGORITHMS`.
        exchanges: Names, in :data:`EXCHANGES`; all are tuned at the medium one.
        target: Accuracy to reach; the task's by default.
        trials: To tune each algorithm with, on each cluster.
        seeds: So many runs are reported.
        budget: Samples, in place of the task's.

    Raises:
        ValueError: a number is out of range, or a name is unknown.
    """

    clusters: tuple[ClusterModel, ...]
    task: str = "mnist"
    algorithms: tuple[str, ...] = ALL
    exchanges: tuple[str, ...] = tuple(EXCHANGES)
    target: float | None = None
    trials: int = 10
    seeds: int = 3
    budget: int | None = None

    def __post_init__(self) -> None:
        for what, names, known in (
            ("algorithm", self.algorithms, NAMES),
            ("exchange", self.exchanges, EXCHANGES),
            ("task", (self.task,), TASKS),
        ):
            for name in names:
                if name not in known:
                    raise ValueError(f"{name!r} is no {what}: one of {', '.join(known)}")
            if not names:
                raise ValueError(f"there must be at least one {what}")
        if not self.clusters or min(self.trials, self.seeds) < 1:
            raise ValueError("there must be at least one cluster, one trial and one seed")
        if self.target is not None and not 0 < self.target < 1:
            raise ValueError(f"target must be between 0 and 1, got {self.target}")

    @property
    def chosen(self) -> Task:
        """What is trained."""
        task = TASKS[self.task]
        return dataclasses.replace(task, target=self.target or task.target, budget=self.budget or task.budget)

    @property
    def runs(self) -> int:
        """The most runs that it takes; trials of few neighbours are fewer."""
        reported = len(self.exchanges) * self.seeds
        return len(self.clusters) * len(self.algorithms) * (self.trials + reported) + self.trials + self.seeds


def quick(setting: Setting) -> Setting:
    """The same with so little that it takes less than a minute."""
    few = ("synchronous", "asynchronous", "abs", "updates")
    return dataclasses.replace(
        setting, clusters=setting.clusters[:1], algorithms=few, target=0.8, trials=2, seeds=1, budget=20_000
    )


class Job(NamedTuple):
    """One run.

    Attributes:
        algorithm: Its name.
        task: What is trained.
        cluster: On which.
        exchange: Seconds.
        trial: With what.
        seed: Of model, order and cluster.
        tuning: Whether the validation images count.
        limit: Virtual seconds.
    """

    algorithm: str
    task: str
    target: float
    budget: int
    cluster: ClusterModel
    exchange: float
    trial: Trial
    seed: int
    tuning: bool
    limit: float


@dataclass(frozen=True)
class Run:
    """What came of it.

    Attributes:
        seconds: Virtual time until the target; infinite if it was not reached in time.
        curve: Virtual time, samples and accuracy of each evaluation.
    """

    seconds: float
    curve: tuple[tuple[float, float, float], ...]

    @property
    def best(self) -> float:
        """The highest accuracy."""
        return max((accuracy for _, _, accuracy in self.curve), default=0.0)


class _Ended(Exception):
    """The run has reached its target, or has diverged."""


def train(job: Job) -> Run:
    """One run, until it reaches the target, or its time is over, or it has diverged."""
    torch.set_num_threads(1)  # the models are so small that more would be slower
    task = dataclasses.replace(TASKS[job.task], target=job.target, budget=job.budget)
    train_set, validation, test = task.data()
    held_out = validation if job.tuning else test
    training = ALGORITHMS[job.algorithm].make(Made(task, job.cluster, job.exchange, job.trial, job.seed, train_set))
    curve: list[tuple[float, float, float]] = []
    result, before, idle = math.inf, 0.0, 0

    def updated() -> None:
        nonlocal result, before, idle
        samples = float(training.samples)
        before, idle = samples, idle + 1 if samples == before else 0
        if idle == STUCK:
            raise _Ended
        if samples < (curve[-1][1] if curve else 0.0) + task.evaluate_every:
            return
        curve.append((training.now, samples, training.accuracy(lambda model: mnist.accuracy(model, held_out))))
        if len(curve) > 1 and min(accuracy for _, _, accuracy in curve[-2:]) >= task.target:
            result = training.now
        behind = task.target - max(accuracy for _, _, accuracy in curve)
        far = not task.one_cycle and behind > FAR and training.now > job.limit / 2
        if math.isfinite(result) or training.now >= job.limit or far or _hopeless(curve):
            raise _Ended

    if task.one_cycle:
        training.schedule(lambda samples: job.trial.rate * task.factor(samples))
    with suppress(_Ended):
        training.go(job.limit, updated)
    return Run(result, tuple(curve))


def _hopeless(curve: Sequence[tuple[float, float, float]]) -> bool:
    """Whether after two epochs a model still guesses."""
    return len(curve) >= 8 and max(accuracy for _, _, accuracy in curve[-4:]) < 0.2


class Runs:
    """Does runs, each once: what a folder holds is not done again.

    Args:
        folder: Where; made if it does not exist.
        pool: Processes that do them.
        bar: Moves with each.
    """

    def __init__(self, folder: Path, pool: Executor | None, bar: tqdm[NoReturn]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._pool = pool
        self._bar = bar

    def all(self, jobs: Sequence[Job]) -> list[Run]:
        """The runs, in the order of the jobs."""
        futures = [self._begin(job) for job in jobs]
        return [self._end(job, future) for job, future in zip(jobs, futures, strict=True)]

    def _begin(self, job: Job) -> Future[Run] | Run:
        path = self._path(job)
        if path.exists():
            told = json.loads(path.read_text())
            return Run(told["seconds"] or math.inf, tuple(tuple(point) for point in told["curve"]))
        return self._pool.submit(train, job) if self._pool else train(job)

    def _end(self, job: Job, future: Future[Run] | Run) -> Run:
        run = future.result() if isinstance(future, Future) else future
        path = self._path(job)
        if not path.exists():
            partial = path.with_suffix(f".{os.getpid()}-{id(job)}")
            partial.write_text(json.dumps({"job": repr(job), "seconds": _or_none(run.seconds), "curve": run.curve}))
            partial.replace(path)
        self._bar.update(1)
        return run

    def _path(self, job: Job) -> Path:
        return self._folder / f"{hashlib.sha256(repr(job).encode()).hexdigest()[:24]}.json"


@dataclass(frozen=True)
class Outcome:
    """What an algorithm does on a cluster.

    Attributes:
        cluster, algorithm: Names.
        trial: The best that was tried.
        settled: Whether all its neighbours on the grid were tried too.
        tried: Seconds of each trial, ``None`` for a miss: rate, momentum, steps, seconds.
        seconds: By exchange, of each seed; ``None`` for a miss.
        medians: By exchange; a miss counts as the limit.
        curves: By exchange, of the run in the middle.
        limit: Virtual seconds.
    """

    cluster: str
    algorithm: str
    trial: Trial
    settled: bool
    tried: list[tuple[float, float, int, float | None]]
    seconds: dict[str, list[float | None]]
    medians: dict[str, float]
    curves: dict[str, tuple[tuple[float, float, float], ...]]
    limit: float


def compare_one(algorithm: str, cluster: ClusterModel, setting: Setting, runs: Runs) -> Outcome:
    """Tune an algorithm on a cluster, and measure it."""
    task = setting.chosen
    limit = task.budget / cluster.ideal
    slowest = max(rank.mean_seconds(cluster.samples) for rank in cluster.ranks) if cluster.size > 1 else 0.0
    steps = ALGORITHMS[algorithm].steps
    best = math.inf

    def trial(point: Point) -> Trial:
        momentum = MOMENTA[point[1]]
        return Trial(
            round(task.rate * 2.0 ** point[0] * (1 - momentum), 9), momentum, int((steps or 1) * 2.0 ** point[2])
        )

    def job(tried: Trial, exchange: float, seed: int, within: float, *, tuning: bool) -> Job:
        return Job(
            algorithm, setting.task, task.target, task.budget, cluster, exchange * slowest, tried, seed, tuning, within
        )

    def attempt(point: Point) -> tuple[float, float]:
        nonlocal best
        within = min(limit, HOPELESS * best)
        [run] = runs.all([job(trial(point), EXCHANGES["medium"], TUNING_SEED, within, tuning=True)])
        best = min(best, run.seconds)
        return run.seconds, -run.best

    least = 1 - (steps or 1).bit_length()  # one micro-batch
    bounds = ((None, None), (0, len(MOMENTA) - 1), (least, least + LONGEST) if steps else (0, 0))
    search = Search((0, 1, 0), bounds, setting.trials, attempt)
    chosen = trial(search.ranking()[0])
    exchanges = setting.exchanges if algorithm != "ideal" else ("medium",)
    jobs = [job(chosen, EXCHANGES[e], seed, limit, tuning=False) for e in exchanges for seed in range(setting.seeds)]
    done = runs.all(jobs)
    by_exchange = {e: done[n * setting.seeds : (n + 1) * setting.seeds] for n, e in enumerate(exchanges)}
    return Outcome(
        cluster.name,
        algorithm,
        chosen,
        search.settled,
        [(*trial(point), _or_none(score[0])) for point, score in search.scores.items()],
        {e: [_or_none(run.seconds) for run in found] for e, found in by_exchange.items()},
        {e: median(min(run.seconds, limit) for run in found) for e, found in by_exchange.items()},
        {e: sorted(found, key=lambda run: run.seconds)[len(found) // 2].curve for e, found in by_exchange.items()},
        limit,
    )


def measure(setting: Setting, folder: Path, *, jobs: int = 1) -> dict[str, Any]:
    """Compare all algorithms on all clusters, and return the result as plain values.

    Args:
        setting: What is compared.
        folder: Of runs that were done; more are added.
        jobs: Processes.
    """
    reference = ideal(setting.clusters[0])
    cells = [("ideal", reference)] + [(name, cluster) for cluster in setting.clusters for name in setting.algorithms]
    with open_bar(setting.runs) as bar, _processes(jobs) as pool, ThreadPoolExecutor(max(jobs, 1)) as threads:
        runs = Runs(folder, pool, bar)
        outcomes = list(threads.map(lambda cell: compare_one(cell[0], cell[1], setting, runs), cells))
    best, *others = outcomes
    task = setting.chosen
    samples = best.medians["medium"] * reference.ideal
    return {
        "task": {"name": task.name, "target": task.target, "budget": task.budget},
        "setting": {"trials": setting.trials, "seeds": setting.seeds, "exchanges": list(setting.exchanges)},
        "clusters": {
            cluster.name: {"ideal_rate": cluster.ideal, "ideal_seconds": samples / cluster.ideal}
            for cluster in setting.clusters
        },
        "ideal": asdict(best),
        "outcomes": [asdict(outcome) for outcome in others],
    }


@contextmanager
def _processes(jobs: int) -> Iterator[Executor | None]:
    if jobs <= 1:
        yield None
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), _be_quiet) as pool:
        yield pool


def _be_quiet() -> None:
    """That a trial diverges is no news."""
    logging.getLogger("horovod_abs").setLevel(logging.ERROR)


def _or_none(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None
