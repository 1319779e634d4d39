from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from horovod_abs.bench import scaling
from horovod_abs.bench.cli import app
from horovod_abs.bench.hosts import unavailable
from horovod_abs.bench.scaling import WAYS, Setting


def test_clusters_and_what_they_could_do_alone() -> None:
    setting = Setting((1, 2), (1.0, 0.5), micro_batch_ms=100)
    assert setting.clusters == [(1.0,), (1.0, 1.0), (1.0, 0.5)]
    assert [setting.utilisation(speeds).ideal for speeds in setting.clusters] == pytest.approx([160, 320, 240])
    assert setting.utilisation((1.0, 0.5)).micro_batch_ms == (100, 200)


@pytest.mark.parametrize(
    "values", [{"hosts": (), "mixed": ()}, {"rounds": 1}, {"micro_batch_ms": -1.0}, {"rate": "1gb"}]
)
def test_bad_settings_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"at least|positive|not a rate"):
        Setting(**values)


def test_report_keeps_clusters_and_ways_apart() -> None:
    setting = Setting((2,), (1.0, 0.5))
    row = {"samples_per_second": 80.0, "share_of_ideal": 0.25, "idle_share": 0.5, "mean_batch": 32.0}
    results = [{**dict.fromkeys(WAYS, row), "ideal": ideal} for ideal in (320.0, 240.0)]
    result = scaling.report(setting, "mpi", results)
    assert [(each["speeds"], each["ideal"]) for each in result["clusters"]] == [([1.0, 1.0], 320), ([1.0, 0.5], 240)]
    assert list(result["clusters"][0]["ways"]) == list(WAYS)
    assert json.loads(json.dumps(result))["setting"]["mixed"] == [1.0, 0.5]
    assert scaling.to_table(result).row_count == 2 * len(WAYS)


def test_bad_options_are_refused_before_anything_is_started() -> None:
    for arguments, message in ((["--hosts", "x"], "whole number"), (["--hosts", "none", "--mixed", "none"], "hosts")):
        outcome = CliRunner().invoke(app, ["scaling", *arguments], env={"COLUMNS": "200"})
        assert outcome.exit_code == 2
        assert message in outcome.output


@pytest.mark.hosts
@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_who_does_not_wait_for_the_network_does_more(tmp_path: Path) -> None:
    if reason := unavailable():
        pytest.skip(reason)
    path = tmp_path / "scaling.json"
    small = ["--hosts", "none", "--mixed", "1,0.5", "--parameters", "1e6", "--rate", "100mbit", "--rounds", "10"]
    outcome = CliRunner().invoke(app, ["scaling", *small, "--micro-batch-ms", "50", "--json", str(path)])
    assert outcome.exit_code == 0, outcome.output
    (cluster,) = json.loads(path.read_text())["clusters"]
    share = {name: way["share_of_ideal"] for name, way in cluster["ways"].items()}
    assert share["ssgd"] < share["local"] < share["abs"], "0.32 s of exchange, 0.1 s of computing"
    assert share["updates"] > 1.5 * share["ssgd"]
