"""One rank of a launch that is to go wrong; see ``tests.torch.failures``.

horovodrun -np 3 python -m tests.tensorflow.failures CASE
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import horovod_abs.tensorflow.keras as hvd
from tests.tensorflow.scenario import small_model, wrap

BEFORE = 60
"""Micro-batches of rank 1 before it fails: everything has been compiled by then."""


def _fail(number: int, by: signal.Signals) -> None:
    if hvd.rank() == 1 and number == BEFORE:
        print(f"rank 1 fails at {time.time()}", flush=True)
        os.kill(os.getpid(), by)


def frozen() -> None:
    """Rank 1 stops in a loop of the program's own, and never answers again."""
    model = small_model()
    optimizer = wrap(keras.optimizers.SGD(0.01), max_micro_batches=8, exchange_timeout=6.0)
    optimizer.build(model.trainable_variables)

    @tf.function
    def train(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    train.get_concrete_function(tf.TensorSpec((4, 6), tf.float64))
    hvd.broadcast_variables(model.variables, root_rank=0)
    data = tf.data.Dataset.from_tensor_slices(np.random.standard_normal((64, 6))).batch(4)
    for number, x in enumerate(optimizer.epoch(data, rounds=1_000_000)):
        train(x)
        time.sleep(0.005)
        optimizer.boundary()
        _fail(number, signal.SIGSTOP)


def killed() -> None:
    """Rank 1 dies in ``model.fit``."""

    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            time.sleep(0.005)
            _fail(batch, signal.SIGKILL)

    model = small_model()
    model.compile(wrap(keras.optimizers.SGD(0.01), max_micro_batches=8), "mse")
    x, y = np.random.standard_normal((64, 6)), np.zeros((64, 1))
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4).repeat()
    model.fit(data, steps_per_epoch=1_000_000, verbose=0, callbacks=hvd.callbacks.wrap([Fail()]))


if __name__ == "__main__":
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    keras.backend.set_floatx("float64")
    hvd.init()
    {case.__name__: case for case in (frozen, killed)}[sys.argv[1]]()
