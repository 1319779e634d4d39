"""The run log's writer."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from horovod_abs.observe.runlog import read_run_log
from tests.observe.recorded import Cluster


def test_nothing_is_written_before_something_happens(tmp_path: Path) -> None:
    Cluster(tmp_path / "runs" / "today" / "run.jsonl")
    assert (tmp_path / "runs" / "today" / "run.jsonl").read_text() == ""


def test_each_line_is_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    cluster = Cluster(path)
    lengths = []
    for batch in cluster.driver.epoch([16] * 5, lambda batch: batch):
        cluster.driver.micro_batch_done(batch, 1.0)
        lengths.append(len(read_run_log(path).rounds))
    assert lengths == [cluster.driver.history.index(r) + 1 if r else 0 for r in [None, *cluster.driver.history][:5]]


def test_parameters_are_saved_when_a_run_begins_and_whenever_it_closes(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run.jsonl")
    cluster.epoch(3)
    first = cluster.driver.engine.ledger.rounds
    cluster.epoch(2)
    names = [f"run.jsonl.{name}.pt.tmp" for name in ("initial", "parameters", "parameters")]
    assert cluster.saved == list(zip(names, [0, first, cluster.driver.engine.ledger.rounds], strict=True))
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == ["run.jsonl", "run.jsonl.initial.pt", "run.jsonl.parameters.pt"]


def test_a_run_that_goes_on_leaves_the_first_parameters_alone(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run.jsonl", rounds=5)
    cluster.epoch(3)
    assert [name for name, _ in cluster.saved] == ["run.jsonl.parameters.pt.tmp"]


def test_a_state_that_is_loaded_begins_a_new_part(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run.jsonl")
    cluster.epoch(3)
    state = cluster.driver.engine.state_dict()
    rounds = cluster.driver.engine.ledger.rounds
    cluster.epoch(3)
    cluster.driver.engine.load_state_dict(state)
    cluster.recorder.restarted()
    cluster.epoch(2)
    log = read_run_log(tmp_path / "run.jsonl")
    assert log.run.round == rounds
    assert [line.round for line in log.rounds] == list(range(cluster.driver.engine.ledger.rounds))


def test_a_full_disk_ends_the_recording_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    path = tmp_path / "run.jsonl"
    path.symlink_to(full)
    with caplog.at_level(logging.WARNING):
        cluster = Cluster(path)
        cluster.epoch(3)
        cluster.epoch(3)
    (record,) = caplog.records
    assert "the run is no longer recorded to" in record.getMessage()
    assert "No space left" in record.getMessage()


@pytest.mark.parametrize("value", [None, [1.0], {"a": 1}])
def test_only_numbers_and_text_can_be_told(value: object, tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run.jsonl")
    with pytest.raises(TypeError, match=r"loss=.* cannot be logged: log takes numbers and text"):
        cluster.recorder.event({"loss": value})
