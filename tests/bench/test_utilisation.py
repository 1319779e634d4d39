from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from horovod_abs.bench import utilisation
from horovod_abs.bench.cli import app
from horovod_abs.bench.utilisation import Setting
from horovod_abs.observe.summary import summarise_totals


def test_ideal_and_bound_of_the_example() -> None:
    setting = Setting((20, 20, 40, 80))
    assert setting.ideal == pytest.approx(2200)
    assert setting.synchronous_bound == pytest.approx(800 / 2200)


def test_equal_ranks_bound_nothing() -> None:
    assert Setting((30, 30)).synchronous_bound == pytest.approx(1.0)


def test_setting_reaches_the_ranks_as_it_is() -> None:
    setting = Setting((20, 40), clock="count:4", repeats=2)
    assert Setting.from_json(setting.to_json()) == setting


@pytest.mark.parametrize("values", [{"clock": "tick"}, {"exchange": "mail"}, {"rounds": 0}, {"micro_batch_ms": ()}])
def test_bad_settings_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"clock|exchange|positive"):
        Setting(**values)  # type: ignore[arg-type]


def test_report_takes_medians_over_repeats() -> None:
    setting = Setting((20, 20), repeats=3)
    repeats = {
        name: [summarise_totals([n, n], [0.9, 0.9], 1.0, rounds=10, ideal=setting.ideal) for n in samples]
        for name, samples in (("ssgd", (300, 310, 100)), ("abs", (700, 760, 770)))
    }
    result = utilisation.report(setting, "gloo", repeats, {"parameters": 1})
    assert result["ssgd"]["samples_per_second"] == 600
    assert result["abs"]["samples_per_second"] == 1520
    assert result["abs"]["share_of_ideal"] == pytest.approx(0.95)
    assert result["abs"]["idle_share"] == pytest.approx(0.1)
    assert result["ssgd"]["bound"] == 1.0
    assert result["speedup"] == pytest.approx(1520 / 600)
    assert json.loads(json.dumps(result))["controller"] == "gloo"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--micro-batch-ms", "20,x"], "not a list of numbers"),
        (["--micro-batch-ms", "20,-1"], "must be positive"),
        (["--parameters", "abc"], "not a whole number"),
        (["--parameters", "inf"], "not a whole number"),
        (["--clock", "tick"], "not a clock"),
        (["--controller", "ucx"], "not one of"),
        (["--repeats", "0"], "greater than or equal to 1"),
    ],
)
def test_bad_options_are_refused_before_anything_is_launched(arguments: list[str], message: str) -> None:
    outcome = CliRunner().invoke(app, ["utilisation", *arguments], env={"COLUMNS": "200"})
    assert outcome.exit_code == 2
    assert message in " ".join(outcome.output.replace("│", " ").split())


@pytest.mark.ranks
@pytest.mark.timeout(240)
@pytest.mark.parametrize("framework", ["torch", pytest.param("tensorflow", marks=pytest.mark.tensorflow)])
def test_abs_sgd_uses_what_synchronous_horovod_leaves_idle(framework: str, tmp_path: Path) -> None:
    path = tmp_path / "utilisation.json"
    outcome = CliRunner().invoke(app, ["utilisation", "--quick", "--framework", framework, "--json", str(path)])
    assert outcome.exit_code == 0, outcome.output
    result = json.loads(path.read_text())
    assert set(result["ssgd"]) >= {"samples_per_second", "share_of_ideal", "bound"}
    assert set(result["abs"]) >= {"samples_per_second", "share_of_ideal", "idle_share"}
    assert result["ideal"] == pytest.approx(2200)
    assert result["ssgd"]["share_of_ideal"] <= result["ssgd"]["bound"] + 0.01
    assert result["abs"]["share_of_ideal"] > 1.5 * result["ssgd"]["share_of_ideal"]
    assert result["abs"]["idle_share"] < result["ssgd"]["idle_share"]
    assert framework in result["about"]
    assert result["about"]["parameters"] == pytest.approx(1e6, rel=0.01)
    shares = [rank["share"] for rank in result["repeats"]["abs"][0]["ranks"]]
    assert shares[0] > 1.2 * shares[2] > 1.44 * shares[3]  # 4 : 2 : 1 on a quiet machine
