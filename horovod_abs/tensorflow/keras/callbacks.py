"""Callbacks for ``model.fit``, under Horovod's names. Any one of them, put first, looks after the rounds.

model.fit(data, callbacks=hvd.callbacks.wrap([keras.callbacks.EarlyStopping("val_loss")]))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np

from horovod_abs.core.ledger import Column
from horovod_abs.rounds import rounds_of
from horovod_abs.tensorflow.fit import FitLoop, expect_early_ends, refuse_inexact_metrics, sampler_for
from horovod_abs.tensorflow.flat import native
from horovod_abs.tensorflow.functions import broadcast_variables

WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
)
"""Callbacks that write files: for the first rank alone."""


def wrap(callbacks: Iterable[keras.callbacks.Callback] = (), *, data: Any = None) -> list[keras.callbacks.Callback]:
    """Callbacks that see the same on all ranks: ours in front, which average all metrics, and writers on rank 0 alone.

    Args:
        callbacks: The program's own.
        data: The ``adaptive_dataset`` that is trained with, if several were made for the optimizer.

    Raises:
        ValueError: ``BackupAndRestore``, which would take one rank back and not the others.
    """
    callbacks = list(callbacks)
    if any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in callbacks):
        raise ValueError("BackupAndRestore would take one rank back and not the others: use hvd.Checkpointer")
    own = [callback for callback in callbacks if hvd.rank() == 0 or not isinstance(callback, WRITERS)]
    return [MetricAverageCallback(data=data), *own]


class RoundsCallback(keras.callbacks.Callback):
    """Looks after the rounds of the model's optimizer, between the steps of ``model.fit``.

    Of several of our callbacks the first does it. At the end of an epoch all ranks have the same parameters, and
    nothing is pending: validation, checkpoints and other callbacks see them.

    Args:
        data: The ``adaptive_dataset`` that is trained with, if several were made for the optimizer.

    Raises:
        ValueError: when training begins: the model is compiled in a way that does not go together with rounds.
    """

    def __init__(self, *, data: Any = None) -> None:
        super().__init__()
        self._data = data
        self.loop: FitLoop | None = None

    def set_params(self, params: Any) -> None:
        """Keras's way to tell how many steps there are, which nobody knows of an adaptive data set."""
        optimizer = getattr(self.model, "optimizer", None)
        if params and optimizer is not None and hasattr(optimizer, "_rounds") and optimizer._rounds.samplers:
            params["steps"] = None
        super().set_params(params)

    def on_train_begin(self, logs: Any = None) -> None:
        """Training begins."""
        known = vars(self.model.optimizer).get("_fit_loop")
        if known is not None and known[0] is self.params:  # another callback of this fit looks after the rounds
            return
        if known is not None:
            known[1].end()
        expect_early_ends()
        self.loop = FitLoop(self.model, self._data)
        vars(self.model.optimizer)["_fit_loop"] = (self.params, self.loop)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """An epoch begins."""
        if self.loop is not None:
            self.loop.begin_epoch()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """A step has been taken, and another is about to be."""
        if self.loop is not None:
            self.loop.before_batch()

    def on_test_begin(self, logs: Any = None) -> None:
        """Validation begins."""
        if self.loop is not None:
            self.loop.end_epoch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """The epoch has ended."""
        if self.loop is not None:
            self.loop.end_epoch()

    def on_train_end(self, logs: Any = None) -> None:
        """Training has ended."""
        if self.loop is not None:
            self.loop.end()
            self.loop = None
            del vars(self.model.optimizer)["_fit_loop"]


def _loop_of(model: keras.Model) -> FitLoop:
    """The loop of the call of ``fit`` that is under way."""
    loop: FitLoop = vars(model.optimizer)["_fit_loop"][1]
    return loop


class BroadcastGlobalVariablesCallback(RoundsCallback):
    """Gives all ranks the model and the optimizer's state of one rank, before the first step.

    Args:
        root_rank: The rank whose values all take over.
        device: Must be empty; the broadcast runs where the variables are.
        local_variables: Variables that keep each rank's own value.

    Raises:
        ValueError: a device.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        _refuse_device(device)
        self.root_rank = root_rank
        self.broadcast_done = False
        given = [] if local_variables is None else keras.tree.flatten(local_variables)
        self._local = {native(variable).ref() for variable in given}

    def register_local_var(self, var: Any) -> None:
        """Let a variable keep each rank's own value."""
        self._local.add(native(var).ref())

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        if self.broadcast_done:
            return
        everything = [*self.model.variables, *self.model.optimizer.variables]
        variables = {native(variable).ref(): native(variable) for variable in everything}
        broadcast_variables([variables[ref] for ref in variables if ref not in self._local], self.root_rank)
        self.broadcast_done = True


class MetricAverageCallback(RoundsCallback):
    """Lets the callbacks after it see metrics over the samples of all ranks, the same on every rank.

    Exact for metrics whose state is a sum over samples: means, and also AUC, precision, F1. Others are refused.

    Args:
        device: Must be empty.
        data: See :class:`RoundsCallback`.

    Raises:
        ValueError: a device; after the first step: a metric that cannot be averaged exactly.
    """

    def __init__(self, device: str = "", *, data: Any = None) -> None:
        super().__init__(data=data)
        _refuse_device(device)
        self._averages: dict[str, Any] = {}
        self._training = False
        self._averaged = False

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        self._training = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._averages, self._averaged = {}, False

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 1:  # Keras makes the metrics in the first step
            refuse_inexact_metrics(self.model)
        super().on_train_batch_begin(batch, logs)

    def on_test_begin(self, logs: Any = None) -> None:
        super().on_test_begin(logs)
        self._average_training()

    def on_test_end(self, logs: Any = None) -> None:
        """Validation has ended."""
        if self._training:
            self._averages |= {f"val_{name}": value for name, value in self._metrics().items()}

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        self._average_training()
        if logs is not None:
            logs.update(self._averages)

    def on_train_end(self, logs: Any = None) -> None:
        super().on_train_end(logs)
        self._training = False

    def _average_training(self) -> None:
        if self._training and not self._averaged:
            self._averaged = True
            self._averages |= self._metrics()

    def _metrics(self) -> dict[str, Any]:
        return _loop_of(self.model).metrics()


class LearningRateScheduleCallback(RoundsCallback):
    """Multiplies the learning rate by a function of the epoch, the same on all ranks at each merge.

    With ``staircase`` the rate changes when an epoch begins; without, at each merge, where the part of the epoch that
    is over is counted in the micro-batches of all ranks.

    Args:
        initial_lr: The learning rate that is multiplied.
        multiplier: A number, to the power of the epochs since ``start_epoch``, or a function of the epoch.
        start_epoch: The first epoch in which the rate is changed.
        end_epoch: The first epoch in which it is not any more.
        staircase: Whether the epoch is a whole number.
        momentum_correction: Whether the velocity of SGD is scaled as the learning rate is.
        steps_per_epoch: Micro-batches of each rank in an epoch (their mean), where Keras does not know it.

    Raises:
        ValueError: no ``initial_lr``; when training begins: ``steps_per_epoch`` is needed and not known.

    References:
        Goyal et al., arXiv 1706.02677, section 3 (momentum correction).
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: float | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr is needed, the learning rate that is multiplied")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch: float | None = steps_per_epoch
        self.multiplier: Callable[[float], float] = (
            multiplier if callable(multiplier) else lambda epoch: multiplier ** (epoch - start_epoch)
        )
        self._epoch = 0
        self._done = 0.0
        self._watches = False

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        if self.staircase:
            return
        self.steps_per_epoch = self.steps_per_epoch or self._steps_of_data() or (self.params or {}).get("steps")
        if not self.steps_per_epoch:
            raise ValueError("steps_per_epoch= is needed: Keras does not know how many steps the data set has")
        if not self._watches:
            rounds_of(self.model.optimizer).driver.on_entry.append(self._merged)
            self._watches = True

    def _steps_of_data(self) -> float | None:
        sampler = sampler_for(self.model.optimizer, self._data)
        ranks = rounds_of(self.model.optimizer).wire.size
        return None if sampler is None else sampler.steps / ranks

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._epoch, self._done = epoch, 0.0
        self._adjust(float(epoch))

    def _merged(self, entry: Any) -> None:
        """A round was merged: the rate is that of the next one."""
        self._done += float(np.sum(entry.column(Column.MICRO_BATCHES))) / len(entry.rows)
        if self.steps_per_epoch:
            self._adjust(self._epoch + min(self._done / self.steps_per_epoch, 1.0))

    def _adjust(self, epoch: float) -> None:
        if self._epoch < self.start_epoch or (self.end_epoch is not None and self._epoch >= self.end_epoch):
            return
        optimizer = self.model.optimizer
        before, after = float(optimizer.learning_rate), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = after
        if self.momentum_correction and isinstance(optimizer, keras.optimizers.SGD) and optimizer.momentum and before:
            for velocity in optimizer.momentums:
                velocity.assign(velocity * (after / before))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size`` to ``initial_lr``, merge by merge.

    Args:
        initial_lr: The learning rate that is reached.
        warmup_epochs: Epochs until then.
        momentum_correction, steps_per_epoch: See :class:`LearningRateScheduleCallback`.
        verbose: Whether rank 0 says when it is reached.

    References:
        Goyal et al., arXiv 1706.02677, section 2.2 (gradual warm-up).
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            return (epoch * (hvd.size() - 1) / warmup_epochs + 1) / hvd.size()

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0 and hvd.rank() == 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


def _refuse_device(device: str) -> None:
    if device:
        raise ValueError("device= cannot be chosen here: the exchange runs where the variables are. Leave it out")


__all__: Sequence[str] = [
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "RoundsCallback",
    "wrap",
]
