"""Horovod for Keras 3, with exchanges that nobody waits for::

    import horovod_abs.tensorflow.keras as hvd

Everything of ``horovod.tensorflow.keras`` is here under its own name; what is broken under Keras 3 is ours.
"""

from __future__ import annotations

from typing import Any

import horovod.tensorflow.keras as _horovod

from horovod_abs.tensorflow import (
    Checkpointer,
    Clock,
    CountClock,
    DistributedOptimizerMixin,
    ExchangeFailed,
    ExchangeTimeout,
    Gradients,
    IntervalClock,
    Mismatch,
    ModelUpdates,
    ReplayClock,
    RoundRecord,
    RunError,
    SyncClock,
    TargetBatchClock,
    adaptive_dataset,
    average,
    average_buffers,
    broadcast_variables,
    evaluate,
    init,
    read_run_log,
)
from horovod_abs.tensorflow.keras import callbacks
from horovod_abs.tensorflow.keras.saving import load_model
from horovod_abs.tensorflow.optimizer import DistributedOptimizer as DistributedOptimizer

__all__ = [
    *(name for name in vars(_horovod) if not name.startswith("_")),
    "Checkpointer",
    "Clock",
    "CountClock",
    "DistributedOptimizerMixin",
    "ExchangeFailed",
    "ExchangeTimeout",
    "Gradients",
    "IntervalClock",
    "Mismatch",
    "ModelUpdates",
    "ReplayClock",
    "RoundRecord",
    "RunError",
    "SyncClock",
    "TargetBatchClock",
    "adaptive_dataset",
    "average",
    "average_buffers",
    "broadcast_variables",
    "callbacks",
    "evaluate",
    "init",
    "load_model",
    "read_run_log",
]


def __getattr__(name: str) -> Any:
    """All else that ``horovod.tensorflow.keras`` has."""
    return getattr(_horovod, name)
