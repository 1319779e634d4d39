"""A Keras model and its optimizer for the formulas that a run must equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from horovod_abs import formulas, formulas_updates
from horovod_abs.formulas import Arrays, Gradients, Moments, Rules
from horovod_abs.formulas_updates import UpdateRules
from horovod_abs.observe.schedule import MicroBatch, RecordedRound
from horovod_abs.tensorflow.flat import native

Take = Callable[[MicroBatch], Any]
__all__ = ["Learner", "Rules", "UpdateRules", "compute"]

Loss = Callable[[keras.Model, Any], tf.Tensor]


def compute(
    rounds: Sequence[RecordedRound],
    model: keras.Model,
    optimizer: Any,
    take: Take,
    loss: Loss,
    rules: Rules | UpdateRules,
    *,
    after_merge: Callable[[], object] | None = None,
) -> list[Arrays]:
    """Train ``model`` by recorded rounds.

    Args:
        rounds: What was computed.
        model: The model with its first parameters.
        optimizer: A plain optimizer, as it is at first on every rank.
        take: Makes a batch of the samples with some indices.
        loss: The loss of a batch.
        rules: How gradients become updates, or updates are averaged.
        after_merge: Called after each update; for gradients.

    Returns:
        The central model after each round; for model updates.
    """
    learner = Learner(model, optimizer, take, loss)
    if isinstance(rules, UpdateRules):
        return formulas_updates.compute(rounds, learner, rules)
    formulas.compute(rounds, learner, rules, after_merge=after_merge)
    return []


class Learner:
    """See :class:`horovod_abs.formulas.Learner`.

    Args:
        model: The model.
        optimizer: A plain optimizer.
        take: Makes a batch of the samples with some indices.
        loss: The loss of a batch.
    """

    def __init__(self, model: keras.Model, optimizer: Any, take: Take, loss: Loss) -> None:
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        self.optimizer = optimizer
        self._model = model
        self._take = take
        self._loss = loss
        self._parameters = [native(variable) for variable in model.trainable_variables]
        self._rate = optimizer._learning_rate
        self._factor = tf.Variable(1.0, dtype=tf.float64, trainable=False)
        if not isinstance(self._rate, keras.Variable):  # Keras multiplies in the type that a schedule has
            vars(optimizer)["_learning_rate"] = self._trace_rate
        self._gradients = tf.function(self._trace_gradients, autograph=False, reduce_retracing=True)
        self._apply = tf.function(self._trace_apply, autograph=False)

    def parameters(self) -> Arrays:
        return [_array(p) for p in self._parameters]

    def set_parameters(self, values: Arrays) -> None:
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.assign(tf.cast(value, parameter.dtype))

    def gradients(self, indices: MicroBatch) -> Gradients:
        batch = keras.tree.map_structure(tf.convert_to_tensor, self._take(indices))
        return [None if gradient is None else _array(gradient) for gradient in self._gradients(batch)]

    def _trace_gradients(self, batch: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = self._loss(self._model, batch)
        found = tape.gradient(loss, self._parameters)
        return [None if gradient is None else tf.convert_to_tensor(gradient) for gradient in found]

    def step(self, gradients: Gradients, factor: float, rates: Sequence[float] | None) -> None:
        given = [None if g is None else tf.cast(g, p.dtype) for g, p in zip(gradients, self._parameters, strict=True)]
        if not isinstance(self._rate, keras.Variable):
            self._factor.assign(factor)
            self._apply(given)
            return
        number = np.dtype(self._rate.dtype).type
        rate = number(self._rate.numpy() if rates is None else rates[0])
        self._rate.assign(rate * number(factor))
        self._apply(given)
        self._rate.assign(rate)

    def _trace_rate(self) -> tf.Tensor:
        rate = self._rate(self.optimizer.iterations)
        return rate * tf.cast(self._factor, rate.dtype)

    def _trace_apply(self, gradients: list[Any]) -> None:
        here = [(g, p) for g, p in zip(gradients, self._parameters, strict=True) if g is not None]
        if here:
            self.optimizer.apply([g for g, _ in here], [p for _, p in here])

    def state(self) -> Any:
        return [native(variable).numpy() for variable in self.optimizer.variables]

    def set_state(self, state: Any) -> None:
        for variable, value in zip(self.optimizer.variables, state, strict=True):
            variable.assign(value)

    def moments(self) -> Moments:
        return {index: _array(variable) for index, variable in self._moments()}

    def set_moments(self, moments: Moments) -> None:
        for index, variable in self._moments():
            if index in moments:
                variable.assign(tf.cast(moments[index], variable.dtype))

    def forget(self) -> None:
        for variable in map(native, self.optimizer.variables):
            if not self._is_rate(variable):
                variable.assign(tf.zeros_like(variable))

    def _is_rate(self, variable: tf.Variable) -> bool:
        return variable is native(self._rate)

    def _moments(self) -> list[tuple[int, tf.Variable]]:
        shapes = {tuple(parameter.shape) for parameter in self._parameters}
        kept = [variable for variable in map(native, self.optimizer.variables) if not self._is_rate(variable)]
        return [(i, v) for i, v in enumerate(kept) if v.dtype.is_floating and tuple(v.shape) in shapes]

    def outer(self, make: Any) -> Callable[[Arrays], Arrays]:
        variables = [tf.Variable(parameter) for parameter in self._parameters]
        optimizer = make(variables)

        def step(gradients: Arrays) -> Arrays:
            optimizer.apply([tf.cast(g, v.dtype) for g, v in zip(gradients, variables, strict=True)], variables)
            return [_array(variable) for variable in variables]

        return step


def _array(tensor: Any) -> Any:
    return tensor.numpy().astype(np.float64)
