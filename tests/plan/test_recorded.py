"""Ranks of a recorded run as models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from horovod_abs.cli import app
from horovod_abs.core.ledger import Column
from horovod_abs.observe.runlog import RunLogError
from horovod_abs.plan.clusters import ClusterError, load
from horovod_abs.plan.recorded import cluster_of, rank_of
from horovod_abs.sim.network import Measured
from tests.observe.test_timeline import EXCHANGE, log_of


def test_a_rank_computes_as_fast_as_it_did(tmp_path: Path) -> None:
    log = log_of(tmp_path / "run.jsonl", rounds=6, ranks=3)
    rows = log.rounds[0].rows[1]
    of_a_sample = rows[Column.COMPUTE_SECONDS] / rows[Column.WEIGHT]
    assert rank_of(log, 1).mean_rate(16) == pytest.approx(1 / of_a_sample)


def test_a_rank_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunLogError, match="has 3 ranks, none of number 3"):
        rank_of(log_of(tmp_path / "run.jsonl", ranks=3), 3)


def test_a_cluster_file_plays_a_rank_of_a_log_beside_it(tmp_path: Path) -> None:
    log = log_of(tmp_path / "run.jsonl", rounds=6, ranks=3)
    text = '[micro_batch]\nsample_ms = 1.0\n[[ranks]]\n[[ranks]]\ntrace = {{ log = "{}", rank = 2 }}\n'
    file = tmp_path / "lab.toml"
    file.write_text(text.format("run.jsonl"))
    cluster = load(file)
    assert cluster.mean_rate(1) == pytest.approx(rank_of(log, 2).mean_rate(16))
    assert cluster.mean_rate(0) == pytest.approx(1000)
    file.write_text(text.format("nowhere.jsonl"))
    with pytest.raises(ClusterError, match=r"nowhere\.jsonl"):
        load(file)


def test_the_cluster_of_a_log(tmp_path: Path) -> None:
    log = log_of(tmp_path / "run.jsonl", rounds=6, ranks=3)
    cluster = cluster_of(log)
    assert (cluster.name, cluster.size, cluster.samples) == ("run", 3, 16)
    assert [cluster.mean_rate(rank) for rank in range(3)] == [rank_of(log, rank).mean_rate(16) for rank in range(3)]
    assert isinstance(cluster.network, Measured)
    assert cluster.network.seconds == pytest.approx(EXCHANGE - 0.02), "from the launch of the last rank, 20 ms later"
    computed, waited = (log.rounds[0].rows[0][column] for column in (Column.COMPUTE_SECONDS, Column.WAIT_SECONDS))
    assert cluster.merge_seconds == pytest.approx(1.0 - computed - waited), "what is left of a round of one second"


def test_what_was_measured_alone_counts_more_than_what_was_seen(tmp_path: Path) -> None:
    log = log_of(tmp_path / "run.jsonl", rounds=6)
    run = replace(log.run, options={**log.run.options, "allreduce_seconds": 0.125})
    assert cluster_of(replace(log, lines=(run, *log.lines[1:]))).network == Measured(0.125)


def test_a_single_round_is_too_little(tmp_path: Path) -> None:
    with pytest.raises(RunLogError, match=r"run\.jsonl: holds a single round\. Record a longer run"):
        cluster_of(log_of(tmp_path / "run.jsonl", rounds=1))


def test_the_command_simulates_a_recorded_run(tmp_path: Path) -> None:
    log = log_of(tmp_path / "run.jsonl", rounds=6)
    outcome = CliRunner().invoke(app, ["simulate", "--from-log", str(log.path)])
    assert outcome.exit_code == 0, outcome.output
    assert f"The recorded run itself did {log.samples_per_second:,.0f} samples/s." in outcome.output
    assert "run: 3 ranks, an exchange takes 0.23 s" in outcome.output
    for wrong in (["mixed", "--from-log", str(log.path)], ["--from-log", str(log.path), "--model-mb", "4"], []):
        outcome = CliRunner().invoke(app, ["simulate", *wrong])
        assert outcome.exit_code == 1
        assert "pass a cluster, or --from-log without --model-mb" in outcome.output
