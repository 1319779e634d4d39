from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from tqdm import tqdm
from typer.testing import CliRunner

from horovod_abs.bench import convergence
from horovod_abs.bench.cli import app
from horovod_abs.bench.convergence import QUICK, Run, Setting, Way, train

SMALL = replace(QUICK, target=0.6)


def seconds(name: str, exchange: float) -> float:
    return train(SMALL.ways()[name], exchange, 0.02, 0.9, 0, SMALL, 60.0).seconds


def rate(name: str, exchange: float) -> float:
    """Samples in a second."""
    seconds, samples, _ = train(SMALL.ways()[name], exchange, 0.02, 0.9, 0, SMALL, 60.0).curve[-1]
    return samples / seconds


def test_who_waits_for_the_network_is_slowed_down_by_it_and_who_does_not_is_not() -> None:
    fast, slow = 0.01, 0.4
    assert rate("synchronous", slow) == pytest.approx(rate("synchronous", fast) * 0.08 / (0.08 + slow - 0.16 / 3))
    assert rate("dynamic batches", slow) < 0.4 * rate("dynamic batches", fast)
    assert 0.85 < rate("model updates, SyncClock", slow) / rate("model updates, SyncClock", fast) < 1.15


def test_the_backward_pass_hides_what_it_hides_of_an_exchange() -> None:
    """Equal batches end with the slowest rank's backward pass of 0.053 s, dynamic ones with one of 0.013 s for all."""
    ways = Setting().ways()
    assert ways["synchronous"].hidden == pytest.approx(2 / 3 * 0.08)
    assert ways["dynamic batches"].hidden == pytest.approx(2 / 3 * 0.02)
    assert all(way.hidden == 0 for name, way in ways.items() if name not in ("synchronous", "dynamic batches"))
    assert seconds("synchronous", 0.05) == seconds("synchronous", 0.001), "wholly hidden"


def test_local_sgd_goes_on_from_the_average() -> None:
    """Nothing is in flight while a rank computes: after each exchange all have the same model."""
    setting = replace(SMALL, micro_batch=1 / 64)  # sums of such times are exact, so that ranks ask in the same order
    way = setting.ways()["local SGD, H = 8"]
    slower, faster = (train(way, exchange, 0.02, 0.9, 0, setting, 60.0).curve for exchange in (0.125, 0.25))
    rounds = [samples / (4 * 8 * 16) for _, samples, _ in slower]
    assert [point[0] for point in slower] == pytest.approx([number * (8 / 16 + 0.125) for number in rounds])
    assert [point[1:] for point in slower] == [point[1:] for point in faster], "only the time depends on the network"


def test_a_run_that_takes_too_long_or_is_far_behind_is_given_up() -> None:
    way = SMALL.ways()["synchronous"]
    assert train(way, 0.1, 0.02, 0.9, 0, SMALL, 0.5) == Run(math.inf, ())
    diverged = train(way, 0.1, 5.0, 0.9, 0, SMALL, 60.0)
    assert diverged.seconds == math.inf
    assert diverged.curve[-1][0] < 30


def test_all_ways_get_the_same_effort_and_the_least_median_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best two with one seed are tried with the others; tries are given up when they cannot be the best."""
    times = {(0.2, 0): 9.0, (0.2, 1): 30.0, (0.2, 2): 20.0, (0.1, 0): 10.0, (0.1, 1): 11.0, (0.1, 2): 12.0}
    tried = []

    def fake(way: Way, exchange: float, rate: float, momentum: float, seed: int, setting: Setting, limit: float) -> Run:
        tried.append((rate, seed, limit))
        found = times.get((rate, seed), math.inf)
        return Run(found if found <= limit else math.inf, ((0.0, 0.0, 0.0),) * seed)

    monkeypatch.setattr(convergence, "train", fake)
    setting = Setting(learning_rates=(0.1, 0.2, 0.4), momenta=(0.0,), limit=50.0)
    best, second, third = convergence._tune(setting.ways()["synchronous"], 0.1, setting, 2, tqdm(disable=True))
    assert tried[:3] == [(0.2, 0, 50.0), (0.1, 0, 13.5), (0.4, 0, 13.5)]
    assert tried[3:] == [(0.2, 1, 27.0), (0.2, 2, 27.0), (0.1, 1, 27.0), (0.1, 2, 27.0)]
    assert (best.rate, best.median, len(best.shown.curve)) == (0.1, 11.0, 1)
    assert (second.rate, second.median) == (0.2, 20.0)
    assert third.to_dict() == {"rate": 0.4, "momentum": 0.0, "seconds": [None], "median": None}


def test_learning_rates_are_as_long_in_the_long_run_whatever_the_momentum() -> None:
    setting = Setting(learning_rates=(0.1, 0.2, 0.4), momenta=(0.0, 0.9))
    assert setting.tries() == [(0.2, 0.0), (0.02, 0.9), (0.1, 0.0), (0.01, 0.9), (0.4, 0.0), (0.04, 0.9)]


@pytest.mark.parametrize(
    "values", [{"speeds": ()}, {"limit": 0.0}, {"target": 1.0}, {"exchanges": (0.0,)}, {"momenta": (1.0,)}]
)
def test_bad_settings_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must be (positive|between|at least)"):
        Setting(**values)  # type: ignore[arg-type]


def test_the_command_prints_writes_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convergence, "QUICK", replace(SMALL, learning_rates=(0.2,), limit=4.0))
    files = ["--json", str(tmp_path / "c.json"), "--plot", str(tmp_path / "c.png")]
    result = CliRunner().invoke(app, ["convergence", "--quick", *files], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert "model updates, SyncClock" in result.output
    told = json.loads((tmp_path / "c.json").read_text())
    assert [each["way"] for each in told["best"]] == list(SMALL.ways())
    by_way = {each["way"]: each["median"] for each in told["best"]}
    assert 0 < by_way["model updates, SyncClock"] < 4.0
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments", [["--momenta", "1"], ["--momenta", "x"], ["--target", "2"], ["--speeds", "0"]])
def test_bad_options_are_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, ["convergence", *arguments]).exit_code == 2
