"""Repeats a recorded run in a single process, and compares the parameters: what ``horovod-abs replay`` does."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from horovod_abs.observe.recorder import initial_path, parameters_path
from horovod_abs.observe.runlog import RunLog
from horovod_abs.observe.schedule import MicroBatch, RecordedRound, ReplayError, recorded_rounds
from horovod_abs.torch.formulas import Rules, compute, parameters_of
from horovod_abs.torch.formulas_updates import UpdateRules
from horovod_abs.torch.formulas_updates import compute as compute_updates

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


@dataclass(frozen=True)
class Comparison:
    """How a replay compares with the run.

    Attributes:
        rounds: Rounds repeated.
        samples: Samples in them.
        difference: The largest difference of any parameter's element.
        scale: The largest element of the parameters.
        parameter: Where the difference is.
    """

    rounds: int
    samples: int
    difference: float
    scale: float
    parameter: str


def replay(log: RunLog, task: ReplayTask) -> Comparison:
    """Repeat a recorded run and compare the parameters with those saved at its last closing.

    Raises:
        ReplayError: the run cannot be repeated from its record, or the task is not the run's.
    """
    averages_updates = log.run.exchange.get("name") == "ModelUpdates"
    rules = UpdateRules.of(log) if averages_updates else Rules.of(log)
    if averages_updates and task.on_merge is not None:
        raise ReplayError("on_merge= acts on each rank's own optimizer, which cannot be repeated: leave it out")
    saved = _load(parameters_path(log.path), "the parameters to compare with")
    rounds = recorded_rounds(log)[: saved["round"]]
    model = task.model if task.dtype is None else task.model.to(task.dtype)
    optimizer = task.optimizer(model)
    if initial_path(log.path).exists():
        _set_parameters(optimizer, _load(initial_path(log.path), "the parameters to begin with"))

    def loss(model: torch.nn.Module, indices: MicroBatch) -> torch.Tensor:
        batch = task.collate([task.dataset[index] for index in indices])
        return task.loss(model, batch if task.dtype is None else _cast(batch, task.dtype))

    if isinstance(rules, UpdateRules):
        compute_updates(rounds, model, optimizer, loss, rules)
    else:
        after = None if task.on_merge is None else lambda: task.on_merge(optimizer)  # type: ignore[misc]
        compute(rounds, model, optimizer, loss, rules, after_merge=after)
    return _compare(optimizer, saved, rounds)


def load_task(name: str) -> ReplayTask:
    """The task that ``"package.module:function"`` returns; modules in the current folder are found.

    Raises:
        ReplayError: there is no such function, or it returns something else.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ReplayError(f"{name!r} does not name a function: write package.module:function")
    sys.path.insert(0, str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ReplayError(f"{name!r} cannot be found: {error}") from error
    finally:
        sys.path.remove(str(Path.cwd()))
    task = function()
    if not isinstance(task, ReplayTask):
        raise ReplayError(f"{name} returned {type(task).__name__}, not a horovod_abs.torch.replay.ReplayTask")
    return task


def _load(path: Path, what: str) -> dict[str, Any]:
    try:
        saved: dict[str, Any] = torch.load(path, map_location="cpu")
    except FileNotFoundError:
        raise ReplayError(
            f"{path}: {what} are missing. They are saved beside the log when all ranks close, at the end of an epoch "
            "or in synchronize(): keep the files together"
        ) from None
    return saved


@torch.no_grad()
def _set_parameters(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    for parameter, value in _paired(optimizer, saved):
        parameter.copy_(value)


@torch.no_grad()
def _compare(optimizer: torch.optim.Optimizer, saved: dict[str, Any], rounds: Sequence[RecordedRound]) -> Comparison:
    pairs = _paired(optimizer, saved)
    differences = [_largest(mine.double() - value.double()) for mine, value in pairs]
    worst = int(np.argmax(np.nan_to_num(differences, nan=math.inf)))
    return Comparison(
        rounds=len(rounds),
        samples=sum(round.batch for round in rounds),
        difference=differences[worst],
        scale=max(_largest(value.double()) for _, value in pairs),
        parameter=saved["names"][worst],
    )


def _largest(tensor: torch.Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _paired(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    mine, theirs = parameters_of(optimizer), saved["parameters"]
    if [p.shape for p in mine] != [p.shape for p in theirs]:
        shapes = [", ".join(str(tuple(p.shape)) for p in parameters) for parameters in (mine, theirs)]
        raise ReplayError(
            f"the task's optimizer has parameters of shape {shapes[0]}, the run's had {shapes[1]}: make the same model "
            "and hand its parameters to the optimizer in the same order"
        )
    return list(zip(mine, theirs, strict=True))


def _cast(batch: Any, dtype: torch.dtype) -> Any:
    """The tensors of a batch, those of real numbers in another precision."""
    if isinstance(batch, torch.Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {key: _cast(value, dtype) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(_cast(value, dtype) for value in batch)
    return batch
