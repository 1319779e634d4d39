from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm
from typer.testing import CliRunner

from horovod_abs.bench import convergence
from horovod_abs.bench.algorithms import ALGORITHMS, Trial, ideal
from horovod_abs.bench.cli import app
from horovod_abs.bench.convergence import ALL, Job, Run, Runs, Setting, compare_one, train
from horovod_abs.bench.tasks import TASKS
from horovod_abs.plan.clusters import load
from horovod_abs.sim.models import ClusterModel
from horovod_abs.sim.network import Measured
from horovod_abs.sim.speeds import Cost, RankModel

STEADY = ClusterModel(
    "steady", tuple(RankModel(Cost(0.0, 1 / 1024), speed) for speed in (1, 1, 0.5, 0.25)), Measured(0.1)
)
"""Micro-batches of 16 take 1/64, 1/64, 1/32 and 1/16 s: sums of such times are exact."""
SLOWEST = 1 / 16


def job(algorithm: str, exchange: float, *, limit: float = 4.0, cluster: ClusterModel = STEADY, **changes: Any) -> Job:
    steps = ALGORITHMS[algorithm].steps or 1
    made = Job(algorithm, "mnist", 0.999, 10**9, cluster, exchange, Trial(0.02, 0.9, steps), 0, True, limit)
    return made._replace(**changes)


def rate(algorithm: str, exchange: float) -> float:
    """Samples in a second."""
    seconds, samples, _ = train(job(algorithm, exchange, limit=12.0)).curve[-1]
    return samples / seconds


def test_who_waits_for_the_network_is_slowed_down_by_it_and_who_does_not_is_not() -> None:
    fast, slow = 1 / 64, 1 / 2
    waiting = SLOWEST + slow - 2 / 3 * SLOWEST
    assert rate("synchronous", slow) == pytest.approx(64 / waiting, rel=0.02)
    assert rate("dynamic", slow) < 0.4 * rate("dynamic", fast)
    assert 0.85 < rate("updates", slow) / rate("updates", fast) < 1.15


def test_the_backward_pass_hides_what_it_hides_of_an_exchange() -> None:
    wholly = rate("synchronous", 2 / 3 * SLOWEST)
    assert wholly == pytest.approx(64 / SLOWEST, rel=0.02)
    assert rate("synchronous", SLOWEST) < 0.9 * wholly


@pytest.mark.parametrize("name", ["dynamic", "steered"])
def test_batches_by_speed_let_nobody_wait(name: str) -> None:
    """After the first epoch all ranks take as long, and the exchange is hidden."""
    curve = train(job(name, 0.001, limit=14.0)).curve  # given up at half of it
    (begin, first, _), (end, last, _) = curve[len(curve) // 2], curve[-1]
    assert (last - first) / (end - begin) == pytest.approx(STEADY.ideal, rel=0.08)


def test_local_sgd_goes_on_from_the_average() -> None:
    """Nothing is in flight while a rank computes: after each exchange all have the same model."""
    slower, faster = (train(job("local", exchange, limit=5.0)).curve for exchange in (0.25, 0.125))
    rounds = [samples / (4 * 8 * 16) for _, samples, _ in slower]
    assert [point[0] for point in slower] == pytest.approx([number * (8 * SLOWEST + 0.25) for number in rounds])
    same = min(len(slower), len(faster))
    assert [point[1:] for point in slower[:same]] == [point[1:] for point in faster[:same]], (
        "only the time depends on it"
    )


def test_local_sgd_by_speed_lets_quick_ranks_do_more() -> None:
    assert rate("proportional", 0.01) > 2 * rate("local", 0.01)


def test_the_ideal_machine_is_as_quick_as_all_together() -> None:
    seconds, samples, _ = train(job("ideal", 0.0, cluster=ideal(STEADY), limit=2.0)).curve[-1]
    assert samples / seconds == pytest.approx(STEADY.ideal, rel=0.01)


@pytest.mark.parametrize("name", ALL)
def test_every_algorithm_learns_and_is_repeatable(name: str) -> None:
    small = job(name, 0.05, limit=30.0, target=0.6, trial=Trial(0.01, 0.0, ALGORITHMS[name].steps or 1))
    run = train(small)
    assert 0 < run.seconds < 30
    assert run.best >= 0.6
    assert train(small) == run


@pytest.mark.parametrize("name", ["updates", "lookahead", "asynchronous", "eager-solo"])
def test_a_schedule_follows_the_samples_that_were_merged(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Driver and payload refuse a learning rate that ranks change at different rounds."""
    rates: list[float] = []
    task = replace(TASKS["mnist"], one_cycle=True)
    monkeypatch.setattr(type(task), "factor", lambda self, samples: rates.append(samples) or 1 / (1 + samples / 4000))
    monkeypatch.setitem(TASKS, "mnist", task)
    run = train(job(name, 0.05, limit=20.0, target=0.6, trial=Trial(0.02, 0.0, 1)))
    assert run.best >= 0.6
    assert rates[0] == 0.0
    assert max(rates) >= run.curve[-1][1]


def test_reached_are_two_evaluations_in_a_row() -> None:
    run = train(job("updates", 0.05, target=0.6, limit=30.0))
    good = [accuracy >= 0.6 for _, _, accuracy in run.curve]
    assert good[-2:] == [True, True]
    assert not any(a and b for a, b in pairwise(good[:-1]))
    assert run.seconds == run.curve[-1][0]


def test_a_run_ends_when_its_time_is_over_or_it_has_diverged() -> None:
    assert train(job("synchronous", 0.1, limit=0.1)) == Run(math.inf, ())
    diverged = train(job("synchronous", 0.01, limit=60.0, trial=Trial(50.0, 0.9, 1)))
    assert diverged.seconds == math.inf
    assert len(diverged.curve) <= 8


def fake(found: dict[Trial, float], seen: list[Job]) -> Any:
    def train(job: Job) -> Run:
        seen.append(job)
        seconds = found.get(job.trial, math.inf) + job.seed % 1000
        return Run(seconds if seconds <= job.limit else math.inf, ())

    return train


def test_tuning_and_reporting_use_other_images_and_other_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Job] = []
    best = Trial(0.08, 0.9, 1)
    monkeypatch.setattr(convergence, "train", fake({Trial(0.04, 0.9, 1): 9.0, best: 6.0}, seen))
    setting = Setting((STEADY,), algorithms=("abs",), trials=5)
    outcome = compare_one("abs", STEADY, setting, Runs(tmp_path, None, tqdm(disable=True)))
    tuning, reported = seen[:5], seen[5:]
    assert all(each.tuning and each.seed == 1000 and each.exchange == 1.25 * SLOWEST for each in tuning)
    limit = setting.chosen.budget / STEADY.ideal
    assert [each.limit for each in tuning] == [limit, 13.5, 9.0, 9.0, 9.0]
    assert [(each.exchange / SLOWEST, each.seed, each.trial, each.tuning, each.limit) for each in reported] == [
        (exchange, seed, best, False, limit) for exchange in (0.25, 1.25, 3.1) for seed in range(3)
    ]
    assert outcome.trial == best
    assert outcome.settled
    assert outcome.medians == {"short": 7.0, "medium": 7.0, "long": 7.0}
    assert outcome.seconds["long"] == [6.0, 7.0, 8.0]


def test_runs_that_are_done_are_not_done_again_and_others_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Job] = []
    monkeypatch.setattr(convergence, "train", fake({Trial(0.02, 0.9, 1): 1.0}, seen))
    runs = Runs(tmp_path, None, tqdm(disable=True))
    jobs = [job("abs", 0.1), job("abs", 0.2), job("abs", 0.1, cluster=replace(STEADY, samples=8))]
    first = runs.all(jobs)
    assert runs.all(jobs) == first
    assert seen == jobs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithms": ("abs", "x")}, "'x' is no algorithm: one of synchronous"),
        ({"algorithms": ("ideal",)}, "no algorithm"),
        ({"exchanges": ("endless",)}, "no exchange"),
        ({"exchanges": ()}, "at least one exchange"),
        ({"task": "imagenet"}, "no task"),
        ({"target": 1.5}, "between 0 and 1"),
        ({"trials": 0}, "at least one"),
        ({"clusters": ()}, "at least one cluster"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Setting(**{"clusters": (STEADY,), **changes})


def test_the_command_prints_writes_draws_and_goes_on(tmp_path: Path) -> None:
    files = [
        f"--{name}={tmp_path / file}" for name, file in (("json", "c.json"), ("plot", "c.png"), ("report", "R.md"))
    ]
    command = ["convergence", "--cluster=permanent", "--quick", "--jobs=1", f"--folder={tmp_path / 'runs'}", *files]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "140"})
    assert result.exit_code == 0, result.output
    assert "model updates, SyncClock" in result.output
    told = json.loads((tmp_path / "c.json").read_text())
    assert [each["algorithm"] for each in told["outcomes"]] == ["synchronous", "asynchronous", "abs", "updates"]
    assert 0 < told["outcomes"][-1]["medians"]["medium"] < told["outcomes"][-1]["limit"]
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert "model updates, SyncClock" in (tmp_path / "R.md").read_text()
    runs = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    again = CliRunner().invoke(app, command, env={"COLUMNS": "140"})
    assert again.exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()} == runs


@pytest.mark.parametrize("arguments", [["--cluster", "x"], ["--algorithms", "x"], ["--target-accuracy", "2"]])
def test_bad_options_are_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, ["convergence", *arguments]).exit_code == 2


def test_the_presets_are_known() -> None:
    assert Setting(tuple(load(name) for name in ("permanent", "transient", "mixed"))).runs > 1000
