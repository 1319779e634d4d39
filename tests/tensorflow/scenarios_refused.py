"""What Keras offers beside: it works, or is refused by a message that says what to do instead."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import horovod_abs.tensorflow as hvd
from tests.tensorflow.replay import Trial
from tests.tensorflow.scenario import Ranks, digest, scenario, small_model, wrap


def _micro_batch(model: keras.Model, optimizer: Any, x: Any) -> None:
    """One, inside a graph."""

    @tf.function
    def compute() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, [v.value for v in variables]), variables, strict=True))

    compute()


@scenario
def loss_scaling_is_refused(ranks: Ranks) -> None:
    """Around our optimizer, in a loop of one's own and under ``mixed_float16``; and inside it."""
    x = np.ones((4, 6))
    with pytest.raises(ValueError, match=r"LossScaleOptimizer .*mixed_bfloat16"):
        _micro_batch(small_model(), keras.optimizers.LossScaleOptimizer(wrap(keras.optimizers.SGD(0.1))), x)
    built = wrap(keras.optimizers.SGD(0.1))
    model = small_model()
    built.build(model.trainable_variables)
    with pytest.raises(ValueError, match=r"LossScaleOptimizer .*mixed_bfloat16"):
        _micro_batch(model, keras.optimizers.LossScaleOptimizer(built), x)
    with pytest.raises(ValueError, match=r"LossScaleOptimizer .*mixed_bfloat16"):
        wrap(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile(wrap(keras.optimizers.SGD(0.1)), "mse")
        with pytest.raises(ValueError, match=r"mixed_float16 .*mixed_bfloat16"):
            model.fit(x, x[:, :1], verbose=0, callbacks=[hvd_callback()])
        with pytest.raises(ValueError, match=r"LossScaleOptimizer .*mixed_bfloat16"):
            model.fit(x, x[:, :1], verbose=0)
    finally:
        keras.mixed_precision.set_dtype_policy("float64")


def hvd_callback() -> keras.callbacks.Callback:
    """One of ours."""
    from horovod_abs.tensorflow.keras import callbacks

    return callbacks.RoundsCallback()


@scenario
def options_are_refused(ranks: Ranks) -> None:
    """What acts on micro-batches, and what replicates the model inside a rank."""
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps .*CountClock\(n\)"):
        wrap(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    with pytest.raises(ValueError, match="loss_scale_factor is for float16"):
        wrap(keras.optimizers.SGD(0.1, loss_scale_factor=8.0))
    with tf.distribute.OneDeviceStrategy("/cpu:0").scope(), pytest.raises(ValueError, match="Leave the strategy out"):
        wrap(keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="already distributed"):
        wrap(wrap(keras.optimizers.SGD(0.1)))
    with pytest.raises(ValueError, match="not an optimizer of Keras 3"):
        wrap(tf.compat.v1.train.GradientDescentOptimizer(0.1))
    with pytest.raises(ValueError, match=r"SyncBatchNormalization .*GroupNormalization"):
        hvd.SyncBatchNormalization()


@scenario
def moving_averages_of_the_model(ranks: Ranks) -> None:
    """``use_ema``: one step of the average for each merge, none for a prediction."""
    options = {"exchange": hvd.Gradients(staleness="lookahead")}
    trial = Trial(ranks, lambda: keras.optimizers.SGD(0.03, use_ema=True, ema_momentum=0.5), options=options)
    merged: list[list[np.ndarray]] = []

    @trial.optimizer.on_merge
    def keep() -> None:
        with trial.optimizer.authoritative():
            merged.append(trial.model.get_weights())

    trial.train()
    trial.check(staleness="lookahead")
    expected = trial.recorder.initial_weights
    for number, weights in enumerate(merged):
        share = 0.5 if number else 0.0  # Keras begins with the first step's result
        expected = [share * mean + (1 - share) * weight for mean, weight in zip(expected, weights, strict=True)]
    averages = trial.optimizer._model_variables_moving_average
    for average, weight in zip(averages, expected, strict=True):
        np.testing.assert_allclose(average.numpy(), weight, atol=1e-12)
    ranks.assert_same([average.numpy().tolist() for average in averages], "averages")


@scenario
def sparse_gradients(ranks: Ranks) -> None:
    """``IndexedSlices`` are refused, or made dense on request; then the mean is that of all ranks' rows."""
    x = np.array([[ranks.rank], [ranks.rank], [7]])

    def model() -> keras.Model:
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((1,)), keras.layers.Embedding(8, 2)])

    with pytest.raises(ValueError, match="sparse_as_dense=True"):
        _micro_batch(model(), wrap(keras.optimizers.SGD(1.0)), x)
    options = {"sparse_as_dense": True, "exchange": hvd.Gradients(delay=0), "clock": hvd.CountClock(1)}
    trained, optimizer = model(), wrap(keras.optimizers.SGD(1.0), **options)
    before = trained.get_weights()[0]
    optimizer._rounds.payload.samples.assign(3.0)
    _micro_batch(trained, optimizer, x)
    optimizer.boundary()
    optimizer.synchronize()
    ranks.assert_same(digest(trained), "parameters")
    rows = np.zeros((8, 1))
    rows[: ranks.size] = 2.0
    rows[7] = ranks.size
    np.testing.assert_allclose(trained.get_weights()[0], before - before * rows * 2 / 6 / ranks.size, atol=1e-12)


@scenario(gloo=True)
def two_optimizers_of_unlike_length(ranks: Ranks) -> None:
    """As of a GAN, in loops of unlike length: a rank at its end holds up nobody; what would deadlock is refused."""
    for clock in (hvd.SyncClock(), hvd.IntervalClock(0.01)):
        variables = [keras.Variable(np.zeros(3)) for _ in range(2)]
        pair = [wrap(keras.optimizers.SGD(0.1), clock=clock) for _ in variables]
        for _ in range(10 if ranks.rank == 0 else 100):
            for optimizer, variable in zip(pair, variables, strict=True):
                gradient = tf.fill([3], tf.constant(1.0 + ranks.rank, tf.float64))
                optimizer.apply_gradients([(gradient, variable)], samples=2)
        for optimizer, variable in zip(pair, variables, strict=True):
            optimizer.synchronize()
            assert optimizer.samples_seen == 2 * (10 + 100 * (ranks.size - 1))
            ranks.assert_same(variable.numpy().tolist(), "parameters")
    options = {"clock": hvd.IntervalClock(0.01), "exchange": hvd.Gradients(delay=0)}
    pair = [wrap(keras.optimizers.SGD(0.1), **options) for _ in variables]
    for optimizer, variable in zip(pair, variables, strict=True):
        optimizer.build([variable])
    pair[0].apply_gradients([(gradient, variables[0])], samples=2)
    with pytest.raises(hvd.RunError, match=r"two optimizers are in use.*Gradients\(delay=1\) for one of them"):
        pair[1].apply_gradients([(gradient, variables[1])], samples=2)
    pair[0].synchronize()
