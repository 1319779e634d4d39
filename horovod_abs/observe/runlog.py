"""The run log: what ``record=PATH`` writes, one JSON object a line, and its reader.

Every line has a ``"kind"``. Times (``"at"``, ``"merged_at"``) are seconds since the first epoch (without one: since the
first boundary) of rank 0's optimizer, ``"round"`` is the number of exchanges merged before the line (in a ``round``
line: its own number, from 0). The kinds, and their other keys:

- ``run``: ``version`` of this schema; ``software`` versions by name; ``ranks``; ``exchange`` and ``options`` as
  objects; ``clock`` and ``optimizer`` as text; ``columns``, the names of the numbers in a row; ``seed`` of the
  framework's random numbers on rank 0; ``at``, and the same in seconds since 1970, ``started_at``; ``round``, with
  which the run begins: not 0 if it goes on from a checkpoint.
- ``epoch``: an epoch begins. ``round``, ``at``, ``sampler``: ``null``, or of an adaptive sampler ``number``,
  ``length``, ``seed``, ``epoch``, ``shuffle``, ``drain``, ``continued`` (goes on with what was handed out before) and
  ``loading``, by rank ``[samples in a micro-batch, samples drawn ahead]``.
- ``round``: a merged exchange, empty ones included. ``round``, ``merged_at``, ``exchange_seconds`` (rank 0: from launch
  to completion), ``learning_rates`` that the merge used, by parameter group, and ``rows``: one list a rank.
- ``closed``: all ranks have closed, and nothing is pending. ``round``, ``at``.
- ``epoch_end``: the epoch has ended. ``round``, ``at``.
- ``event``: what the program told with ``optimizer.log(…)``. ``round``, ``at``, ``samples`` seen, ``values`` by name
  (numbers or text; ``null`` for a number that is not finite).

Nothing is ever overwritten. A file that exists is appended to: a run begins with a new ``run`` line, and what stands
before it and is not before its ``round`` no longer counts. So a resumed run continues its log, also after a crash that
lost rounds, and a new run in an old file takes the old one's place. A last line that was cut by a crash is ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from horovod_abs.core.ledger import Column, Entry
from horovod_abs.driver import RoundRecord

VERSION = 1
COLUMNS = tuple(column.name.lower() for column in Column)
_WHICH_FILE = "Pass the file that was given to DistributedOptimizer(record=…)"


class RunLogError(ValueError):
    """A run log cannot be read: says where, what is wrong, and what to do."""


# -- what is in a log ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run begins, or goes on from a checkpoint; see the schema above."""

    software: dict[str, str]
    ranks: int
    exchange: dict[str, Any]
    clock: str
    options: dict[str, Any]
    optimizer: str
    columns: tuple[str, ...]
    seed: int | None
    started_at: float
    at: float
    round: int
    version: int = VERSION

    def since_1970(self, at: float) -> float:
        """A time in this part of the log, in seconds since 1970."""
        return self.started_at + at - self.at


@dataclass(frozen=True)
class Sampler:
    """What an adaptive sampler's epoch goes through; see the schema above."""

    number: int
    length: int
    seed: int
    epoch: int
    shuffle: bool
    drain: bool
    continued: bool
    loading: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Epoch:
    """An epoch begins."""

    round: int
    at: float
    sampler: Sampler | None = None


@dataclass(frozen=True)
class Round:
    """A merged exchange."""

    round: int
    merged_at: float
    exchange_seconds: float
    learning_rates: tuple[float, ...]
    rows: tuple[tuple[float, ...], ...]

    @cached_property
    def entry(self) -> Entry:
        """As it stood in the ledger."""
        return Entry(self.round, np.asarray(self.rows, dtype=np.float64))

    @property
    def record(self) -> RoundRecord:
        """As it stood in ``optimizer.history``."""
        return RoundRecord.of(self.entry, self.exchange_seconds, self.merged_at)


@dataclass(frozen=True)
class Closed:
    """All ranks have closed."""

    round: int
    at: float


@dataclass(frozen=True)
class EpochEnd:
    """The epoch has ended."""

    round: int
    at: float


@dataclass(frozen=True)
class Event:
    """What the program told."""

    round: int
    at: float
    samples: float
    values: dict[str, float | str]


Kind = TypeVar("Kind", Run, Epoch, Round, Closed, EpochEnd, Event)
Line = Run | Epoch | Round | Closed | EpochEnd | Event
KINDS: dict[type[Line], str] = {
    Run: "run",
    Epoch: "epoch",
    Round: "round",
    Closed: "closed",
    EpochEnd: "epoch_end",
    Event: "event",
}


@dataclass(frozen=True)
class RunLog:
    """A run, from its first round or from what its log still holds.

    Attributes:
        path: The file.
        lines: All lines that count, in order, with times that go on through resumptions.
    """

    path: Path
    lines: tuple[Line, ...] = field(repr=False)

    @property
    def run(self) -> Run:
        """The line with which the run, or its last part, began."""
        return self.of(Run)[-1]

    @property
    def rounds(self) -> list[Round]:
        """The merged exchanges."""
        return self.of(Round)

    @property
    def events(self) -> list[Event]:
        """What the program told."""
        return self.of(Event)

    @property
    def entries(self) -> list[Entry]:
        """The ledger, for ``ReplayClock``. Raises :class:`RunLogError` if the log lacks its beginning."""
        entries = [line.entry for line in self.rounds]
        missing = next((number for number, entry in enumerate(entries) if entry.round != number), None)
        if missing is not None or not entries:
            raise RunLogError(
                f"{self.path}: round {missing or 0} is missing, so the run cannot be repeated. A run that goes on "
                "from a checkpoint must record to the file of the run before"
            )
        return entries

    @property
    def history(self) -> list[RoundRecord]:
        """The rounds as in ``optimizer.history``."""
        return [line.record for line in self.rounds]

    def refuse_empty(self) -> None:
        """Raise :class:`RunLogError` if no round was merged."""
        if not self.rounds:
            raise RunLogError(f"{self.path}: no round was merged yet, so there is nothing to show. Let the run go on")

    @cached_property
    def pauses(self) -> list[tuple[float, float]]:
        """Stretches of time, by beginning and end, between the closing of one epoch and the beginning of the next.

        The last one has no end if no epoch followed.
        """
        found: list[tuple[float, float]] = []
        closed: float | None = None
        for line in self.lines:
            if isinstance(line, Closed):
                closed = line.at
            elif isinstance(line, Epoch) and closed is not None:
                found.append((closed, line.at))
                closed = None
            elif isinstance(line, Round):
                closed = None
        return found if closed is None else [*found, (closed, math.inf)]

    def training_seconds(self, at: float) -> float:
        """Seconds of training until ``at``: without pauses, in which a program evaluates."""
        return at - sum(min(end, at) - begin for begin, end in self.pauses if begin < at)

    @property
    def samples_per_second(self) -> float:
        """Of training, over all rounds. Raises :class:`RunLogError` if there are none."""
        self.refuse_empty()
        return sum(line.entry.weight for line in self.rounds) / self.training_seconds(self.rounds[-1].merged_at)

    def of(self, kind: type[Kind]) -> list[Kind]:
        """The lines of one kind."""
        return [line for line in self.lines if isinstance(line, kind)]


# -- reading -----------------------------------------------------------------------------------------------------------

Value = TypeVar("Value")


def read_run_log(path: str | Path) -> RunLog:
    """Read what ``record=PATH`` has written; also while the run goes on.

    >>> log = read_run_log("runs/mnist.jsonl")
    >>> log.run.clock
    'SyncClock()'
    >>> sum(round.entry.weight for round in log.rounds)  # samples of all ranks
    64.0

    Args:
        path: The file.

    Raises:
        RunLogError: it is no run log, is damaged, or was written by a later version; names the line.
        OSError: it cannot be read.
    """
    reader = _Reader(Path(path))
    texts = reader.path.read_text(encoding="utf-8", errors="replace").split("\n")
    for number, text in enumerate(texts, start=1):
        following = texts[number] if number < len(texts) else ""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            if not following or following.startswith('{"kind": "run"'):
                continue  # the end of the file, or cut by a crash
            raise _error(
                reader.path, number, f"is not JSON ({error})", "Remove the line, or restore the file"
            ) from None
        reader.take(number, values)
    if not reader.lines:
        raise RunLogError(f"{path}: holds no line of a run log. {_WHICH_FILE}")
    return RunLog(reader.path, tuple(reader.lines))


class _Reader:
    """Puts the lines of a log together, which may hold several runs.

    Attributes:
        lines: Those that count so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[Line] = []
        self._run: Run | None = None
        self._expected = 0
        self._shift = 0.0

    def take(self, number: int, values: Any) -> None:
        """Take the next line, the file's ``number``-th."""
        line = _parse(self.path, number, values)
        if isinstance(line, Run):
            self._begin(number, line)
        elif self._run is None:
            raise _error(self.path, number, "comes before any line of kind 'run'", "Pass the whole file")
        elif isinstance(line, Round):
            self._check_round(number, line, self._run)
            self.lines.append(replace(line, merged_at=line.merged_at + self._shift))
            self._expected += 1
        else:
            self.lines.append(replace(line, at=line.at + self._shift))

    def _begin(self, number: int, run: Run) -> None:
        if (run.version, run.columns) != (VERSION, COLUMNS):
            raise _error(
                self.path,
                number,
                f"has version {run.version} of the run log with columns {', '.join(run.columns)}; this program reads "
                f"version {VERSION} with {', '.join(COLUMNS)}",
                "Read it with the version of horovod_abs that wrote it",
            )
        self.lines = [line for line in self.lines if _counts(line, run.round)]
        self._shift = max(map(_time_of, self.lines), default=0.0)
        self._run, self._expected = replace(run, at=run.at + self._shift), run.round
        self.lines.append(self._run)

    def _check_round(self, number: int, line: Round, run: Run) -> None:
        if line.round != self._expected:
            raise _error(
                self.path,
                number,
                f"has round {line.round}, expected round {self._expected}",
                "Lines are missing or out of order: restore the file",
            )
        if len(line.rows) != run.ranks or any(len(row) != len(COLUMNS) for row in line.rows):
            lengths = sorted({len(row) for row in line.rows})
            raise _error(
                self.path,
                number,
                f"has {len(line.rows)} rows of {lengths} numbers, expected {run.ranks} rows of {len(COLUMNS)}",
                "Restore the file",
            )


def _time_of(line: Line) -> float:
    return line.merged_at if isinstance(line, Round) else line.at


def _counts(line: Line, round: int) -> bool:
    """Whether a line still counts when the run begins anew with ``round``."""
    if isinstance(line, (Run, Round, Epoch)):
        return line.round < round
    return line.round <= round and round > 0


def _parse(path: Path, number: int, values: Any) -> Line:
    kind = values.get("kind") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in _PARSERS:
        raise _error(
            path,
            number,
            f"has kind {kind!r}, none of {', '.join(_PARSERS)}",
            _WHICH_FILE,
        )
    try:
        line: Line = _PARSERS[kind]({key: value for key, value in values.items() if key != "kind"})
    except (KeyError, TypeError, ValueError) as error:
        raise _error(path, number, f"is not a line of kind {kind!r} ({error})", "Restore the file") from None
    return line


def _error(path: Path, number: int, what: str, remedy: str) -> RunLogError:
    return RunLogError(f"{path}, line {number}: {what}. {remedy}")


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is not a number")
    return value


def _tuple(values: Iterable[Any], item: Callable[[Any], Value]) -> tuple[Value, ...]:
    return tuple(item(value) for value in values)


def _parse_run(values: Mapping[str, Any]) -> Run:
    return Run(**{**values, "columns": tuple(values["columns"])})


def _parse_epoch(values: Mapping[str, Any]) -> Epoch:
    sampler = values["sampler"]
    if sampler is not None:
        sampler = Sampler(**{**sampler, "loading": _tuple(sampler["loading"], lambda each: (each[0], each[1]))})
    return Epoch(int(values["round"]), _number(values["at"]), sampler)


def _parse_round(values: Mapping[str, Any]) -> Round:
    return Round(
        round=int(values["round"]),
        merged_at=_number(values["merged_at"]),
        exchange_seconds=_number(values["exchange_seconds"]),
        learning_rates=_tuple(values["learning_rates"], _number),
        rows=_tuple(values["rows"], lambda row: _tuple(row, _number)),
    )


def _parse_event(values: Mapping[str, Any]) -> Event:
    told = {name: math.nan if value is None else value for name, value in values["values"].items()}
    return Event(int(values["round"]), _number(values["at"]), _number(values["samples"]), told)


_PARSERS: dict[str, Callable[[Mapping[str, Any]], Line]] = {
    "run": _parse_run,
    "epoch": _parse_epoch,
    "round": _parse_round,
    "closed": lambda values: Closed(int(values["round"]), _number(values["at"])),
    "epoch_end": lambda values: EpochEnd(int(values["round"]), _number(values["at"])),
    "event": _parse_event,
}
