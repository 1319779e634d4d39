"""Repeats a recorded run in a single process, and compares the parameters: what ``horovod-abs replay`` does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from horovod_abs.observe.runlog import RunLog
from horovod_abs.replays import Comparison, Saved, repeat
from horovod_abs.tensorflow.formulas import Learner
from horovod_abs.tensorflow.sampler import source

Loss = Callable[[keras.Model, Any], tf.Tensor]


@dataclass(frozen=True)
class ReplayTask:
    """What a run log does not hold. A function that ``horovod-abs replay --task`` names returns one::

        def task() -> ReplayTask:
            return ReplayTask(
                model=make_model(),
                optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
                dataset=(images, labels),
                loss=lambda model, batch: loss_fn(batch[1], model(batch[0], training=True)),
            )

    Attributes:
        model: The model, built. It starts from the parameters that were saved beside the log, if they are there.
        optimizer: A plain optimizer. Its learning rate is taken from the log, unless it has a schedule of its own.
        dataset: What ``adaptive_dataset`` was given: ``x``, ``(x, y)`` or ``(x, y, sample_weight)``.
        loss: The loss of a batch, reduced as the run said (``loss_reduction``).
        on_merge: Called with the optimizer after each update, for what the program did in ``optimizer.on_merge``
            besides changing the learning rate. Not for ``ModelUpdates``.
    """

    model: keras.Model
    optimizer: Any
    dataset: Any
    loss: Loss
    on_merge: Callable[[Any], object] | None = None


def replay(log: RunLog, task: ReplayTask) -> Comparison:
    """Repeat a recorded run and compare the parameters with those saved at its last closing.

    Raises:
        ReplayError: the run cannot be repeated from its record, or the task is not the run's.
    """
    take, _ = source(task.dataset)
    learner, on_merge = Learner(task.model, task.optimizer, take, task.loss), task.on_merge
    names = [variable.path for variable in task.model.trainable_variables]

    def saved(path: Path) -> Saved:
        with np.load(path) as file:
            parameters = [file[str(index)].astype(np.float64) for index in range(len(file.files) - 1)]
            return Saved(int(file["round"]), parameters, names)

    return repeat(log, learner, saved, None if on_merge is None else lambda: on_merge(task.optimizer))
