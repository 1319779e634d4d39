"""Ranks of a recorded run as models."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod_abs.core.ledger import Column
from horovod_abs.observe.runlog import RunLogError
from horovod_abs.plan.clusters import ClusterError, load
from horovod_abs.plan.recorded import rank_of
from tests.observe.test_timeline import log_of


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
