from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from horovod_abs.bench import overhead
from horovod_abs.bench.cli import app
from horovod_abs.bench.overhead import Memory


def test_report_takes_the_median_of_rounds_and_the_larger_difference() -> None:
    seconds = {"abs": [1.0, 2.2, 30.0], "plain": [1.0, 2.0, 4.0]}
    memory = {"abs": Memory(backward=4.0, step=3.0), "plain": Memory(backward=2.5, step=1.0)}
    result = overhead.report(seconds, memory)
    assert result["time_ratio"] == pytest.approx(1.1)
    assert result["extra_buffers"] == 2.0


@pytest.mark.parametrize(
    ("options", "buffers", "most"),
    [(["--rounds", "5"], 2.0, 2.0), (["--rounds", "5", "--exchange", "lookahead"], 4.0, 4.0)],
)
def test_buffers_and_little_time(
    options: list[str], buffers: float, most: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overhead, "_SIDE", 8)  # an eighth of the work of a real image: the ratio is worse than real
    path = tmp_path / "overhead.json"
    outcome = CliRunner().invoke(app, ["overhead", *options, "--json", str(path)])
    assert outcome.exit_code == 0, outcome.output
    result = json.loads(path.read_text())
    assert buffers - 1 < result["extra_buffers"] <= buffers
    assert result["peak_buffers"]["plain"]["step"] == pytest.approx(1.0, abs=1e-3)
    assert result["time_ratio"] < most
    assert "extra memory" in outcome.output
