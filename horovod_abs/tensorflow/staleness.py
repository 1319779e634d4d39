"""How gradients cope with being applied one round after the parameters that they were taken at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import tensorflow as tf

from horovod_abs.tensorflow.flat import Gradient


class AsPublished:
    """Do nothing about it."""

    launches_first = True

    def begin(self) -> None:
        """A round without one before it is about to be launched."""

    def nothing_to_update(self) -> None:
        """A merge leaves the parameters as they are."""

    def before_update(self, gradients: Sequence[Gradient]) -> Sequence[Gradient]:
        """A merge is about to update the parameters: the gradients to update them with; traced.

        Args:
            gradients: The mean gradients.
        """
        return gradients

    def predict(self, step: Callable[[], object], state: Sequence[tf.Variable]) -> None:
        """A round that holds gradients of this rank was launched; traced.

        Args:
            step: Takes a step of the user's optimizer with this rank's own mean gradients of that round.
            state: What the step changes besides the parameters.
        """

    @contextmanager
    def authoritative(self) -> Iterator[None]:
        """While inside, the parameters are those that all ranks share."""
        yield


class Taylor(AsPublished):
    """Compensate to first order: λ ḡ⊙ḡ⊙(x_k − x_{k−1}) is added to the mean gradient ḡ, taken at x_{k−1}.

    Keeps one model-sized copy, x_{k−1}.

    Args:
        parameters: The parameters that are updated.
        strength: λ.

    References:
        Zheng et al., "Asynchronous Stochastic Gradient Descent with Delay Compensation", arXiv 1609.08326, equation 10.
    """

    def __init__(self, parameters: Sequence[tf.Variable], strength: float) -> None:
        self._parameters = list(parameters)
        self._strength = strength
        self._taken_at = copies(parameters)

    def begin(self) -> None:
        copy(self._parameters, self._taken_at)

    def nothing_to_update(self) -> None:
        copy(self._parameters, self._taken_at)

    def before_update(self, gradients: Sequence[Gradient]) -> Sequence[Gradient]:
        compensated = [
            None
            if gradient is None
            else gradient + self._strength * gradient * gradient * tf.cast(parameter - taken_at, gradient.dtype)
            for gradient, parameter, taken_at in zip(gradients, self._parameters, self._taken_at, strict=True)
        ]
        copy(self._parameters, self._taken_at)
        return compensated


class Lookahead(AsPublished):
    """Take the next round's gradients at a predicted model: x plus the step that this rank's own gradient would cause.

    The prediction is undone before the merge, by copy, and everything that the local step changed in the optimizer
    right after it. A rank without a gradient of its own predicts x itself. Keeps one model-sized copy, x; a copy of
    the optimizer's state lives only during the local step.

    Args:
        parameters: The parameters that are updated.
    """

    launches_first = False

    def __init__(self, parameters: Sequence[tf.Variable]) -> None:
        self._parameters = list(parameters)
        self._authoritative = copies(parameters)
        self._ahead = tf.Variable(False, trainable=False)
        self._return = tf.function(self._trace_return, autograph=False)

    def _trace_return(self) -> None:
        copy(self._authoritative, self._parameters)
        self._ahead.assign(False)

    def nothing_to_update(self) -> None:
        if self._ahead:
            self._return()

    def before_update(self, gradients: Sequence[Gradient]) -> Sequence[Gradient]:
        tf.cond(self._ahead, self._trace_return, lambda: None)
        return gradients

    def predict(self, step: Callable[[], object], state: Sequence[tf.Variable]) -> None:
        copy(self._parameters, self._authoritative)
        self._ahead.assign(True)
        kept = [variable.read_value() for variable in state]
        step()
        for variable, value in zip(state, kept, strict=True):
            variable.assign(value)

    @contextmanager
    def authoritative(self) -> Iterator[None]:
        if not self._ahead:
            yield
            return
        predicted = [parameter.read_value() for parameter in self._parameters]
        copy(self._authoritative, self._parameters)
        try:
            yield
        finally:
            for parameter, value in zip(self._parameters, predicted, strict=True):
                parameter.assign(value)


def copies(variables: Sequence[tf.Variable]) -> list[tf.Variable]:
    """New variables with the values of others, that nothing keeps track of."""
    with tf.init_scope():
        return [tf.Variable(variable.read_value(), trainable=False) for variable in variables]


def copy(source: Sequence[tf.Variable], target: Sequence[tf.Variable]) -> None:
    """Give variables the values of others."""
    for one, other in zip(source, target, strict=True):
        other.assign(one)
