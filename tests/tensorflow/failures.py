"""One rank of a launch that is to go wrong; see ``tests.torch.failures``.

horovodrun -np 2 python -m tests.tensorflow.failures CASE
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable

import keras
import tensorflow as tf

import horovod_abs.tensorflow as hvd
from tests.tensorflow.scenario import small_model, wrap

BEFORE = 20
"""Micro-batches of rank 1 before it fails."""


def _train(fail: Callable[[], None], **options: object) -> None:
    """An endless epoch, in which rank 1 fails."""
    model = small_model()
    optimizer = wrap(keras.optimizers.SGD(0.01), max_micro_batches=8, **options)
    variables = model.trainable_variables
    optimizer.build(variables)

    @tf.function
    def micro_batch(x: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x))
        gradients = tape.gradient(loss, [variable.value for variable in variables])
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    batches = itertools.repeat(tf.random.normal((4, 6), dtype=tf.float64))
    for number, x in enumerate(optimizer.epoch(batches, rounds=1_000_000)):
        micro_batch(x)
        time.sleep(0.005)
        optimizer.boundary()
        if hvd.rank() == 1 and number == BEFORE:
            print(f"rank 1 fails at {time.time()}", flush=True)
            fail()


def frozen() -> None:
    """Rank 1 stops, and never answers again."""
    _train(lambda: os.kill(os.getpid(), signal.SIGSTOP), exchange_timeout=3.0)


def killed() -> None:
    """Rank 1 dies."""
    _train(lambda: os.kill(os.getpid(), signal.SIGKILL))


if __name__ == "__main__":
    tf.config.threading.set_inter_op_parallelism_threads(1)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    {case.__name__: case for case in (frozen, killed)}[sys.argv[1]]()
