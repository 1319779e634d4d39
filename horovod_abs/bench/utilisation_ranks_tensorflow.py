"""What each rank of the utilisation benchmark runs with TensorFlow; see ``utilisation_ranks``."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from time import perf_counter

import horovod.tensorflow as plain_horovod
import keras
import numpy as np
import tensorflow as tf

import horovod_abs.tensorflow as hvd
from horovod_abs import options
from horovod_abs.bench.utilisation import MICRO_BATCH, Setting
from horovod_abs.bench.utilisation_turns import Advance, in_turn, window
from horovod_abs.emulate import Pace
from horovod_abs.observe.stopwatch import Stopwatch
from horovod_abs.observe.summary import Summary, summarise_totals

_LAYERS = 4
_LEARNING_RATE = 1e-3


class Device:
    """One rank's emulated device, with a model of its own; see :class:`horovod_abs.bench.utilisation_ranks.Device`.

    Args:
        setting: What is measured.
        pace: Of this rank.
    """

    def __init__(self, setting: Setting, pace: Pace) -> None:
        width = max(round((setting.parameters / _LAYERS) ** 0.5 - 0.5), 1)  # width · (width + 1) parameters a layer
        self.model = keras.Sequential([keras.Input((width,)), *(keras.layers.Dense(width) for _ in range(_LAYERS))])
        self.sample = tf.random.normal((1, width))
        self.pace = pace

    def sgd(self) -> keras.optimizers.SGD:
        """What a user would wrap."""
        return keras.optimizers.SGD(_LEARNING_RATE)

    def loss(self, sample: tf.Tensor) -> tf.Tensor:
        """Of one sample, which counts as 16."""
        return tf.reduce_mean(tf.square(self.model(sample)))


def synchronous(setting: Setting, device: Device, advance: Advance) -> Summary:
    """Horovod's gradient tape with equal batches; its optimizer averages nothing under Keras 3.

    Forward and backward pass are compiled and stretched to the emulated time; the exchange and the update are compiled
    apart, and come after.
    """
    optimizer, computing = device.sgd(), Stopwatch()
    variables = device.model.trainable_variables
    optimizer.build(variables)

    @tf.function
    def compute(sample: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = device.loss(sample)
        return tape.gradient(loss, [variable.value for variable in variables])

    @tf.function
    def update(gradients: list[tf.Tensor]) -> None:
        averages = plain_horovod.grouped_allreduce(gradients, op=plain_horovod.Average)
        optimizer.apply_gradients(zip(averages, variables, strict=True))

    began = computed = 0.0
    update(compute(device.sample))
    for step in range(setting.warmup_rounds + setting.synchronous_rounds):
        if step == setting.warmup_rounds:
            began, computed = perf_counter(), computing.seconds
        with computing, device.pace:
            gradients = compute(device.sample)
        update(gradients)
        advance()
    mine = np.array([[perf_counter() - began, computing.seconds - computed]])
    by_rank = hvd.allgather(tf.constant(mine), name="synchronous").numpy()
    return summarise_totals(
        [float(MICRO_BATCH * setting.synchronous_rounds)] * setting.ranks,
        by_rank[:, 1].tolist(),
        float(by_rank[0, 0]),
        rounds=setting.synchronous_rounds,
        ideal=setting.ideal,
    )


def adaptive(setting: Setting, device: Device, advance: Advance) -> Summary:
    """ABS-SGD."""
    optimizer = hvd.DistributedOptimizer(
        device.sgd(), exchange=options.exchange(setting.exchange), clock=options.clock(setting.clock)
    )
    optimizer.on_merge(advance)
    variables = device.model.trainable_variables
    optimizer.build(variables)

    @tf.function
    def compute(sample: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = device.loss(sample)
        gradients = tape.gradient(loss, [variable.value for variable in variables])
        optimizer.apply_gradients(zip(gradients, variables, strict=True), samples=MICRO_BATCH)

    endless = itertools.repeat(device.sample)
    for sample in optimizer.epoch(endless, rounds=setting.warmup_rounds + setting.rounds + 1):
        with device.pace:
            compute(sample)
        optimizer.boundary()
    return window(list(optimizer.history), setting)


def main() -> None:
    """Measure both algorithms in turn; rank 0 writes the summaries."""
    setting, path = Setting.from_json(sys.argv[1]), Path(sys.argv[2])
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd.init()
    keras.utils.set_random_seed(0)
    pace = Pace(1e-3 * setting.micro_batch_ms[hvd.rank()], rank=hvd.rank())
    runs = {
        "ssgd": lambda advance: synchronous(setting, Device(setting, pace), advance),
        "abs": lambda advance: adaptive(setting, Device(setting, pace), advance),
    }
    repeats = in_turn(setting, hvd.rank(), runs)
    late = hvd.allgather(tf.constant([pace.late]), name="late").numpy().tolist()
    if hvd.rank() == 0:
        parameters = Device(setting, pace).model.count_params()
        about = {"parameters": parameters, "late_micro_batches": late, "tensorflow": tf.__version__}
        summaries = {name: [summary.to_dict() for summary in of_one] for name, of_one in repeats.items()}
        path.write_text(json.dumps({"repeats": summaries, "about": about}))


if __name__ == "__main__":
    main()
