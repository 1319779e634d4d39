"""What ``model.fit`` costs on one rank with our optimizer, against the plain Keras optimizer.

The same small convolutional network (16 tensors, 6.3 M parameters) is fitted to micro-batches of 16 in three ways, in
turn, one thread each: with plain Keras, which updates at each step; with ours and no round's end, so that it only
accumulates; and with ours and a round at each step, the exchange of one rank and the merge included. The medians over
steps tell what accumulating costs, as a ratio to plain Keras, and what a round costs on top, in milliseconds and in
bytes of gradient per second.
"""

from __future__ import annotations

from statistics import median
from time import perf_counter
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from rich.table import Table

import horovod_abs.tensorflow.keras as hvd

MICRO_BATCH = 16
_SIDE = 32
_FILTERS = (64, 128, 256, 512, 512, 512)
_WARMUP_STEPS = 2
_NEVER = 10**6


class _StepTimes(keras.callbacks.Callback):
    """Seconds from the beginning of each step to the beginning of the next."""

    def __init__(self) -> None:
        super().__init__()
        self._begins: list[float] = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """A step begins."""
        self._begins.append(perf_counter())

    @property
    def seconds(self) -> list[float]:
        """Of each step but the first few."""
        return np.diff(self._begins)[_WARMUP_STEPS:].tolist()


def measure(steps: int, repeats: int = 2) -> dict[str, Any]:
    """Measure all three, on this process as the only rank.

    Args:
        steps: Timed in each repeat.
        repeats: Turns of each way.

    Returns:
        ``time_ratio`` of accumulating to plain Keras, ``round_ms``, ``round_gigabytes_per_second``, and the medians.

    Raises:
        ValueError: ``steps`` is not positive.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd.init()
    ways: dict[str, Any] = {"plain": None, "accumulating": hvd.CountClock(_NEVER), "rounds": hvd.CountClock(1)}
    models = {name: _model(clock) for name, clock in ways.items()}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, model in models.items():
            seconds[name] += _fit(model, steps)
    return report(seconds, 4 * models["plain"].count_params())


def report(seconds: dict[str, list[float]], gradient: int) -> dict[str, Any]:
    """The result as plain values.

    Args:
        seconds: Of steps, by way.
        gradient: Its size, in bytes.
    """
    medians = {name: median(times) for name, times in seconds.items()}
    round_seconds = medians["rounds"] - medians["accumulating"]
    return {
        "time_ratio": medians["accumulating"] / medians["plain"],
        "round_ms": 1e3 * round_seconds,
        "round_gigabytes_per_second": 1e-9 * gradient / round_seconds,
        "milliseconds_per_step": {name: 1e3 * value for name, value in medians.items()},
        "gradient_bytes": gradient,
        "steps": len(seconds["plain"]),
    }


def _model(clock: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    strides = (1, *(2 for _ in _FILTERS[1:4]), 1, 1)
    layers = [
        keras.layers.Conv2D(filters, 3, stride, "same", activation="relu")
        for filters, stride in zip(_FILTERS, strides, strict=True)
    ]
    pooling = keras.layers.GlobalAveragePooling2D()
    model = keras.Sequential([keras.Input((_SIDE, _SIDE, 3)), *layers, pooling, keras.layers.Dense(10)])
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    if clock is not None:
        optimizer = hvd.DistributedOptimizer(optimizer, clock=clock, max_micro_batches=_NEVER)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _fit(model: keras.Model, steps: int) -> list[float]:
    random = np.random.default_rng(0)
    count = MICRO_BATCH * (steps + _WARMUP_STEPS + 1)
    images = random.standard_normal((count, _SIDE, _SIDE, 3)).astype(np.float32)
    times = _StepTimes()
    ours = isinstance(model.optimizer, hvd.DistributedOptimizerMixin)
    callbacks = [hvd.callbacks.RoundsCallback()] if ours else []
    model.fit(images, random.integers(0, 10, count), batch_size=MICRO_BATCH, verbose=0, callbacks=[*callbacks, times])
    return times.seconds


def to_table(result: dict[str, Any]) -> Table:
    """:func:`report` for people."""
    table = Table(
        title=f"Overhead of model.fit: {result['gradient_bytes'] / 4e6:.1f} M parameters, micro-batch 16, one rank",
        caption=f"accumulating costs {result['time_ratio']:.3f} of plain Keras; a round {result['round_ms']:.1f} ms, "
        f"{result['round_gigabytes_per_second']:.2f} GB/s",
    )
    table.add_column("")
    table.add_column("a step", justify="right")
    labels = {"plain": "plain Keras", "accumulating": "ours, no round's end", "rounds": "ours, a round at each step"}
    for name, label in labels.items():
        table.add_row(label, f"{result['milliseconds_per_step'][name]:.1f} ms")
    return table
