"""The weighted mean of model updates: what :class:`horovod_abs.tensorflow.ModelUpdates` exchanges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
from horovod.tensorflow.compression import Compression

from horovod_abs.core.ledger import Column, Entry, Floats, Ledger
from horovod_abs.exchanges import ModelUpdates
from horovod_abs.tensorflow.flat import Gradient, Layout, all_finite, digest_of, native, scaled
from horovod_abs.tensorflow.payloads import FIRST_EXPECTED_WEIGHT, ExchangedSum, Options
from horovod_abs.tensorflow.wire import Tensors, Wire

ROOM_FOR_UPDATES = 64.0
"""Compressed to float16, mean updates from about 1e-9 to this arrive: they are as small as learning rates make them."""
_LARGEST_FLOAT16 = 65504.0


class UpdatePayload(ExchangedSum):
    """What a rank's own steps have changed since its round began.

    Two model-sized flat variables: the central model (the mean that all ranks share) and the start (the model that the
    round started from); the update is a third while it is in flight. For half precision they are float32.

    At the boundary of a round, with the exchange before it merged into the central model::

        update = model − start        handed over, times this rank's weight
        model = start = central + update

    Args:
        optimizer, user_class, wire, name, options: See :class:`ExchangedSum`.
        exchange: What the user chose.

    Attributes:
        steps: Steps that this rank has taken.

    Raises:
        ValueError: ``average_state`` with compression.

    References:
        [NoDelay] Talyansky et al., ICLR 2019 submission, algorithms 1 and 2.
    """

    launches_first = False
    state_is_own = True

    def __init__(
        self, optimizer: Any, user_class: type[Any], wire: Wire, name: str, exchange: ModelUpdates, options: Options
    ) -> None:
        if exchange.average_state and options.compression is not Compression.none:
            raise ValueError(
                "average_state=True with compression: second moments are too small for float16. Leave one of them out"
            )
        self._exchange = exchange
        self.steps = 0
        super().__init__(optimizer, user_class, wire, name, options)

    def lay_out(self, variables: Sequence[Any]) -> None:
        super().lay_out(variables)
        self._kept = self._moments() if self._exchange.average_state else []
        self._kept_layout = Layout(self._kept)
        self._mean_state: Tensors | None = None
        with tf.init_scope():
            self._central = self._layout.buffers()
            self._start = self._layout.buffers()
            self._fresh = tf.Variable(True, trainable=False)
            self._rate = tf.Variable(1.0, dtype=tf.float64, trainable=False)
        self._rate.assign(self._options.scaling.factor(self._wire.size, self.steps))
        self._outer = self._exchange.outer(self._central) if self._exchange.outer is not None else None
        self._hand_over_update = tf.function(self._trace_update, autograph=False)
        self._rebase = tf.function(self._trace_rebase, autograph=False)
        self._go_on = tf.function(self._trace_go_on, autograph=False)
        self._move_central = tf.function(self._trace_move, autograph=False)
        self._return = tf.function(self._trace_return, autograph=False)

    def _moments(self) -> list[tf.Variable]:
        """What the optimizer keeps for each parameter."""
        shapes = {tuple(parameter.shape) for parameter in self.parameters}
        return [
            variable
            for variable in self._state()
            if variable.dtype.is_floating and tuple(variable.shape) in shapes and not self._is_rate(variable)
        ]

    def _is_rate(self, variable: tf.Variable) -> bool:
        return variable is native(self._optimizer._learning_rate)

    # -- a micro-batch ---------------------------------------------------------------------------------------------

    def _take(self, gradients: Sequence[Gradient], samples: tf.Tensor) -> None:
        """Take a step of the user's optimizer."""
        self._take_start()
        if self._options.loss_reduction == "sum":
            gradients = [None if g is None else g / tf.cast(samples, g.dtype) for g in gradients]
        if self._options.clip_grad_norm is not None:
            gradients = self._clipped(gradients, self._options.clip_grad_norm)
        scales = self._options.scaling.rule != "none"
        self._update(gradients, self._rate.read_value() if scales else None)

    @staticmethod
    def _clipped(gradients: Sequence[Gradient], longest: float) -> list[Gradient]:
        squares = [tf.cast(tf.reduce_sum(tf.square(g)), tf.float64) for g in gradients if g is not None]
        scale = tf.minimum(tf.ones([], tf.float64), longest / (tf.sqrt(tf.add_n(squares)) + 1e-6))
        return [None if g is None else g * tf.cast(scale, g.dtype) for g in gradients]

    def _take_start(self) -> None:
        """The first round after a close starts from the model as it stands, whoever has set it meanwhile; traced."""
        tf.cond(self._fresh, self._trace_start, lambda: None)

    def _trace_start(self) -> None:
        flats = self._layout.flatten(self.parameters)
        for central, start, flat in zip(self._central, self._start, flats, strict=True):
            central.assign(flat)
            start.assign(flat)
        self._fresh.assign(False)

    def take_pending(self) -> tuple[int, float]:
        micro_batches, samples = super().take_pending()
        if micro_batches:
            self.steps += micro_batches
            if self._options.scaling.rule != "none":
                self._rate.assign(self._options.scaling.factor(self._wire.size, self.steps))
        return micro_batches, samples

    # -- the exchange ----------------------------------------------------------------------------------------------

    def launch(self, row: Floats, ledger: Ledger) -> None:
        """Hand over what this rank's steps have changed, and go on from the central model with it."""
        updates = self._hand_over_update()
        weight = row[Column.WEIGHT] if self._exchange.weighting == "samples" else float(row[Column.WEIGHT] > 0)
        if ledger.rounds % self._options.digest_every == 0:
            row[Column.DIGEST] = digest_of(self._central)
        handed, packed = self._pack(row, np.zeros(0), [*updates, *self._exchange_state()])
        if row[Column.WEIGHT] > 0 and self._mine[Column.WEIGHT] == 0:
            self._heal_state()
        self._rebase(handed[: len(updates)])
        expected = ledger.last_weight if self._exchange.weighting == "samples" else float(self._wire.size)
        handed = scaled(handed, tf.constant(weight, tf.float64)) if weight else [tf.zeros_like(flat) for flat in handed]
        self._send(handed, packed, (expected or FIRST_EXPECTED_WEIGHT) * ROOM_FOR_UPDATES / _LARGEST_FLOAT16)

    def _trace_update(self) -> Tensors:
        self._take_start()
        return self._progress()

    def _progress(self) -> Tensors:
        flats = self._layout.flatten(self.parameters)
        return [flat - start for flat, start in zip(flats, self._start, strict=True)]

    def _trace_rebase(self, updates: Tensors) -> None:
        """Model and start become the central model plus the update."""
        for central, start, update in zip(self._central, self._start, updates, strict=True):
            start.assign(central + update)
        self._set_parameters(self._start)
        if any(parameter.dtype.size < 4 for parameter in self.parameters):  # half-precision parameters have rounded
            for start, flat in zip(self._start, self._layout.flatten(self.parameters), strict=True):
                start.assign(flat)

    def _set_parameters(self, flats: Sequence[tf.Variable]) -> None:
        values = self._layout.split([tf.convert_to_tensor(flat) for flat in flats])
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.assign(tf.cast(value, parameter.dtype))

    def apply(self, entry: Entry, samples_before: float) -> bool:
        """Move the central model by the mean update; False if it is not finite."""
        flats, self._result = self._result, None
        assert flats is not None
        if entry.weight == 0:
            return True
        if not all_finite(flats):
            return False
        contributing = entry.column(Column.WEIGHT)
        total = entry.weight if self._exchange.weighting == "samples" else float((contributing > 0).sum())
        means = scaled(flats, tf.constant(1.0 / (total * self._result_scale), tf.float64))
        self._move_central(means[: len(self._central)])
        self._mean_state = means[len(self._central) :]
        return True

    def _trace_move(self, means: Tensors) -> None:
        if self._outer is not None:
            self._outer.apply([-mean for mean in means], self._central)
            return
        for central, mean in zip(self._central, means, strict=True):
            central.assign_add(mean)

    def settle(self, closed: bool) -> None:
        """No launch follows the merge: go on from the central model with what has not been handed over yet."""
        self._take_mean_state()
        if closed:
            self._return()
            self._fresh.assign(True)
        else:
            self._go_on()

    def _trace_go_on(self) -> None:
        self._trace_rebase(self._progress())
        for central, start in zip(self._central, self._start, strict=True):
            start.assign(central)

    def _trace_return(self) -> None:
        self._set_parameters(self._central)

    @contextmanager
    def authoritative(self) -> Iterator[None]:
        """While inside, the parameters are those of the central model."""
        if not self.parameters or self._fresh:
            yield
            return
        own = [parameter.read_value() for parameter in self.parameters]
        self._return()
        try:
            yield
        finally:
            for parameter, value in zip(self.parameters, own, strict=True):
                parameter.assign(value)

    def agree(self) -> None:
        """Take over rank 0's central model and outer optimizer's state; all ranks call it at the same merge."""
        kept = [] if self._outer is None else [native(variable) for variable in self._outer.variables]
        variables = [*self._central, *kept]
        values = self._wire.broadcast([variable.read_value() for variable in variables], f"{self._name}.agree")
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    # -- the user's optimizer's own state --------------------------------------------------------------------------

    def _exchange_state(self) -> Tensors:
        """The state to hand over; if the mean of the round before is there, that is taken in its place."""
        if not self._kept:
            return []
        flats = self._kept_layout.flatten(self._kept)
        self._take_mean_state()
        return flats

    def _take_mean_state(self) -> None:
        if self._mean_state:
            for variable, value in zip(self._kept, self._kept_layout.split(self._mean_state), strict=True):
                variable.assign(tf.cast(value, variable.dtype))
        self._mean_state = None

    def _heal_state(self) -> None:
        """The update was not finite: neither, as a rule, is what the optimizer has kept. Begin that anew."""
        state = [variable for variable in self._state() if not self._is_rate(variable)]
        if all(bool(tf.reduce_all(tf.math.is_finite(v))) for v in state if v.dtype.is_floating):
            return
        for variable in state:  # also the count of steps, from which Adam corrects its moments' bias
            variable.assign(tf.zeros_like(variable))

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on besides the model and the user's optimizer."""
        outer = None if self._outer is None else [native(variable).numpy() for variable in self._outer.variables]
        return {"steps": self.steps, "outer": outer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
        self.steps = int(state["steps"])
        self._rate.assign(self._options.scaling.factor(self._wire.size, self.steps))
        if self._outer is not None and state["outer"] is not None:
            self._outer.build(self._central)
            for variable, value in zip(self._outer.variables, state["outer"], strict=True):
                native(variable).assign(value)
