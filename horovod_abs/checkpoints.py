"""Checkpoints from which a run goes on as if it had not been stopped, whatever the framework."""

from __future__ import annotations

import random
import re
import shutil
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from horovod_abs.core.ledger import Flag
from horovod_abs.rounds import Rounds, rounds_of

_NAME = re.compile(r"checkpoint-(\d+)")


class Checkpoints:
    """When checkpoints are written, by whom, under which names; a framework says what is in them.

    Args:
        directory: Where checkpoints are written, by rank 0, and read, by rank 0.
        optimizer: Made by ``DistributedOptimizer``.
        keep: Checkpoints to keep; older ones are removed.
        signals: Whether to handle SIGTERM and SIGUSR1.

    Raises:
        ValueError: ``keep`` is less than 1.
    """

    suffix = ""
    """Of a checkpoint's name."""

    def __init__(self, directory: str | Path, optimizer: Any, *, keep: int = 3, signals: bool = True) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep!r}")
        self.directory = Path(directory)
        self._optimizer = optimizer
        self._keep = keep
        self._rounds: Rounds = rounds_of(optimizer)
        self._written_at = -1
        self._rounds.driver.on_checkpoint.append(self._write)
        if signals:
            signal.signal(signal.SIGTERM, self._on_signal)
            signal.signal(signal.SIGUSR1, self._on_signal)

    def save(self) -> Path:
        """Close what is pending and write a checkpoint; every rank calls it. Returns the checkpoint's path.

        After a stop, which has written one already, it does nothing.
        """
        engine = self._rounds.driver.engine
        if engine.stopped and engine.closed and self._written_at == engine.ledger.rounds:
            return self._path()
        self._optimizer.synchronize()
        return self._write()

    def restore(self) -> bool:
        """Load the last checkpoint on all ranks; every rank calls it. False if there is none."""
        path = self.latest() if self._rounds.wire.rank == 0 else None
        state = self._share(self._read(path) if path else None)
        if state is None:
            return False
        self._load(state)
        self._set_random_state(state["random"][self._rounds.wire.rank])
        return True

    def latest(self) -> Path | None:
        """The last checkpoint in the directory."""
        paths = self._paths()
        return paths[-1] if paths else None

    # -- what a framework does -------------------------------------------------------------------------------------

    def _collect(self) -> dict[str, Any]:
        """What is to be saved; every rank calls it, and that of rank 0 is."""
        raise NotImplementedError

    def _store(self, state: dict[str, Any], path: Path) -> None:
        """Write to a file or folder that does not exist yet, and wait until it is on the disk."""
        raise NotImplementedError

    def _read(self, path: Path) -> dict[str, Any]:
        """What :meth:`_store` has written; on rank 0."""
        raise NotImplementedError

    def _load(self, state: dict[str, Any]) -> None:
        """Take over what rank 0 has read; on every rank."""
        raise NotImplementedError

    def _gather(self, thing: Any) -> list[Any]:
        """``thing`` of every rank; every rank calls it."""
        raise NotImplementedError

    def _random_state(self) -> dict[str, Any]:
        """Of this rank's generators of random numbers."""
        return {"numpy": np.random.get_state(), "python": random.getstate()}

    def _set_random_state(self, state: dict[str, Any]) -> None:
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])

    # -- files -----------------------------------------------------------------------------------------------------

    def _write(self) -> Path:
        state = {**self._collect(), "random": self._gather(self._random_state())}
        path = self._path()
        if self._rounds.wire.rank == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".tmp")
            _remove(unfinished)
            self._store(state, unfinished)
            if path.is_dir():  # only a file can be replaced by renaming
                _remove(path)
            unfinished.replace(path)
            for old in self._paths()[: -self._keep]:
                _remove(old)
        self._gather(None)  # nobody goes on before the file is there
        self._written_at = self._rounds.driver.engine.ledger.rounds
        return path

    def _path(self) -> Path:
        return self.directory / f"checkpoint-{self._rounds.driver.engine.ledger.rounds:09d}{self.suffix}"

    def _paths(self) -> list[Path]:
        found = self.directory.glob(f"checkpoint-*{self.suffix}")
        return sorted(path for path in found if path.suffix == self.suffix and _NAME.fullmatch(path.stem))

    def _share(self, thing: Any) -> Any:
        return self._gather(thing)[0]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._rounds.driver.command(Flag.STOP if number == signal.SIGTERM else Flag.CHECKPOINT)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
