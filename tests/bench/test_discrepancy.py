from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from horovod_abs.bench import discrepancy
from horovod_abs.bench.cli import app
from horovod_abs.bench.discrepancy import Setting

SMALL = Setting(workers=(2, 8, 16), staleness=(1, 4, 12), begin=16, end=40)


def test_the_shape_of_the_papers_figure() -> None:
    """About linear in τ and flat in the number of workers; growing with the workers if gradients are delayed."""
    result = discrepancy.measure(SMALL)
    distance = {(each["workers"], each["staleness"]): each["distance"] for each in result["model_updates"]}
    delayed = {each["workers"]: each["distance"] for each in result["gradient_delay"]}
    assert min(result["linearity"].values()) > 0.98
    for workers in SMALL.workers:
        assert distance[workers, 12] > 2.5 * distance[workers, 1]
    for staleness in SMALL.staleness:
        assert distance[16, staleness] == pytest.approx(distance[8, staleness], rel=0.15)
        assert distance[16, staleness] < 1.6 * distance[2, staleness], "√2 of it because two lie around their average"
    assert delayed[16] > 1.6 * delayed[8] > 1.6**2 * delayed[2]
    assert result["growth"]["gradient_delay"] > 3 * result["growth"]["model_updates"]


def test_the_same_seed_gives_the_same_numbers() -> None:
    setting = replace(SMALL, workers=(2,), staleness=(4,))
    first, second = (discrepancy.measure(setting) for _ in range(2))
    assert first == second
    assert first != discrepancy.measure(replace(setting, seed=1))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"workers": (1, 2)}, "from 2 to 32"),
        ({"workers": (64,)}, "from 2 to 32"),
        ({"staleness": (0,)}, "at least 1"),
        ({"staleness": (200,)}, "no whole round"),
        ({"end": 50}, "no whole round"),
    ],
)
def test_bad_settings_are_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Setting(**values)  # type: ignore[arg-type]


def test_the_command_writes_json_and_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discrepancy, "QUICK", replace(SMALL, workers=(2, 3), staleness=(1, 2), end=20))
    arguments = [
        "discrepancy",
        "--quick",
        "--plot",
        str(tmp_path / "a" / "figure.png"),
        "--json",
        str(tmp_path / "b.json"),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "gradient delay" in result.output
    assert (tmp_path / "a" / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((tmp_path / "b.json").read_text())["model_updates"]) == 4


def test_the_command_refuses_bad_numbers() -> None:
    result = CliRunner().invoke(app, ["discrepancy", "--workers", "2,99"])
    assert result.exit_code == 2
    assert "from 2 to 32" in result.output
