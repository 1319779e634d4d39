"""Checkpoints from which a run goes on as if it had not been stopped."""

from __future__ import annotations

import os
import random
import re
import signal
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from horovod_abs.core.ledger import Flag
from horovod_abs.torch.functions import average_buffers, gather_objects

_NAME = re.compile(r"checkpoint-(\d+)\.pt")


class Checkpointer:
    """Writes checkpoints of model, optimizer, ledger, sampler and random numbers, and finds the last one again.

    ::

        checkpoints = hvd.Checkpointer("runs/mnist", model, optimizer)
        checkpoints.restore()
        while sampler.epoch < epochs and not optimizer.stopped:
            for x, y in optimizer.epoch(loader):
                ...
            checkpoints.save()

    SIGTERM on any rank ends the run on all ranks, with a checkpoint, and SIGUSR1 takes one in mid-epoch: both are
    flags in the ledger, acted upon at the merge that shows them. Rank 0 writes, to a file of another name that is
    then renamed, so that no half-written checkpoint is ever found. With ``ModelUpdates`` a checkpoint holds the state
    of every rank's own optimizer (momentum, moments), as many times as there are ranks.

    Args:
        directory: Where checkpoints are written, by rank 0, and read, by rank 0.
        model: The model, the same on every rank.
        optimizer: Made by ``DistributedOptimizer``.
        keep: Checkpoints to keep; older ones are removed.
        signals: Whether to handle SIGTERM and SIGUSR1.

    Raises:
        ValueError: ``keep`` is less than 1.
    """

    def __init__(
        self, directory: str | Path, model: torch.nn.Module, optimizer: Any, *, keep: int = 3, signals: bool = True
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep!r}")
        self.directory = Path(directory)
        self._model = model
        self._optimizer = optimizer
        self._keep = keep
        self._rounds = optimizer._rounds
        self._written_at = -1
        self._rounds.driver.on_checkpoint.append(self._write)
        if signals:
            signal.signal(signal.SIGTERM, self._on_signal)
            signal.signal(signal.SIGUSR1, self._on_signal)

    def save(self) -> Path:
        """Close what is pending and write a checkpoint; every rank calls it. Returns the file's path.

        After a stop, which has written one already, it does nothing.
        """
        engine = self._rounds.driver.engine
        if engine.stopped and engine.closed and self._written_at == engine.ledger.rounds:
            return self._path()
        self._optimizer.synchronize()
        return self._write()

    def restore(self) -> bool:
        """Load the last checkpoint on all ranks; every rank calls it. False if there is none."""
        rank = self._rounds.wire.rank
        state = self._read() if rank == 0 else None
        state = self._share(state)
        if state is None:
            return False
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizers"][rank] if state["optimizers"] else state["optimizer"])
        _set_random_state(state["random"][rank])
        return True

    def latest(self) -> Path | None:
        """The last checkpoint in the directory."""
        files = self._files()
        return files[-1] if files else None

    def _write(self) -> Path:
        average_buffers(self._model, self._optimizer)
        randoms = self._gather(_random_state())
        optimizers = self._gather(self._optimizer.state_dict()) if self._rounds.payload.state_is_own else None
        path = self._path()
        if self._rounds.wire.rank == 0:
            state = {
                "model": self._model.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "optimizers": optimizers,
                "random": randoms,
            }
            self.directory.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".tmp")
            with unfinished.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
            for old in self._files()[: -self._keep]:
                old.unlink()
        self._gather(None)  # nobody goes on before the file is there
        self._written_at = self._rounds.driver.engine.ledger.rounds
        return path

    def _path(self) -> Path:
        return self.directory / f"checkpoint-{self._rounds.driver.engine.ledger.rounds:09d}.pt"

    def _read(self) -> dict[str, Any] | None:
        path = self.latest()
        # a checkpoint holds plain values besides tensors, and is trusted as the run's own
        return torch.load(path, map_location="cpu", weights_only=False) if path else None

    def _files(self) -> list[Path]:
        return sorted(file for file in self.directory.glob("checkpoint-*.pt") if _NAME.fullmatch(file.name))

    def _gather(self, thing: Any) -> list[Any]:
        if self._rounds.wire.size == 1:
            return [thing]
        return gather_objects(thing, "horovod_abs.checkpoint", self._rounds.process_set)

    def _share(self, thing: Any) -> Any:
        return self._gather(thing)[0]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._rounds.driver.command(Flag.STOP if number == signal.SIGTERM else Flag.CHECKPOINT)


def _random_state() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
