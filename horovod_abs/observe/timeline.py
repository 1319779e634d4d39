"""A timeline of every rank's compute, exchange and wait, for chrome://tracing or https://ui.perfetto.dev.

Written in the Trace Event Format: a process for each rank, with a thread for what it does and one for its exchanges.

What is measured is when each rank launched each exchange, how long it computed and waited in the round before that,
and when rank 0 saw the exchange complete. Within a round the order is that of the rule: a rank merges and loads,
computes, and waits only when it may compute no more. Its micro-batches are shown as one block that ends where the
waiting begins. Ranks on several hosts are as far apart as their clocks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from horovod_abs.core.ledger import Column, Floats
from horovod_abs.observe.runlog import Closed, Epoch, Event, Round, Run, RunLog

Trace = dict[str, Any]

_DOING, _EXCHANGING = 0, 1
_COLOURS = {"compute": "thread_state_running", "wait": "terrible", "exchange": "thread_state_iowait"}


def trace(log: RunLog) -> Trace:
    """The timeline of a recorded run, as what a trace file holds.

    Raises:
        RunLogError: no round was merged.
    """
    log.refuse_empty()
    events = [*_names(log), *_rounds(log), *_moments(log)]
    begin = min(event["ts"] for event in events if "ts" in event)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - begin, 3)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"clock": log.run.clock, "exchange": str(log.run.exchange), "started_at": log.run.started_at},
    }


def write_trace(log: RunLog, path: Path) -> None:
    """Write the timeline of a recorded run to a file, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trace(log)))


def _names(log: RunLog) -> Iterator[Trace]:
    for rank in range(log.run.ranks):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for thread, name in ((_DOING, "compute and wait"), (_EXCHANGING, "exchange")):
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": name}}


def _rounds(log: RunLog) -> Iterator[Trace]:
    """The events of all rounds."""
    lines = [line for line in log.lines if isinstance(line, (Run, Epoch, Round))]
    before: Floats | None = None
    for line, following in zip(lines, [*lines[1:], None], strict=True):
        if not isinstance(line, Round):
            before = None  # what the program did before is no part of the round
            continue
        next_launches = following.entry.column(Column.LAUNCHED_AT) if isinstance(following, Round) else None
        for rank in range(len(line.rows)):
            yield from _round_of(line, rank, before)
            yield _exchange_of(line, rank, None if next_launches is None else float(next_launches[rank]))
        before = line.entry.column(Column.LAUNCHED_AT)


def _round_of(line: Round, rank: int, before: Floats | None) -> Iterator[Trace]:
    """A rank's compute and wait before it launched, and how much it had to launch."""
    row = line.entry.rows[rank]
    end, computing, waiting = (
        float(row[column]) for column in (Column.LAUNCHED_AT, Column.COMPUTE_SECONDS, Column.WAIT_SECONDS)
    )
    if before is not None and computing + waiting > end - before[rank]:  # a replay's ledger has the recorded times
        scale = max(end - float(before[rank]), 0.0) / (computing + waiting)
        computing, waiting = computing * scale, waiting * scale
    if computing:
        args = {"samples": row[Column.WEIGHT], "micro-batches": row[Column.MICRO_BATCHES]}
        yield _block("compute", line.round, rank, _DOING, end - waiting - computing, computing, args)
    if waiting:
        yield _block("wait", line.round, rank, _DOING, end - waiting, waiting, {})
    counter = {"ph": "C", "name": "samples in the round", "pid": rank, "ts": _microseconds(end)}
    yield {**counter, "args": {"samples": row[Column.WEIGHT]}}


def _exchange_of(line: Round, rank: int, next_launch: float | None) -> Trace:
    """The exchange as a rank saw it: from its launch until it was complete, and at the latest until its next launch."""
    launches = line.entry.column(Column.LAUNCHED_AT)
    begin, last = float(launches[rank]), float(launches.max())
    end = max(float(launches[0]) + line.exchange_seconds, last)
    end = end if next_launch is None else min(end, next_launch)
    args = {"waited for": f"rank {int(launches.argmax())}", "until all had launched (s)": round(last - begin, 6)}
    return _block("exchange", line.round, rank, _EXCHANGING, begin, max(end - begin, 0.0), args)


def _block(what: str, round: int, rank: int, thread: int, begin: float, seconds: float, args: Trace) -> Trace:
    return {
        "ph": "X",
        "name": what,
        "cat": what,
        "cname": _COLOURS[what],
        "pid": rank,
        "tid": thread,
        "ts": _microseconds(begin),
        "dur": _microseconds(seconds),
        "args": {"round": round, **args},
    }


def _moments(log: RunLog) -> Iterator[Trace]:
    """Closings, epochs and what the program told, on the clock of rank 0."""
    run = log.of(Run)[0]
    for line in log.lines:
        run = line if isinstance(line, Run) else run
        if not isinstance(line, (Closed, Epoch, Event)):
            continue
        values = line.values if isinstance(line, Event) else {}
        name = ", ".join(f"{key} {value}" for key, value in values.items()) or type(line).__name__.lower()
        at = _microseconds(run.since_1970(line.at))
        yield {"ph": "i", "s": "g", "name": name, "pid": 0, "tid": _DOING, "ts": at, "args": {"round": line.round}}


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)
