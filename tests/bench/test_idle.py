from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from horovod_abs.bench import idle
from horovod_abs.bench.cli import app
from horovod_abs.bench.idle import QUICK, Setting


def test_the_shape_of_the_papers_figure() -> None:
    """Waiting falls with τ, from a worker that waits for every exchange to practically nobody at τ = 8."""
    shares = {each["staleness"]: each["idle"] for each in idle.measure(QUICK)["idle"]}
    means = [sum(each) / len(each) for each in shares.values()]
    assert means == sorted(means, reverse=True)
    assert min(shares[1]) > 0.7
    for staleness in (8, 12, 16, 24, 32):
        assert max(shares[staleness]) < 0.015
    assert max(shares[16]) == 0


def test_idle_shares_without_jitter_are_known() -> None:
    """τ = 1: one second of computing, three of waiting. τ = 2: two for every five."""
    setting = replace(QUICK, jitter=0.0)
    assert idle.shares(setting, 1) == pytest.approx([0.75] * 4, abs=0.01)
    assert idle.shares(setting, 2) == pytest.approx([0.667] * 4, abs=0.01)
    assert idle.shares(setting, 8) == [0.0] * 4


def test_fast_workers_wait_longer() -> None:
    fast, slow = idle.shares(replace(QUICK, micro_batches=(1.0, 4.0)), 4)
    assert fast > slow + 0.3


@pytest.mark.parametrize("values", [{"micro_batches": ()}, {"exchange": 0.0}, {"jitter": -1.0}, {"staleness": (0,)}])
def test_bad_settings_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"must be (positive|at least 1)"):
        Setting(**values)  # type: ignore[arg-type]


def test_the_command_writes_json_and_a_figure(tmp_path: Path) -> None:
    arguments = [
        "idle",
        "--quick",
        "--staleness",
        "1,8",
        "--plot",
        str(tmp_path / "i.png"),
        "--json",
        str(tmp_path / "i.json"),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "worker 3" in result.output
    assert (tmp_path / "i.png").read_bytes().startswith(b"\x89PNG")
    assert [each["staleness"] for each in json.loads((tmp_path / "i.json").read_text())["idle"]] == [1, 8]
