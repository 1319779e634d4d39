"""The run log's reader: what counts, and what is wrong with a file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horovod_abs.core.clocks import ReplayClock
from horovod_abs.core.ledger import Flag
from horovod_abs.observe.runlog import COLUMNS, Closed, Epoch, EpochEnd, Run, RunLogError, read_run_log
from tests.observe.recorded import Cluster, recorded


def test_all_that_happened_is_there_in_order(tmp_path: Path) -> None:
    log = recorded(tmp_path / "run.jsonl", epochs=(3,))
    kinds = [type(line).__name__ for line in log.lines]
    assert kinds == ["Run", "Epoch", *["Round"] * len(log.rounds), "Closed", "EpochEnd", "Event"]
    assert (log.run.ranks, log.run.optimizer, log.run.seed, log.run.round) == (2, "SGD", 3, 0)
    assert log.run.software.keys() == {"horovod_abs", "python", "torch"}
    assert log.of(Closed) == [Closed(len(log.rounds), 3.0)]
    (event,) = log.events
    assert event.values == {"accuracy": 0.5, "loss": 2.0}
    assert (event.round, event.at, event.samples) == (len(log.rounds), 13.0, 2 * 3 * 16)


def test_rows_are_exact_and_become_entries_and_records_again(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run.jsonl", ranks=3)
    entries: list[Any] = []
    cluster.driver.on_entry.append(entries.append)
    cluster.epoch(4)
    log = read_run_log(tmp_path / "run.jsonl")
    assert [entry.round for entry in log.entries] == [entry.round for entry in entries] != []
    for read, entry in zip(log.entries, entries, strict=True):
        np.testing.assert_array_equal(read.rows, entry.rows)
    assert log.entries[-1].all_raised(Flag.CLOSING)
    assert log.history == list(cluster.driver.history)
    ReplayClock(log.entries)


def test_every_line_is_plain_json_with_the_documented_keys(tmp_path: Path) -> None:
    recorded(tmp_path / "run.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    keys = {line["kind"]: sorted(line) for line in lines}
    assert keys["round"] == ["exchange_seconds", "kind", "learning_rates", "merged_at", "round", "rows"]
    assert keys["epoch"] == ["at", "kind", "round", "sampler"]
    assert keys["event"] == ["at", "kind", "round", "samples", "values"]
    assert lines[0]["columns"] == list(COLUMNS)


def test_a_number_that_is_not_finite_is_null_and_comes_back_as_nan(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run.jsonl")
    cluster.recorder.event({"loss": float("inf"), "note": "diverged"})
    assert "Infinity" not in (tmp_path / "run.jsonl").read_text()
    (event,) = read_run_log(tmp_path / "run.jsonl").events
    assert math.isnan(float(event.values["loss"]))
    assert event.values["note"] == "diverged"


def test_time_between_epochs_is_no_training_time(tmp_path: Path) -> None:
    log = recorded(tmp_path / "run.jsonl", epochs=(3, 4))
    assert log.pauses == [(3.0, 13.0), (17.0, math.inf)]
    assert [log.training_seconds(at) for at in (2.0, 8.0, 13.0, 17.0)] == [2.0, 3.0, 3.0, 7.0]
    assert [log.training_seconds(event.at) for event in log.events] == [3.0, 7.0]


# -- several runs in one file ----------------------------------------------------------------------------------------


def test_a_resumed_run_takes_the_place_of_the_rounds_that_were_lost(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    first = recorded(path, epochs=(5, 4))
    taken_at = first.of(Closed)[0].round
    assert taken_at < len(first.rounds)
    resumed = Cluster(path, rounds=taken_at)
    resumed.epoch(2)
    log = read_run_log(path)
    assert [line.round for line in log.rounds] == list(range(resumed.driver.engine.ledger.rounds))
    assert [line.round for line in log.of(Run)] == [0, taken_at]
    assert [line.round for line in log.of(Epoch)] == [0, taken_at]
    assert [line.round for line in log.of(EpochEnd)] == [taken_at, len(log.rounds)]
    assert [event.values["accuracy"] for event in log.events] == [0.5], "what was told after the checkpoint is lost"
    merged_at = [line.merged_at for line in log.rounds]
    assert merged_at == sorted(merged_at), "time goes on"


def test_a_new_run_in_an_old_file_takes_its_place(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorded(path, epochs=(9, 9))
    before = path.read_text()
    log = recorded(path, epochs=(2,))
    assert len(log.of(Run)) == len(log.of(Epoch)) == len(log.events) == 1
    assert path.read_text().startswith(before), "nothing is overwritten"


def test_a_run_that_goes_on_in_another_file_can_be_read_but_not_repeated(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run.jsonl", rounds=7)
    cluster.epoch(3)
    log = read_run_log(tmp_path / "run.jsonl")
    assert log.rounds[0].round == 7
    with pytest.raises(RunLogError, match=r"round 0 is missing.*must record to the file of the run before"):
        log.entries  # noqa: B018


# -- damage ------------------------------------------------------------------------------------------------------------


def test_a_last_line_cut_by_a_crash_is_ignored_and_a_later_run_goes_on_after_it(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    whole = recorded(path, epochs=(5,))
    rounds = len(whole.rounds)
    for cut in ('{"kind": "round", "rou', '{"kind": "run'):
        with path.open("a") as file:
            file.write(cut)
        assert len(read_run_log(path).rounds) == rounds
        resumed = Cluster(path, rounds=rounds)
        resumed.epoch(3)
        rounds = resumed.driver.engine.ledger.rounds
        assert len(read_run_log(path).rounds) == rounds


@pytest.mark.parametrize(
    ("line", "text", "message"),
    [
        (3, "not json", r"line 4: is not JSON.*Remove the line"),
        (3, "", r"line 4: is not JSON"),
        (3, '{"kind": "lap"}', r"line 4: has kind 'lap', none of run, .*DistributedOptimizer\(record=…\)"),
        (3, "[1, 2]", "line 4: has kind None"),
        (3, '{"kind": "round", "round": 1}', "line 4: is not a line of kind 'round'.*merged_at.*Restore the file"),
        (3, '{"kind": "closed", "round": 1, "at": "noon"}', "line 4: is not a line of kind 'closed'.*'noon'"),
        (3, None, "line 4: has round 2, expected round 1. Lines are missing"),
        (0, None, "line 1: comes before any line of kind 'run'"),
        (0, '{"kind": "run", "version": 2}', "line 1: is not a line of kind 'run'"),
    ],
)
def test_what_is_wrong_is_said_with_file_line_and_remedy(
    line: int, text: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    recorded(path)
    lines = path.read_text().splitlines()
    lines[line : line + 1] = [] if text is None else [text]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(RunLogError, match=message) as caught:
        read_run_log(path)
    assert str(caught.value).startswith(f"{path}, line ")


@pytest.mark.parametrize(("key", "value"), [("version", 2), ("columns", ["weight"])])
def test_another_version_is_refused(key: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorded(path)
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(first), key: value}), *rest]))
    with pytest.raises(RunLogError, match=r"line 1: has version .* Read it with the version of horovod_abs that wrote"):
        read_run_log(path)


def test_rows_of_another_number_of_ranks_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorded(path, ranks=2)
    text = path.read_text().replace('"ranks": 2', '"ranks": 3')
    path.write_text(text)
    with pytest.raises(RunLogError, match=r"line 3: has 2 rows of .9. numbers, expected 3 rows of 9"):
        read_run_log(path)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.jsonl").write_text("")
    with pytest.raises(RunLogError, match="holds no line of a run log"):
        read_run_log(tmp_path / "run.jsonl")
