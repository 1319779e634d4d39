"""The weighted mean of gradients: what :class:`horovod_abs.tensorflow.Gradients` exchanges."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from horovod_abs.core.ledger import Column, Entry, Floats, Ledger
from horovod_abs.exchanges import Gradients
from horovod_abs.tensorflow.flat import (
    BOOLEAN,
    SCALAR,
    Gradient,
    accumulation_dtype,
    add_scaled,
    all_finite,
    all_finite_unless,
    compiled,
    digest_of,
)
from horovod_abs.tensorflow.payloads import ExchangedSum, Options
from horovod_abs.tensorflow.staleness import AsPublished, Lookahead, Taylor
from horovod_abs.tensorflow.wire import Tensors, Wire


class GradientPayload(ExchangedSum):
    """Sums of per-sample gradients, and the number of samples.

    One variable for each parameter accumulates. At a launch their buffers go to the exchange, uncopied, which lays
    them flat and puts its sum into a third; the first micro-batch that follows gives the variables new ones.

    Args:
        optimizer, user_class, wire, name, options: See :class:`ExchangedSum`.
        exchange: What the user chose.
    """

    def __init__(
        self, optimizer: Any, user_class: type[Any], wire: Wire, name: str, exchange: Gradients, options: Options
    ) -> None:
        self._exchange = exchange
        self._staleness = AsPublished()
        super().__init__(optimizer, user_class, wire, name, options)

    def lay_out(self, variables: Sequence[Any]) -> None:
        super().lay_out(variables)
        with tf.init_scope():
            self._accumulators = [
                tf.Variable(tf.zeros(p.shape, accumulation_dtype(p.dtype)), trainable=False) for p in self.parameters
            ]
            self._empty = tf.Variable(True, trainable=False)
            self._present = tf.Variable(tf.zeros([len(self.parameters)], tf.float64), trainable=False)
        self._release = compiled(self._trace_release)
        self._steps: dict[tuple[bool, ...], Callable[..., tf.Tensor]] = {}
        self._predictions: dict[tuple[bool, ...], Callable[..., None]] = {}
        if self._exchange.staleness == "taylor":
            self._staleness = Taylor(self.parameters, self._exchange.taylor_lambda)
        elif self._exchange.staleness == "lookahead":
            self._staleness = Lookahead(self.parameters)

    @property
    def launches_first(self) -> bool:
        """Whether the next exchange may start before the result of the last one is applied."""
        return self._staleness.launches_first

    def authoritative(self) -> AbstractContextManager[None]:
        """While inside, the parameters are those that all ranks share."""
        return self._staleness.authoritative()

    # -- a micro-batch ---------------------------------------------------------------------------------------------

    def _take(self, gradients: Sequence[Gradient], samples: tf.Tensor) -> None:
        here = [float(gradient is not None) for gradient in gradients]
        self._present.assign(tf.maximum(self._present, tf.constant(here, tf.float64)))
        cast = [None if g is None else tf.cast(g, a.dtype) for g, a in zip(gradients, self._accumulators, strict=True)]
        weight = samples if self._options.loss_reduction == "mean" else tf.ones([], tf.float64)
        tf.cond(self._empty, lambda: self._trace_begin(cast, weight), lambda: self._trace_add(cast, weight))
        self._empty.assign(False)

    def _trace_begin(self, gradients: Sequence[Gradient], weight: tf.Tensor) -> None:
        for accumulator, gradient in zip(self._accumulators, gradients, strict=True):
            nothing = gradient is None
            accumulator.assign(tf.zeros_like(accumulator) if nothing else gradient * tf.cast(weight, gradient.dtype))

    def _trace_add(self, gradients: Sequence[Gradient], weight: tf.Tensor) -> None:
        for accumulator, gradient in zip(self._accumulators, gradients, strict=True):
            if gradient is not None:
                add_scaled(accumulator, gradient, weight)

    # -- the exchange ----------------------------------------------------------------------------------------------

    def launch(self, row: Floats, ledger: Ledger) -> None:
        """Start to sum what was accumulated, and the ledger, over all ranks."""
        sums, present = self._release()
        if self._result is None:
            self._staleness.begin()
        if ledger.rounds % self._options.digest_every == 0:
            row[Column.DIGEST] = digest_of(self.parameters)
        self._send(sums, row, present, 1.0, ledger.last_weight)
        if row[Column.WEIGHT] and not self.launches_first:
            self._predict(sums, present.numpy() > 0, float(row[Column.WEIGHT]), ledger)

    def _trace_release(self) -> tuple[Tensors, tf.Tensor]:
        """What was accumulated, and for which parameters; begins anew."""
        sums = tf.cond(
            self._empty,
            lambda: [tf.zeros_like(accumulator) for accumulator in self._accumulators],
            lambda: [accumulator.read_value() for accumulator in self._accumulators],
        )
        present = self._present.read_value()
        self._empty.assign(True)
        self._present.assign(tf.zeros_like(self._present))
        return sums, present

    def _flatten(self, tensors: Tensors) -> Tensors:
        return self._layout.flatten(tensors)

    def _predict(self, sums: Tensors, present: Any, weight: float, ledger: Ledger) -> None:
        """Let a staleness remedy look ahead with this rank's own mean gradient, if it is finite."""
        factor = self._options.scaling.factor(ledger.last_weight or weight, float(ledger.weight.sum()))
        pattern = tuple(present.tolist())
        if pattern not in self._predictions:
            trace = functools.partial(self._trace_prediction, pattern)
            specs = [tf.TensorSpec(accumulator.shape, accumulator.dtype) for accumulator in self._accumulators]
            self._predictions[pattern] = compiled(trace, specs, SCALAR, SCALAR)
        self._predictions[pattern](sums, tf.constant(1.0 / weight, tf.float64), tf.constant(factor, tf.float64))

    def _trace_prediction(self, present: tuple[bool, ...], sums: Tensors, scale: tf.Tensor, factor: tf.Tensor) -> None:
        gradients = self._means(sums, scale, present)

        def predict() -> None:
            self._staleness.predict(lambda: self._update(gradients, factor), self._state())

        tf.cond(all_finite(sums), predict, lambda: None)

    def _means(self, sums: Tensors, scale: tf.Tensor, present: tuple[bool, ...]) -> Sequence[Gradient]:
        here = zip(sums, present, strict=True)
        return self._clipped([total * tf.cast(scale, total.dtype) if there else None for total, there in here])

    # -- the update ------------------------------------------------------------------------------------------------

    def apply(self, entry: Entry, samples_before: float) -> bool:
        """Take one step of the user's optimizer with the mean gradient; False if it is not finite.

        A parameter that has no gradient on any rank is left alone, as in a single process.
        """
        flats, self._result = self._result, None
        assert flats is not None
        if not entry.weight:
            self._staleness.nothing_to_update()
            return True
        present = tuple(self._result_present.tolist())
        if present not in self._steps:
            trace = functools.partial(self._trace_step, present)
            self._steps[present] = compiled(trace, self._layout.specs, BOOLEAN, SCALAR, SCALAR)
        scale = 1.0 / (entry.weight * self._result_scale)
        factor = self._options.scaling.factor(entry.weight, samples_before)
        known = tf.constant(self._surely_finite())
        return bool(self._steps[present](flats, known, tf.constant(scale, tf.float64), tf.constant(factor, tf.float64)))

    def _trace_step(
        self, present: tuple[bool, ...], flats: Tensors, known: tf.Tensor, scale: tf.Tensor, factor: tf.Tensor
    ) -> tf.Tensor:
        finite = all_finite_unless(known, flats)
        gradients = self._staleness.before_update(self._means(self._layout.split(flats), scale, present))
        tf.cond(finite, lambda: self._update(gradients, factor), lambda: None)
        return finite

    def agree(self) -> None:
        """Take over parameters and optimizer state of rank 0; all ranks call it at the same merge."""
        variables = [*self.parameters, *self._state()]
        values = self._wire.broadcast([variable.read_value() for variable in variables], f"{self._name}.agree")
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)

    def settle(self, closed: bool) -> None:
        """No launch follows the merge: there is nothing to do."""

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on besides the model and the user's optimizer: nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave."""
