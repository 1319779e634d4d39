"""The weighted mean of gradients: what :class:`horovod_abs.tensorflow.Gradients` exchanges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from horovod_abs.core.ledger import Column, Entry, Floats, Ledger
from horovod_abs.exchanges import Gradients
from horovod_abs.tensorflow.flat import Gradient, all_finite, digest_of, norm
from horovod_abs.tensorflow.payloads import ExchangedSum, Options
from horovod_abs.tensorflow.staleness import AsPublished, Lookahead, Taylor
from horovod_abs.tensorflow.wire import Tensors, Wire


class GradientPayload(ExchangedSum):
    """Sums of per-sample gradients, and the number of samples.

    One flat variable accumulates. At a launch its buffer goes to the exchange, without a copy, and the variable gets a
    new one; the exchange puts its sum into a third.

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
            self._accumulators = self._layout.buffers()
            self._present = tf.Variable(tf.zeros([len(self.parameters)], tf.float64), trainable=False)
        self._release = tf.function(self._trace_release, autograph=False)
        self._steps: dict[tuple[bool, ...], Callable[..., Any]] = {}
        self._predictions: dict[tuple[bool, ...], Callable[..., Any]] = {}
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
        for accumulator, flat in zip(self._accumulators, self._layout.flatten(gradients), strict=True):
            weight = tf.cast(samples, flat.dtype)
            accumulator.assign_add(flat * weight if self._options.loss_reduction == "mean" else flat)

    # -- the exchange ----------------------------------------------------------------------------------------------

    def launch(self, row: Floats, ledger: Ledger) -> None:
        """Start to sum what was accumulated, and the ledger, over all ranks."""
        flats, present = self._release()
        if self._result is None:
            self._staleness.begin()
        if ledger.rounds % self._options.digest_every == 0:
            row[Column.DIGEST] = digest_of(self.parameters)
        flats, packed = self._pack(row, present.numpy(), flats)
        self._send(flats, packed, ledger.last_weight)
        self._predict(flats, ledger)

    def _trace_release(self) -> tuple[Tensors, tf.Tensor]:
        """What was accumulated, and for which parameters; begins anew."""
        flats = [accumulator.read_value() for accumulator in self._accumulators]
        present = self._present.read_value()
        for accumulator in self._accumulators:
            accumulator.assign(tf.zeros_like(accumulator))
        self._present.assign(tf.zeros_like(self._present))
        return flats, present

    def _predict(self, flats: Tensors, ledger: Ledger) -> None:
        """Let a staleness remedy look ahead with this rank's own mean gradient."""
        weight = float(self._mine[Column.WEIGHT])
        if self.launches_first or weight == 0:
            return
        scale = self._clipped(flats, 1.0 / weight)
        factor = self._factor(ledger.last_weight or weight, float(ledger.weight.sum()))
        present = tuple(self._present_here.tolist())
        if present not in self._predictions:
            self._predictions[present] = tf.function(self._prediction(present), autograph=False)
        self._predictions[present](flats, tf.constant(scale, tf.float64), factor)

    def _prediction(self, present: tuple[bool, ...]) -> Callable[..., None]:
        def predict(flats: Tensors, scale: tf.Tensor, factor: tf.Tensor | None) -> None:
            gradients = self._means(flats, scale, present)
            self._staleness.predict(lambda: self._update(gradients, factor), self._state())

        return predict

    def _means(self, flats: Tensors, scale: tf.Tensor, present: tuple[bool, ...]) -> list[Gradient]:
        means = self._layout.split([flat * tf.cast(scale, flat.dtype) for flat in flats])
        return [mean if here else None for mean, here in zip(means, present, strict=True)]

    # -- the update ------------------------------------------------------------------------------------------------

    def apply(self, entry: Entry, samples_before: float) -> bool:
        """Take one step of the user's optimizer with the mean gradient; False if it is not finite.

        A parameter that has no gradient on any rank is left alone, as in a single process.
        """
        flats, self._result = self._result, None
        assert flats is not None
        finite = entry.weight == 0 or all_finite(flats)
        if not (entry.weight and finite):
            self._staleness.nothing_to_update()
            return finite
        scale = self._clipped(flats, 1.0 / (entry.weight * self._result_scale))
        present = tuple(self._result_present.tolist())
        if present not in self._steps:
            self._steps[present] = tf.function(self._step(present), autograph=False)
        self._steps[present](flats, tf.constant(scale, tf.float64), self._factor(entry.weight, samples_before))
        return True

    def _step(self, present: tuple[bool, ...]) -> Callable[..., None]:
        def step(flats: Tensors, scale: tf.Tensor, factor: tf.Tensor | None) -> None:
            gradients = self._staleness.before_update(self._means(flats, scale, present))
            self._update(gradients, factor)

        return step

    def _clipped(self, flats: Tensors, scale: float) -> float:
        """The factor that makes a sum a mean, smaller where the mean would be longer than ``clip_grad_norm``."""
        if self._options.clip_grad_norm is None:
            return scale
        return scale * min(1.0, self._options.clip_grad_norm / (norm(flats) * scale + 1e-6))

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
