"""Runs that are recorded, stopped, resumed and repeated."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import horovod.torch
import torch

import horovod_abs.torch as hvd
from horovod_abs.emulate import Pace
from horovod_abs.plan.recorded import cluster_of
from horovod_abs.torch.replay import ReplayTask, replay
from tests.torch.replay import Regression, sgd
from tests.torch.scenario import Naps, Ranks, digest, scenario, small_model, wrap

EXCHANGES = {"plain": hvd.Gradients(), "lookahead": hvd.Gradients(staleness="lookahead")}


@contextmanager
def _folder(ranks: Ranks) -> Iterator[Path]:
    """A folder that all ranks share."""
    with tempfile.TemporaryDirectory() as own:
        yield Path(ranks.gather(own)[0])
        hvd.barrier()


@contextmanager
def _signals_put_back() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def _forgetful_model(seed: int = 0) -> torch.nn.Module:
    """A network that also depends on the random numbers of its rank."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1)]
    return torch.nn.Sequential(*layers).double()


@dataclass
class Training:
    """A model, its optimizer and an adaptive sampler.

    Attributes:
        seen: Indices of the samples that this rank has stepped on.
    """

    ranks: Ranks
    options: dict[str, Any]
    model: torch.nn.Module = field(default_factory=small_model)
    task: Regression = field(default_factory=lambda: Regression(240))
    naps: int = 0
    drain: bool = True
    workers: int = 0
    seen: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(100 + self.ranks.rank)
        self.optimizer = wrap(self.model, sgd(self.model), **self.options)
        self.sampler = hvd.AdaptiveSampler(self.task, self.optimizer, seed=3, drain=self.drain)
        self.loader = torch.utils.data.DataLoader(
            self.task,  # type: ignore[arg-type]
            batch_size=7,
            sampler=self.sampler,
            num_workers=self.workers,
        )
        self.nap = Naps(1000 * self.naps + self.ranks.rank)

    def epoch(self, between: Callable[[int], object] = lambda number: None) -> None:
        """One epoch, or the rest of one; ``between`` is called in the middle of each round's work."""
        for number, indices in enumerate(self.optimizer.epoch(self.loader)):
            self.optimizer.zero_grad()
            self.task.loss(self.model, indices).backward()
            self.nap()
            between(number)
            self.optimizer.step(samples=len(indices))
            self.seen += indices.tolist()

    def assert_each_sample(self, times: int, before: list[list[int]] | None = None) -> None:
        """All ranks together have seen each sample so often; every rank must call it."""
        everyone = [*self.ranks.gather(self.seen), *(before or [])]
        counts = torch.bincount(torch.tensor([index for own in everyone for index in own]), minlength=len(self.task))
        assert counts.tolist() == [times] * len(self.task), counts


def _replayed_alone(path: Path) -> float:
    task = Regression(240)
    # the parameters to begin with are those that were saved, not these
    return replay(hvd.read_run_log(path), ReplayTask(small_model(seed=9), sgd, task, task.loss)).difference


@scenario(gloo=True)
def recorded_and_repeated(ranks: Ranks) -> dict[str, Any]:
    """On the same ranks at other speeds the same bits; in one process, by the formulas, the same to 1e-10."""
    found = {}
    with _folder(ranks) as folder:
        for name, exchange in EXCHANGES.items():
            path = folder / "logs" / f"{name}.jsonl"
            first = Training(ranks, {"exchange": exchange, "record": path, "clip_grad_norm": 0.7})
            scheduler = torch.optim.lr_scheduler.StepLR(first.optimizer, 5, 0.9)
            first.optimizer.on_merge(scheduler.step)
            for epoch in range(2):
                first.epoch()
                first.optimizer.log(loss=float(epoch))
            first.assert_each_sample(2)
            hvd.barrier()
            log = hvd.read_run_log(path)
            assert [r.round for r in log.history] == list(range(len(first.optimizer.history)))
            assert [r.samples for r in log.history] == [r.samples for r in first.optimizer.history]
            assert [event.values for event in log.events] == [{"loss": 0}, {"loss": 1}]
            clock = hvd.ReplayClock(log.entries)
            second = Training(ranks, {"exchange": exchange, "clock": clock, "clip_grad_norm": 0.7}, naps=1)
            scheduler = torch.optim.lr_scheduler.StepLR(second.optimizer, 5, 0.9)
            second.optimizer.on_merge(scheduler.step)
            for _ in range(2):
                second.epoch()
            assert second.seen == first.seen
            assert digest(second.model) == digest(first.model), name
            ranks.assert_same(digest(first.model), "parameters")
            difference = _replayed_alone(path)
            assert difference <= 1e-10, (name, difference)
            found[name] = (len(log.rounds), difference)
    return found


@scenario
def recorded_without_draining(ranks: Ranks) -> float:
    """Epochs that flow into one another; loaders with workers, rounds that wait for their exchange, and taylor."""
    variants: list[tuple[int, dict[str, Any]]] = [
        (1, {}),
        (0, {"exchange": hvd.Gradients(delay=0)}),
        (0, {"exchange": hvd.Gradients(staleness="taylor", taylor_lambda=5.0)}),
    ]
    found = 0.0
    with _folder(ranks) as folder:
        for number, (workers, options) in enumerate(variants):
            path = folder / f"{number}.jsonl"
            first = Training(ranks, {"record": path, **options}, drain=False, workers=workers)
            first.epoch()
            first.epoch()
            first.optimizer.synchronize()
            hvd.barrier()
            difference = _replayed_alone(path)
            assert difference <= 1e-10, (options, difference)
            clock = hvd.ReplayClock(hvd.read_run_log(path).entries)
            again = Training(ranks, {"clock": clock, **options}, naps=1, drain=False, workers=workers)
            again.epoch()
            again.epoch()
            again.optimizer.synchronize()
            assert digest(again.model) == digest(first.model), options
            found = max(found, difference)
    return found


@scenario(gloo=True)
def stopped_resumed_and_repeated(ranks: Ranks) -> dict[str, Any]:
    """SIGTERM on one rank ends all with a checkpoint; resumed, the run has the bits of one that was never stopped."""
    stopping = min(2, ranks.size - 1)
    found = {}
    with _folder(ranks) as folder, _signals_put_back():
        for name, exchange in EXCHANGES.items():
            path, checkpoints = folder / f"{name}.jsonl", folder / name
            options = {"exchange": exchange, "record": path}

            def terminate(number: int) -> None:
                if number == 3 and ranks.rank == stopping:
                    os.kill(os.getpid(), signal.SIGTERM)

            first = Training(ranks, options, _forgetful_model())
            stopped = hvd.Checkpointer(checkpoints, first.model, first.optimizer)
            first.epoch(terminate)
            assert first.optimizer.stopped
            stopped.save()  # as the loop of the docstring does: there is one already
            assert list(first.optimizer.epoch(first.loader)) == []
            before = ranks.gather(first.seen)
            assert 0 < sum(map(len, before)) < len(first.task), "it was to be stopped in the middle"
            files = sorted(file.name for file in checkpoints.iterdir())
            assert files == [f"checkpoint-{len(first.optimizer.history):09d}.pt"], files

            resumed = Training(ranks, options, _forgetful_model(seed=1), naps=1)
            torch.rand(17)  # other random numbers, until they are restored
            keeper = hvd.Checkpointer(checkpoints, resumed.model, resumed.optimizer)
            assert keeper.restore()
            assert digest(resumed.model) == digest(first.model)
            resumed.epoch()
            resumed.assert_each_sample(1, before)
            resumed.epoch()
            resumed.assert_each_sample(2, before)
            keeper.save()
            hvd.barrier()

            log = hvd.read_run_log(path)
            whole = Training(
                ranks, {"exchange": exchange, "clock": hvd.ReplayClock(log.entries)}, _forgetful_model(), naps=2
            )
            whole.epoch()
            whole.epoch()
            whole.optimizer.synchronize()
            assert digest(whole.model) == digest(resumed.model), name
            assert whole.seen == first.seen + resumed.seen
            assert whole.optimizer.last_round.round == resumed.optimizer.last_round.round
            found[name] = (len(first.optimizer.history), len(log.rounds))
    return found


@scenario
def stopped_and_replayed_alone(ranks: Ranks) -> float:
    """A log that goes on through a stop and a crash is one run."""
    with _folder(ranks) as folder, _signals_put_back():
        path = folder / "run.jsonl"
        first = Training(ranks, {"record": path})
        hvd.Checkpointer(folder, first.model, first.optimizer)

        def terminate(number: int) -> None:
            if number == 2 and ranks.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        first.epoch(terminate)
        for naps in (1, 2):  # the first of the two is lost in a crash after another round or more
            resumed = Training(ranks, {"record": path}, small_model(seed=1), naps=naps)
            keeper = hvd.Checkpointer(folder, resumed.model, resumed.optimizer)
            assert keeper.restore()
            resumed.epoch()
        hvd.barrier()
        if ranks.rank == 0:
            with path.open("a") as file:
                file.write('{"kind": "round", "rou')
        hvd.barrier()
        log = hvd.read_run_log(path)
        assert [line.round for line in log.rounds] == list(range(len(log.rounds)))
        difference = _replayed_alone(path)
        assert difference <= 1e-10, difference
    return difference


@scenario
def checkpoints(ranks: Ranks) -> None:
    """SIGUSR1 in mid-epoch takes a checkpoint and the run goes on; the last few are kept; all ranks restore."""
    with _folder(ranks) as folder, _signals_put_back():
        path, checkpoints = folder / "run.jsonl", folder / "checkpoints"
        going_on = Training(ranks, {"record": path}, _forgetful_model())
        keeper = hvd.Checkpointer(checkpoints, going_on.model, going_on.optimizer, keep=2)
        assert keeper.latest() is None
        assert not keeper.restore()

        def ask(number: int) -> None:
            if number == 2 and ranks.rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)

        going_on.epoch(ask)
        going_on.assert_each_sample(1)
        assert not going_on.optimizer.stopped
        middle = keeper.latest()
        assert middle is not None
        taken_at = int(middle.stem.split("-")[1])
        assert 0 < taken_at < len(going_on.optimizer.history), "it was to be taken in the middle"
        hvd.barrier()

        log = hvd.read_run_log(path)
        again = Training(ranks, {"clock": hvd.ReplayClock(log.entries)}, _forgetful_model(seed=1), naps=1)
        restored = hvd.Checkpointer(checkpoints, again.model, again.optimizer, keep=2)
        assert restored.restore()
        ranks.assert_same(digest(again.model), "restored parameters")
        assert again.optimizer._rounds.driver.engine.ledger.rounds == taken_at
        again.epoch()
        assert digest(again.model) == digest(going_on.model)
        assert going_on.seen[len(going_on.seen) - len(again.seen) :] == again.seen

        hvd.barrier()
        paths = [restored.save() for _ in range(3)]
        assert restored.latest() == paths[-1]
        kept = sorted(file.name for file in checkpoints.iterdir())
        assert kept == sorted(path.name for path in paths[1:]), kept
        hvd.barrier()


@scenario(gloo=True)
def plain_horovod_recorded(ranks: Ranks) -> list[float]:
    """Horovod's own optimizer goes on as ever, and its log tells how fast each rank is, without pauses."""
    model, task = small_model(), Regression(240)
    optimizer = horovod.torch.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    paces = [1e-3 * (10 + 10 * rank) for rank in range(ranks.size)]
    with _folder(ranks) as folder:
        recorder = hvd.HorovodRecorder(optimizer, folder / "plain.jsonl", samples=8)
        for step in range(120):
            with Pace(paces[ranks.rank]):
                optimizer.zero_grad()
                task.loss(model, torch.arange(8)).backward()
            optimizer.step()
            if step == 60:
                with recorder.pausing():
                    time.sleep(1.0)
        recorder.close()
        optimizer.zero_grad()
        task.loss(model, torch.arange(8)).backward()
        optimizer.step()  # Horovod's own again
        hvd.barrier()
        ranks.assert_same(digest(model), "parameters")
        log = hvd.read_run_log(folder / "plain.jsonl")
        cluster = cluster_of(log)
    assert [line.round for line in log.rounds] == list(range(120))
    (pause,) = log.pauses
    assert 1.0 <= pause[1] - pause[0] < 1.5, pause
    assert cluster.samples == 8
    rates = [cluster.mean_rate(rank) for rank in range(ranks.size)]
    for rate, pace in zip(rates, paces, strict=True):
        assert 0.7 * 8 / pace < rate < 1.05 * 8 / pace, (rates, paces)
    return rates
