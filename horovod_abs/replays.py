"""Repeats a recorded run in a single process, whatever the framework, and compares the parameters."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from horovod_abs import formulas, formulas_updates
from horovod_abs.formulas import Arrays, Learner, Rules
from horovod_abs.formulas_updates import UpdateRules
from horovod_abs.observe.recorder import initial_path, parameters_path
from horovod_abs.observe.runlog import RunLog
from horovod_abs.observe.schedule import ReplayError, recorded_rounds

Task = TypeVar("Task")


@dataclass(frozen=True)
class Saved:
    """Parameters that were saved beside a log.

    Attributes:
        round: Rounds merged by then.
        parameters: In the optimizer's order.
        names: Of each.
    """

    round: int
    parameters: Arrays
    names: Sequence[str]


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


def repeat(
    log: RunLog, learner: Learner, load: Callable[[Path], Saved], after_merge: Callable[[], object] | None
) -> Comparison:
    """Repeat a recorded run and compare the parameters with those saved at its last closing.

    Args:
        log: The run.
        learner: Takes its part.
        load: Reads parameters.
        after_merge: Called after each update.

    Raises:
        ReplayError: the run cannot be repeated from its record, or the learner has another model.
    """
    averages_updates = log.run.exchange.get("name") == "ModelUpdates"
    rules = UpdateRules.of(log) if averages_updates else Rules.of(log)
    if averages_updates and after_merge is not None:
        raise ReplayError("on_merge= acts on each rank's own optimizer, which cannot be repeated: leave it out")
    saved = _load(load, parameters_path(log.path), "the parameters to compare with")
    _check_shapes(learner, saved)
    rounds = recorded_rounds(log)[: saved.round]
    if initial_path(log.path).exists():
        initial = _load(load, initial_path(log.path), "the parameters to begin with")
        _check_shapes(learner, initial)
        learner.set_parameters(initial.parameters)
    if isinstance(rules, UpdateRules):
        formulas_updates.compute(rounds, learner, rules)
    else:
        formulas.compute(rounds, learner, rules, after_merge=after_merge)
    differences = [_largest(x - kept) for x, kept in zip(learner.parameters(), saved.parameters, strict=True)]
    worst = int(np.argmax(np.nan_to_num(differences, nan=math.inf)))
    return Comparison(
        rounds=len(rounds),
        samples=sum(round.batch for round in rounds),
        difference=differences[worst],
        scale=max(map(_largest, saved.parameters)),
        parameter=saved.names[worst],
    )


def load_task(name: str, kind: type[Task]) -> Task:
    """The task that ``"package.module:function"`` returns; modules in the current folder are found.

    Raises:
        ReplayError: there is no such function, or it returns something else than a task of this kind.
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
    if not isinstance(task, kind):
        raise ReplayError(f"{name} returned {type(task).__name__}, not a {kind.__module__}.{kind.__name__}")
    return task


def _load(load: Callable[[Path], Saved], path: Path, what: str) -> Saved:
    try:
        return load(path)
    except FileNotFoundError:
        raise ReplayError(
            f"{path}: {what} are missing. They are saved beside the log when all ranks close, at the end of an epoch "
            "or in synchronize(): keep the files together"
        ) from None


def _check_shapes(learner: Learner, saved: Saved) -> None:
    mine, theirs = learner.parameters(), saved.parameters
    if [x.shape for x in mine] != [x.shape for x in theirs]:
        shapes = [", ".join(str(x.shape) for x in parameters) for parameters in (mine, theirs)]
        raise ReplayError(
            f"the task's optimizer has parameters of shape {shapes[0]}, the run's had {shapes[1]}: make the same model "
            "and hand its parameters to the optimizer in the same order"
        )


def _largest(array: Any) -> float:
    return float(np.abs(array).max()) if array.size else 0.0
