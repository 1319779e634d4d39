"""The weighted mean of model updates: what :class:`horovod_abs.tensorflow.ModelUpdates` exchanges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from horovod.tensorflow.compression import Compression

from horovod_abs.core.ledger import Column, Entry, Floats, Ledger
from horovod_abs.exchanges import ModelUpdates
from horovod_abs.rounds import weight_for_updates
from horovod_abs.tensorflow.flat import (
    BOOLEAN,
    SCALAR,
    Gradient,
    Layout,
    add_scaled,
    all_finite,
    all_finite_unless,
    compiled,
    digest_of,
    native,
)
from horovod_abs.tensorflow.payloads import ExchangedSum, Options
from horovod_abs.tensorflow.wire import Tensors, Wire


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
        self._sent += self._kept_layout.dtypes
        self._mean_state: Tensors | None = None
        with tf.init_scope():
            self._central = self._layout.buffers()
            self._start = self._layout.buffers()
            self._fresh = tf.Variable(True, trainable=False)
            self._factor = tf.Variable(1.0, dtype=tf.float64, trainable=False)
        self._factor.assign(self._options.scaling.factor(self._wire.size, self.steps))
        self._outer = self._exchange.outer(self._central) if self._exchange.outer is not None else None
        if self._outer is not None and not self._outer.built:
            self._outer.build(self._central)
        self._hand_over_update = compiled(self._trace_update)
        self._rebase = compiled(self._trace_rebase, self._layout.specs)
        self._go_on = compiled(self._trace_go_on)
        self._move_central = compiled(
            self._trace_move, [*self._layout.specs, *self._kept_layout.specs], BOOLEAN, SCALAR
        )
        self._return = compiled(self._trace_return)

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
        self._update(self._clipped(gradients), self._factor.read_value())

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
                self._factor.assign(self._options.scaling.factor(self._wire.size, self.steps))
        return micro_batches, samples

    # -- the exchange ----------------------------------------------------------------------------------------------

    def launch(self, row: Floats, ledger: Ledger) -> None:
        """Hand over what this rank's steps have changed, and go on from the central model with it."""
        handed, finite = self._hand_over_update()
        weight = row[Column.WEIGHT] if self._exchange.weighting == "samples" else float(row[Column.WEIGHT] > 0)
        if ledger.rounds % self._options.digest_every == 0:
            row[Column.DIGEST] = digest_of(self._central)
        self._take_mean_state()  # this rank's own is on its way
        dropped = row[Column.WEIGHT] > 0 and not finite
        if dropped:
            self._heal_state()
        updates = handed[: len(self._central)]
        self._rebase([tf.zeros_like(update) for update in updates] if dropped else updates)
        expected = ledger.last_weight if self._exchange.weighting == "samples" else float(self._wire.size)
        self._send(handed, row, tf.zeros([0], tf.float64), weight, weight_for_updates(expected))

    @property
    def _scales(self) -> bool:
        return True

    def _trace_update(self) -> tuple[Tensors, tf.Tensor]:
        """This rank's progress, what its optimizer keeps if that is averaged, and whether both are finite."""
        self._take_start()
        handed = [*self._progress(), *self._kept_layout.flatten(self._kept)]
        return handed, all_finite(handed)

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
        contributing = entry.column(Column.WEIGHT)
        total = entry.weight if self._exchange.weighting == "samples" else float((contributing > 0).sum())
        scale = tf.constant(1.0 / (total * self._result_scale), tf.float64)
        finite, *means = self._move_central(flats, tf.constant(self._surely_finite()), scale)
        if finite:
            self._mean_state = means
        return bool(finite)

    def _trace_move(self, flats: Tensors, known: tf.Tensor, scale: tf.Tensor) -> Tensors:
        """Move the central model, if all is finite; returns whether it is, and the mean of what optimizers keep."""
        finite = all_finite_unless(known, flats)
        models = len(self._central)
        tf.cond(finite, lambda: self._trace_add(flats[:models], scale), lambda: None)
        return [finite, *(flat * tf.cast(scale, flat.dtype) for flat in flats[models:])]

    def _trace_add(self, flats: Tensors, scale: tf.Tensor) -> None:
        if self._outer is not None:
            self._outer.apply([flat * tf.cast(-scale, flat.dtype) for flat in flats], self._central)
            return
        for central, flat in zip(self._central, flats, strict=True):
            add_scaled(central, flat, scale)

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
        self._factor.assign(self._options.scaling.factor(self._wire.size, self.steps))
        if self._outer is not None and state["outer"] is not None:
            for variable, value in zip(self._outer.variables, state["outer"], strict=True):
                native(variable).assign(value)
