"""Writes a run log, and the parameters beside it, as a run goes on."""

from __future__ import annotations

import json
import logging
import math
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from horovod_abs import __version__
from horovod_abs.core.ledger import Entry
from horovod_abs.driver import Driver, Log, RoundRecord
from horovod_abs.observe.runlog import COLUMNS, KINDS, Closed, Epoch, EpochEnd, Event, Line, Run, Sampler

logger = logging.getLogger("horovod_abs")


@dataclass(frozen=True)
class Facts:
    """What a run is, besides what its driver knows; see :class:`horovod_abs.observe.runlog.Run`.

    Attributes:
        software: Versions by name.
        exchange: What is averaged.
        clock: When rounds end.
        options: Of the distributed optimizer.
        optimizer: Name of the user's class.
        seed: Of the framework's random numbers.
    """

    software: Mapping[str, str]
    exchange: Mapping[str, Any]
    clock: str
    options: Mapping[str, Any]
    optimizer: str
    seed: int | None = None


class Recorder(Log):
    """Writes down one run, on the first of its ranks. What it writes: :mod:`horovod_abs.observe.runlog`.

    The parameters with which a run begins are saved to ``PATH.initial.pt`` and those of each closing to
    ``PATH.parameters.pt``, so that a replay can begin and compare. Each line is written at once. What cannot be
    written (a full disk) ends the recording with a warning, and not the run.

    Args:
        path: The log, appended to; its folder is made.
        driver: Whose run it is.
        facts: What else there is to say about it.
        learning_rates: The optimizer's learning rates now, by parameter group.
        save_parameters: Writes the parameters to a file, with the number of rounds merged.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(
        self,
        path: str | Path,
        driver: Driver,
        facts: Facts,
        *,
        learning_rates: Callable[[], list[float]],
        save_parameters: Callable[[Path, int], None],
    ) -> None:
        self.path = Path(path)
        self._driver = driver
        self._facts = facts
        self._learning_rates = learning_rates
        self._save_parameters = save_parameters
        self._begun = False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        cut = self.path.exists() and not _ends_with_newline(self.path)
        self._file: TextIO | None = self.path.open("a", buffering=1, encoding="utf-8")
        if cut:
            self._file.write("\n")

    # -- what the driver tells -------------------------------------------------------------------------------------

    def round(self, entry: Entry, record: RoundRecord) -> None:
        """A round was merged. Written out by hand: it happens in every round."""
        self._begin(entry.round)
        self._write(
            f'{{"kind": "round", "round": {entry.round}, "merged_at": {record.merged_at!r}, '
            f'"exchange_seconds": {record.exchange_seconds!r}, "learning_rates": {self._learning_rates()}, '
            f'"rows": {entry.rows.tolist()}}}\n'
        )

    def closed(self) -> None:
        """Nothing is pending."""
        self._line(Closed(self._rounds, self._driver.elapsed))
        self._save(parameters_path(self.path))

    def epoch_begins(self, sampler: Mapping[str, Any] | None) -> None:
        """An epoch begins."""
        self._line(Epoch(self._rounds, self._driver.elapsed, None if sampler is None else Sampler(**sampler)))

    def epoch_ends(self) -> None:
        """The epoch has ended."""
        self._line(EpochEnd(self._rounds, self._driver.elapsed))

    def restarted(self) -> None:
        """The run goes on from somewhere else."""
        self._begun = False

    # -- what the program tells ------------------------------------------------------------------------------------

    def event(self, values: Mapping[str, Any]) -> None:
        """Anything, by name.

        Raises:
            TypeError: a value is neither a number nor text.
        """
        plain = {name: _plain_value(name, value) for name, value in values.items()}
        samples = float(self._driver.engine.ledger.weight.sum())
        self._line(Event(self._rounds, self._driver.elapsed, samples, plain))  # type: ignore[arg-type]  # null: NaN

    # -- inside ----------------------------------------------------------------------------------------------------

    @property
    def _rounds(self) -> int:
        return self._driver.engine.ledger.rounds

    def _begin(self, round: int) -> None:
        """Write the line that a run begins with, as late as possible: a checkpoint may be restored first."""
        if self._begun:
            return
        self._begun = True
        facts = self._facts
        self._line(
            Run(
                software={"horovod_abs": __version__, "python": platform.python_version(), **facts.software},
                ranks=self._driver.engine.ledger.size,
                exchange=dict(facts.exchange),
                clock=facts.clock,
                options=dict(facts.options),
                optimizer=facts.optimizer,
                columns=COLUMNS,
                seed=facts.seed,
                started_at=time.time(),
                at=self._driver.elapsed,
                round=round,
            )
        )
        if round == 0 and self._rounds == 0:
            self._save(initial_path(self.path))

    def _line(self, line: Line) -> None:
        if not isinstance(line, Run):
            self._begin(line.round)
        self._write(json.dumps({"kind": KINDS[type(line)], **asdict(line)}) + "\n")

    def _write(self, text: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(text)
        except (OSError, ValueError) as error:  # ValueError: closed, as the interpreter ends
            self._give_up(error)

    def _save(self, path: Path) -> None:
        if self._file is None:
            return
        unfinished = path.with_name(path.name + ".tmp")
        try:
            self._save_parameters(unfinished, self._rounds)
            unfinished.replace(path)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._file = None
        logger.warning("rank 0: the run is no longer recorded to %s: %s", self.path, error)


def initial_path(path: Path) -> Path:
    """Where the parameters are that a recorded run began with."""
    return path.with_name(path.name + ".initial.pt")


def parameters_path(path: Path) -> Path:
    """Where the parameters are that a recorded run closed with last."""
    return path.with_name(path.name + ".parameters.pt")


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return True
        file.seek(-1, 2)
        return file.read() == b"\n"


def _plain_value(name: str, value: Any) -> float | str | None:
    """A number or text that JSON has; ``None`` for a number that is not finite."""
    if isinstance(value, str):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}={value!r} cannot be logged: log takes numbers and text") from None
    if not math.isfinite(number):
        return None
    return int(value) if isinstance(value, int) else number
