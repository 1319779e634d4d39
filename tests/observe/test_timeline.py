from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from horovod_abs.core.ledger import Entry
from horovod_abs.driver import RoundRecord
from horovod_abs.observe.runlog import RunLog, RunLogError, read_run_log
from horovod_abs.observe.timeline import trace, write_trace
from tests.observe.recorded import Cluster, spread_out

EXCHANGE = 0.25


def log_of(path: Path, rounds: int = 4, ranks: int = 3) -> RunLog:
    """Rounds of a second each; rank i launches 10·i ms after rank 0, and an exchange takes a quarter of a second."""
    cluster = Cluster(path, ranks)
    cluster.recorder.epoch_begins(None)
    for number, rows in enumerate(spread_out(rounds, ranks)):
        entry = Entry(number, rows)
        cluster.now = number + 1 + EXCHANGE
        cluster.recorder.round(entry, RoundRecord.of(entry, EXCHANGE, cluster.now))
    cluster.recorder.event({"accuracy": 0.5, "loss": float("nan")})
    return read_run_log(path)


def blocks(events: list[dict[str, Any]], what: str, rank: int) -> list[tuple[float, float]]:
    """Beginning and end, in milliseconds from the first launch of rank 0."""
    launch = min(event["ts"] for event in events if event.get("cat") == "exchange" and event["pid"] == 0)
    return [
        (round((e["ts"] - launch) / 1e3, 2), round((e["ts"] + e["dur"] - launch) / 1e3, 2))
        for e in events
        if e.get("cat") == what and e["pid"] == rank
    ]


def test_compute_wait_and_exchange_lie_where_they_were(tmp_path: Path) -> None:
    events = trace(log_of(tmp_path / "run.jsonl"))["traceEvents"]
    # rank 1 launches at 10 ms, after computing 800 ms and waiting 50 ms
    assert blocks(events, "compute", 1)[:2] == [(-840, -40), (160, 960)]
    assert blocks(events, "wait", 1)[:2] == [(-40, 10), (960, 1010)]
    assert blocks(events, "exchange", 1)[:2] == [(10, 250), (1010, 1250)]
    assert blocks(events, "wait", 0) == []
    assert [len(blocks(events, "compute", rank)) for rank in range(3)] == [4, 4, 4]


def test_each_rank_is_a_process_with_a_name(tmp_path: Path) -> None:
    events = trace(log_of(tmp_path / "run.jsonl"))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    counters = [event["args"]["samples"] for event in events if event["ph"] == "C" and event["pid"] == 1]
    assert counters == [32.0] * 4


def test_an_exchange_says_whom_it_waited_for(tmp_path: Path) -> None:
    events = trace(log_of(tmp_path / "run.jsonl"))["traceEvents"]
    exchange = next(event for event in events if event.get("cat") == "exchange" and event["pid"] == 0)
    assert exchange["args"] == {"round": 0, "waited for": "rank 2", "until all had launched (s)": 0.02}


def test_an_exchange_ends_at_the_latest_when_the_next_one_begins(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    log_of(path)
    path.write_text(path.read_text().replace('"exchange_seconds": 0.25', '"exchange_seconds": 1.75'))
    events = trace(read_run_log(path))["traceEvents"]
    assert blocks(events, "exchange", 2)[:2] == [(20, 1020), (1020, 2020)]


def test_a_round_never_lasts_longer_than_it_can_have(tmp_path: Path) -> None:
    """In a run of a ReplayClock the ledger tells the times of the run that is repeated."""
    path = tmp_path / "run.jsonl"
    cluster = Cluster(path, 1)
    rows = spread_out(3, 1)
    rows[:, :, 3] = 30.0
    for number, each in enumerate(rows):
        cluster.recorder.round(Entry(number, each), RoundRecord.of(Entry(number, each), EXCHANGE, number + 1.0))
    events = trace(read_run_log(path))["traceEvents"]
    assert blocks(events, "compute", 0)[1:] == [(0, 1000), (1000, 2000)]


def test_the_file_is_what_the_viewers_read(tmp_path: Path) -> None:
    log = log_of(tmp_path / "run.jsonl")
    write_trace(log, tmp_path / "new" / "trace.json")
    read = json.loads((tmp_path / "new" / "trace.json").read_text(), parse_constant=pytest.fail)
    assert read["traceEvents"] == trace(log)["traceEvents"]
    for event in read["traceEvents"]:
        assert event["ph"] in {"M", "X", "C", "i"}
        assert event["ph"] == "M" or event["ts"] >= 0
        assert event["ph"] != "X" or event["dur"] >= 0
    (told,) = [event for event in read["traceEvents"] if event["ph"] == "i" and "accuracy" in event["name"]]
    assert told["name"] == "accuracy 0.5, loss nan"


def test_a_run_without_a_round_is_refused(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run.jsonl")
    cluster.recorder.event({"accuracy": 0.5})
    with pytest.raises(RunLogError, match="no round was merged yet"):
        trace(read_run_log(tmp_path / "run.jsonl"))
