from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from horovod_abs.bench.cli import app
from horovod_abs.bench.scale import Setting, measure, pays_up_to
from horovod_abs.plan.clusters import load
from horovod_abs.sim.models import ClusterModel
from horovod_abs.sim.network import Measured


def test_who_waits_pays_less_far_than_who_does_not() -> None:
    setting = Setting(load("permanent"), (4, 16), (1.0, 100.0), ("synchronous", "asynchronous", "abs"), seconds=10.0)
    result = measure(setting)
    assert [pays_up_to(result, "asynchronous", gbit) for gbit in (1.0, 100.0)] == ["never", "all"]
    assert [pays_up_to(result, "abs", gbit) for gbit in (1.0, 100.0)] == ["all", "all"]
    assert pays_up_to(result, "synchronous", 1.0) == "never"
    assert all(each["share"] > 0.9 for each in result["found"] if each["algorithm"] == "abs")


def test_the_most_workers_are_those_before_the_first_at_which_it_does_not_pay() -> None:
    found = [
        {"algorithm": "abs", "gbit": 1.0, "workers": workers, "share": share}
        for workers, share in ((4, 0.9), (8, 0.4), (16, 0.6))
    ]
    assert pays_up_to({"workers": [4, 8, 16], "found": found}, "abs", 1.0) == "4"


def test_what_cannot_be_simulated_is_refused() -> None:
    cluster = load("mixed")
    measured = ClusterModel("measured", cluster.ranks, Measured(0.1))
    with pytest.raises(ValueError, match="no bandwidth to change"):
        Setting(measured)
    with pytest.raises(ValueError, match="is not an algorithm"):
        Setting(cluster, algorithms=("x",))
    with pytest.raises(ValueError, match="at least one"):
        Setting(cluster, gbit=())


def test_the_command_prints_writes_and_draws(tmp_path: Path) -> None:
    names = {"json": "s.json", "plot": "s.png", "report": "R.md"}
    files = [f"--{option}={tmp_path / name}" for option, name in names.items()]
    few = ["--workers=4,8", "--gbit=1", "--algorithms=synchronous,abs", "--seconds=5"]
    result = CliRunner().invoke(app, ["scale", *few, *files], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    assert "ABS-SGD" in result.output
    assert len(json.loads((tmp_path / "s.json").read_text())["found"]) == 4
    assert (tmp_path / "s.png").read_bytes().startswith(b"\x89PNG")
    assert "| ABS-SGD |" in (tmp_path / "R.md").read_text()
    assert CliRunner().invoke(app, ["scale", "--algorithms=x"]).exit_code == 2
