"""``model.fit``: exact epochs, the same logs on all ranks, Horovod's callbacks."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import horovod_abs.tensorflow.keras as hvd
from tests.tensorflow.scenario import Ranks, digest, flat, scenario, wrap


def regression(samples: int = 240) -> tuple[np.ndarray, np.ndarray]:
    """Inputs, whose first column is the sample's index, and targets."""
    x = np.random.default_rng(3).standard_normal((samples, 6))
    y = np.sin(x.sum(1, keepdims=True))
    x[:, 0] = np.arange(samples)
    return x, y


def model_of(ranks: Ranks, seed: int = 0, **compile_options: Any) -> keras.Model:
    """A compiled model whose first input column, the index, does not count."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, "tanh")(inputs[:, 1:])
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    options = {"optimizer": wrap(keras.optimizers.SGD(0.05, momentum=0.5)), "loss": "mse", **compile_options}
    model.compile(**options)
    return model


class Watch(keras.callbacks.Callback):
    """Sleeps in each step, as slow as ``seconds(epoch)`` says, and keeps the logs."""

    def __init__(self, seconds: Any) -> None:
        super().__init__()
        self.seconds = seconds
        self.logs: list[dict[str, float]] = []
        self.epoch = 0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(self.seconds(self.epoch))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logs.append(dict(logs))


@scenario(gloo=True)
def exact_epochs(ranks: Ranks) -> list[int]:
    """Three epochs, speeds swapped in between: every sample exactly three times, and shares by speed."""
    x, y = regression()
    drawn: list[list[float]] = []

    class Draws(keras.Model):
        def train_step(self, data: Any) -> Any:
            tf.py_function(lambda column: drawn.append(column.numpy().tolist()), [data[0][:, 0]], [])
            return super().train_step(data)

    inputs = keras.Input((6,))
    model = Draws(inputs, keras.layers.Dense(1)(inputs[:, 1:]))
    model.compile(wrap(keras.optimizers.SGD(0.02)), "mse")
    data = hvd.adaptive_dataset(x, y, optimizer=model.optimizer, batch_size=4, seed=5)
    watch = Watch(lambda epoch: 0.03 if (ranks.rank == 0) == (epoch % 2 == 0) else 0.006)
    model.fit(data, epochs=3, verbose=0, callbacks=hvd.callbacks.wrap([watch]))
    ranks.assert_same(digest(model), "parameters")
    everyone = ranks.gather(drawn)
    counts = np.bincount([int(index) for own in everyone for batch in own for index in batch], minlength=len(x))
    assert set(counts.tolist()) == {3}, counts.tolist()
    assert model.optimizer.samples_seen == 3 * len(x)
    model.optimizer._rounds.refuse_pending("")
    return [len(own) for own in everyone]


@scenario(gloo=True)
def horovods_example(ranks: Ranks) -> None:
    """Horovod's pattern with the import line changed: ranks that begin apart, with data of their own, end equal."""
    x, y = regression()
    own = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(300, seed=ranks.rank).repeat().batch(8)
    model = model_of(ranks, seed=ranks.rank, metrics=["mae"])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.05, warmup_epochs=2),
    ]
    history = model.fit(own, steps_per_epoch=12, epochs=3, verbose=0, callbacks=callbacks).history
    ranks.assert_same(digest(model), "parameters")
    ranks.assert_same(history, "logs")
    assert model.optimizer.samples_seen == 3 * 12 * 8 * ranks.size
    np.testing.assert_allclose(history["lr"], [0.05 * (1 + (ranks.size - 1) / 2) / ranks.size, 0.05, 0.05], rtol=1e-12)
    assert history["loss"][-1] < history["loss"][0]


@scenario
def logs_are_those_of_all_samples(ranks: Ranks) -> None:
    """Means, AUC and F1 of a validation set in unequal parts are those of the whole, and EarlyStopping sees them."""
    x, y = regression()
    y = (y > 0).astype(float)
    metrics = ["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.F1Score(threshold=0.5, name="f1")]
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, "sigmoid")])
    model.compile(wrap(keras.optimizers.SGD(1e-3)), "binary_crossentropy", metrics=metrics)
    data = hvd.adaptive_dataset(x, y, optimizer=model.optimizer, batch_size=8)
    parts = np.split(np.arange(len(x)), [10, 100, 110][: ranks.size - 1])
    mine = parts[ranks.rank]
    stopping = keras.callbacks.EarlyStopping("val_loss", min_delta=1e9, mode="min")
    watch = Watch(lambda epoch: 0.002 * ranks.rank)
    fitted = model.fit(
        data,
        epochs=3,
        verbose=0,
        validation_data=(x[mine], y[mine]),
        callbacks=hvd.callbacks.wrap([watch, stopping]),
    )
    assert len(watch.logs) == 2, "EarlyStopping was to end training after two epochs"
    ranks.assert_same(watch.logs, "logs")
    assert fitted.history["val_loss"] == [logs["val_loss"] for logs in watch.logs]
    whole = model.evaluate(x, y, verbose=0, return_dict=True)
    for name in ("loss", "accuracy", "auc", "f1"):
        np.testing.assert_allclose(watch.logs[-1][f"val_{name}"], whole[name], rtol=1e-6, err_msg=name)


@scenario
def compiled_by_xla(ranks: Ranks) -> None:
    """``jit_compile=True``, and arrays handed to ``fit`` as they are."""
    x, y = regression()
    model = model_of(ranks, jit_compile=True)
    before = flat(model)
    model.fit(x[ranks.rank :: 4], y[ranks.rank :: 4], batch_size=8, epochs=2, verbose=0, callbacks=hvd.callbacks.wrap())
    ranks.assert_same(digest(model), "parameters")
    assert np.abs(flat(model) - before).max() > 1e-3
    assert model.optimizer.samples_seen == 2 * sum(len(x[rank::4]) for rank in range(ranks.size))


@scenario
def run_eagerly(ranks: Ranks) -> None:
    """``run_eagerly=True``."""
    x, y = regression()
    model = model_of(ranks, run_eagerly=True)
    model.fit(x[ranks.rank :: 8], y[ranks.rank :: 8], batch_size=8, verbose=0, callbacks=hvd.callbacks.wrap())
    ranks.assert_same(digest(model), "parameters")
    assert model.optimizer.samples_seen == sum(len(x[rank::8]) for rank in range(ranks.size))


@scenario
def stopping_on_one_rank(ranks: Ranks) -> None:
    """``stop_training`` on one rank, in the middle of an epoch, ends training on all."""
    x, y = regression()
    model = model_of(ranks)

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            time.sleep(0.003)
            if ranks.rank == 1 and batch == 2:
                self.model.stop_training = True

    data = hvd.adaptive_dataset(x, y, optimizer=model.optimizer, batch_size=4)
    history = model.fit(data, epochs=5, verbose=0, callbacks=hvd.callbacks.wrap([Stop()]))
    ranks.assert_same((digest(model), history.epoch), "parameters and epochs")
    assert history.epoch == [0]
    assert model.optimizer.samples_seen < len(x)


@scenario
def fit_is_refused(ranks: Ranks) -> None:
    """What does not go together with rounds, by a message that says what to do."""
    x, y = regression()
    wrapped = hvd.callbacks.wrap()
    with pytest.raises(ValueError, match=r"steps_per_execution > 1 .*leave it at 1"):
        model_of(ranks, steps_per_execution=2).fit(x, y, verbose=0, callbacks=wrapped)
    with pytest.raises(ValueError, match=r"not distributed.*DistributedOptimizer"):
        model_of(ranks, optimizer="sgd").fit(x, y, verbose=0, callbacks=wrapped)
    with pytest.raises(ValueError, match=r"PearsonCorrelation.*cannot be averaged"):
        model_of(ranks, metrics=[Correlation()]).fit(x, y, verbose=0, callbacks=wrapped)
    with pytest.raises(Exception, match=r"model.fit needs one of hvd.callbacks"):
        model_of(ranks).fit(x, y, verbose=0)
    with pytest.raises(RuntimeError, match=r"has trained nothing: it needs one of hvd.callbacks"):
        model_of(ranks).fit(x[:8], y[:8], batch_size=8, verbose=0)
    with pytest.raises(ValueError, match="BackupAndRestore"):
        hvd.callbacks.wrap([keras.callbacks.BackupAndRestore("nowhere")])
    model = model_of(ranks)
    data = hvd.adaptive_dataset(x, y, optimizer=model.optimizer)
    with pytest.raises(RuntimeError, match="does not read the adaptive_dataset"):
        model.fit(x, y, verbose=0, callbacks=hvd.callbacks.wrap())
    model = model_of(ranks)
    data = hvd.adaptive_dataset(x, y, optimizer=model.optimizer).prefetch(2)
    with pytest.raises(Exception, match="was read ahead"):
        model.fit(data, verbose=0, callbacks=hvd.callbacks.wrap())


class Correlation(keras.metrics.Metric):
    """A metric whose state is no sum."""

    def __init__(self) -> None:
        super().__init__(name="PearsonCorrelation")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Nothing."""

    def result(self) -> float:
        return 0.0
