"""Gradients, averaged: equal on all ranks, and equal to the formulas in one process."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import horovod_abs.tensorflow as hvd
from tests.tensorflow.replay import Trial, adam, sgd
from tests.tensorflow.scenario import Ranks, flat, scenario, small_model, wrap


@scenario(gloo=True)
def equal_parameters_after_different_data(ranks: Ranks) -> None:
    """Two ranks with gradients 1 and 2 end at −1.5, where Horovod's own optimizer averages nothing under Keras 3."""
    import keras

    variable = keras.Variable(np.zeros(3))
    optimizer = wrap(keras.optimizers.SGD(1.0), clock=hvd.CountClock(1), exchange=hvd.Gradients(delay=0))
    optimizer.apply_gradients([(tf.fill([3], tf.constant(1.0 + ranks.rank, tf.float64)), variable)], samples=4)
    optimizer.synchronize()
    np.testing.assert_allclose(variable.numpy(), -(1 + ranks.size) / 2)


@scenario(gloo=True)
def equals_the_gradient_tape(ranks: Ranks) -> None:
    """``Gradients(delay=0)`` with ``CountClock(1)`` is Horovod's ``DistributedGradientTape``."""
    options = {"exchange": hvd.Gradients(delay=0), "clock": hvd.CountClock(1)}
    trial = Trial(ranks, adam, options=options)
    plain, model = adam(), small_model()
    batches = [np.random.default_rng((k, ranks.rank)).integers(0, 90, 5) for k in range(12)]
    variables = model.trainable_variables
    plain.build(variables)

    @tf.function(autograph=False)
    def synchronous(indices: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = trial.task.loss(model, indices)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, [v.value for v in variables])
        plain.apply_gradients(zip(gradients, variables, strict=True))

    for indices in batches:
        synchronous(tf.constant(indices))
    for indices in trial.optimizer.epoch(batches, rounds=len(batches)):
        trial.step(indices)
    assert len(trial.optimizer.history) >= 12
    ranks.assert_same(flat(trial.model).tobytes(), "parameters")
    np.testing.assert_allclose(flat(trial.model), flat(model), rtol=0, atol=1e-12)


@scenario(gloo=True)
def as_published(ranks: Ranks) -> None:
    """Delay 1, in a graph: the replay's parameters."""
    for make in (sgd, adam):
        trial = Trial(ranks, make)
        for _ in range(2):
            trial.train()
        trial.check()


@scenario
def eagerly(ranks: Ranks) -> None:
    """The same, handed over eagerly."""
    trial = Trial(ranks, eagerly=True)
    trial.train()
    trial.check()


@scenario
def without_delay(ranks: Ranks) -> None:
    """Delay 0."""
    trial = Trial(ranks, options={"exchange": hvd.Gradients(delay=0)})
    trial.train()
    trial.check()


@scenario(gloo=True)
def taylor(ranks: Ranks) -> None:
    """DC-ASGD's compensation."""
    trial = Trial(ranks, options={"exchange": hvd.Gradients(staleness="taylor", taylor_lambda=2.0)})
    trial.train()
    rounds = trial.check(staleness="taylor", taylor_lambda=2.0)
    assert trial.differs(rounds), "no compensation"


@scenario(gloo=True)
def lookahead(ranks: Ranks) -> None:
    """Gradients at a predicted model; the optimizer's state is put back after each prediction."""
    for make in (sgd, adam):
        trial = Trial(ranks, make, options={"exchange": hvd.Gradients(staleness="lookahead")})
        for _ in range(2):
            trial.train()
        rounds = trial.check(staleness="lookahead")
        assert trial.differs(rounds), "no lookahead"
