from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from horovod_abs.bench import target
from horovod_abs.bench.cli import app
from horovod_abs.bench.target import Setting


@pytest.mark.parametrize("tick", [0.001, None], ids=["rank 0 keeps the time", "each rank does"])
def test_the_target_is_held_before_and_after_a_rank_slows_down(tick: float | None) -> None:
    result = target.measure(Setting(rounds=100, tick=tick))
    for held in (result["before"], result["after"]):
        assert held["mean"] == pytest.approx(320, rel=0.05)
        assert held["near"] >= 0.95
        assert held["far_until"] <= target.SETTLED
    slowed = [round[1] for round in result["batches"]]
    assert sum(slowed[120:]) < 0.75 * sum(slowed[20:100]), "it really did less"


def test_where_the_target_cannot_be_held_the_result_says_so() -> None:
    """No round is shorter than the exchange."""
    held = target.measure(Setting(samples=256, exchange=1.0, rounds=30))["before"]
    assert held["mean"] > 1.5 * 256
    assert held["near"] == 0
    assert held["far_until"] == 2 * target.SETTLED


@pytest.mark.parametrize(
    "values", [{"samples": 0}, {"micro_batches": ()}, {"exchange": 0.0}, {"slower": 4}, {"rounds": 10}]
)
def test_bad_settings_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"positive|no rank 4|more than 10"):
        replace(Setting(), **values)  # type: ignore[arg-type]


def test_the_command_writes_json_and_a_figure(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "t.json"), "--plot", str(tmp_path / "t.png")]
    result = CliRunner().invoke(app, ["target", "--samples", "400", "--rounds", "30", *files], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert "TargetBatchClock(400)" in result.output
    assert len(json.loads((tmp_path / "t.json").read_text())["batches"]) == 60
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_bad_options_are_refused() -> None:
    assert CliRunner().invoke(app, ["target", "--samples", "-1"]).exit_code == 2
