from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT


@pytest.mark.tensorflow
def test_report_sets_the_round_apart() -> None:
    from horovod_abs.bench import overhead_keras

    seconds = {"plain": [0.1, 0.1, 9.0], "accumulating": [0.104, 0.104], "rounds": [0.124]}
    result = overhead_keras.report(seconds, 40_000_000)
    assert result["time_ratio"] == pytest.approx(1.04)
    assert result["round_ms"] == pytest.approx(20)
    assert result["round_gigabytes_per_second"] == pytest.approx(2.0)


@pytest.mark.tensorflow
@pytest.mark.timeout(300)
def test_accumulating_costs_little(tmp_path: Path) -> None:
    path = tmp_path / "overhead.json"
    arguments = ["bench", "overhead", "--framework", "tensorflow", "--quick", "--json", str(path)]
    subprocess.run([sys.executable, "-m", "horovod_abs", *arguments], cwd=ROOT, check=True)
    result = json.loads(path.read_text())
    assert result["gradient_bytes"] == pytest.approx(4 * 6.3e6, rel=0.01)
    assert result["time_ratio"] < 1.5
    assert result["milliseconds_per_step"]["rounds"] > result["milliseconds_per_step"]["accumulating"]
