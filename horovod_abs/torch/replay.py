"""Repeats a recorded run in a single process, and compares the parameters: what ``horovod-abs replay`` does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate

from horovod_abs.observe.runlog import RunLog
from horovod_abs.observe.schedule import MicroBatch
from horovod_abs.replays import Comparison, Saved, repeat
from horovod_abs.torch.formulas import Learner

Loss = Callable[[torch.nn.Module, Any], torch.Tensor]


@dataclass(frozen=True)
class ReplayTask:
    """What a run log does not hold. A function that ``horovod-abs replay --task`` names returns one.

    >>> def task() -> ReplayTask:
    ...     return ReplayTask(
    ...         model=Net(),
    ...         optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    ...         dataset=train_set,
    ...         loss=lambda model, batch: loss_fn(model(batch[0]), batch[1]),
    ...     )
    >>> len(task().dataset)
    64

    Attributes:
        model: The model. It starts from the parameters that were saved beside the log, if they are there.
        optimizer: Makes the plain optimizer of the model. Learning rates are taken from the log.
        dataset: The data set that the sampler went through.
        loss: The loss of a batch, reduced as the run said (``loss_reduction``).
        collate: Makes a batch of samples, as the loader did.
        dtype: Compute with this precision; as they are by default.
        on_merge: Called with the optimizer after each update, for what the program did in ``optimizer.on_merge``
            besides changing learning rates. Not for ``ModelUpdates``.
    """

    model: torch.nn.Module
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer]
    dataset: Any
    loss: Loss
    collate: Callable[[list[Any]], Any] = default_collate
    dtype: torch.dtype | None = None
    on_merge: Callable[[torch.optim.Optimizer], object] | None = None


def replay(log: RunLog, task: ReplayTask) -> Comparison:
    """Repeat a recorded run and compare the parameters with those saved at its last closing.

    Raises:
        ReplayError: the run cannot be repeated from its record, or the task is not the run's.
    """
    model = task.model if task.dtype is None else task.model.to(task.dtype)

    def loss(model: torch.nn.Module, indices: MicroBatch) -> torch.Tensor:
        batch = task.collate([task.dataset[index] for index in indices])
        return task.loss(model, batch if task.dtype is None else _cast(batch, task.dtype))

    learner, on_merge = Learner(model, task.optimizer(model), loss), task.on_merge
    return repeat(log, learner, _saved, None if on_merge is None else lambda: on_merge(learner.optimizer))


def _saved(path: Path) -> Saved:
    saved: dict[str, Any] = torch.load(path, map_location="cpu")
    return Saved(saved["round"], [p.double().numpy() for p in saved["parameters"]], saved["names"])


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    """The tensors of a batch, those of real numbers in another precision."""
    if isinstance(batch, torch.Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {key: _cast(value, dtype) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(_cast(value, dtype) for value in batch)
    return batch
