"""Checkpoints from which a run goes on as if it had not been stopped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from horovod_abs.checkpoints import Checkpoints
from horovod_abs.torch.functions import average_buffers, gather_objects


class Checkpointer(Checkpoints):
    """Writes checkpoints of model, optimizer, ledger, sampler and random numbers, and finds the last one again.

    >>> sampler = hvd.AdaptiveSampler(train_set, optimizer)
    >>> loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    >>> checkpoints = hvd.Checkpointer("runs/mnist", model, optimizer)
    >>> found = checkpoints.restore()
    >>> while sampler.epoch < epochs and not optimizer.stopped:
    ...     for x, y in optimizer.epoch(loader):
    ...         optimizer.zero_grad()
    ...         loss_fn(model(x), y).backward()
    ...         merged = optimizer.step(samples=len(x))
    ...     file = checkpoints.save()

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

    suffix = ".pt"

    def __init__(
        self, directory: str | Path, model: torch.nn.Module, optimizer: Any, *, keep: int = 3, signals: bool = True
    ) -> None:
        self._model = model
        super().__init__(directory, optimizer, keep=keep, signals=signals)

    def _collect(self) -> dict[str, Any]:
        average_buffers(self._model, self._optimizer)
        own = self._optimizer.state_dict()
        optimizers = self._gather(own) if self._rounds.payload.state_is_own else None
        return {"model": self._model.state_dict(), "optimizer": own, "optimizers": optimizers}

    def _store(self, state: dict[str, Any], path: Path) -> None:
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def _read(self, path: Path) -> dict[str, Any]:
        # a checkpoint holds plain values besides tensors, and is trusted as the run's own
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
        return state

    def _load(self, state: dict[str, Any]) -> None:
        optimizers = state["optimizers"]
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(optimizers[self._rounds.wire.rank] if optimizers else state["optimizer"])

    def _gather(self, thing: Any) -> list[Any]:
        if self._rounds.wire.size == 1:
            return [thing]
        return gather_objects(thing, "horovod_abs.checkpoint", self._rounds.process_set)

    def _random_state(self) -> dict[str, Any]:
        return {**super()._random_state(), "torch": torch.get_rng_state()}

    def _set_random_state(self, state: dict[str, Any]) -> None:
        super()._set_random_state(state)
        torch.set_rng_state(state["torch"])
