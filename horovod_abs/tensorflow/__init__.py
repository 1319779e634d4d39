"""Horovod for TensorFlow, with exchanges that nobody waits for.

Everything of ``horovod.tensorflow`` is here under its own name, so that one changed import line is enough::

    import horovod_abs.tensorflow as hvd

What is broken under Keras 3 (the optimizer, broadcasts of Keras's variables) is ours under the same name.
"""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as _horovod
from horovod.tensorflow import *  # noqa: F403

from horovod_abs import mpi as _mpi
from horovod_abs import shutdown as _shutdown
from horovod_abs.core.clocks import Clock, CountClock, IntervalClock, ReplayClock, SyncClock, TargetBatchClock
from horovod_abs.driver import RoundRecord
from horovod_abs.errors import ExchangeFailed, ExchangeTimeout, Mismatch, RunError
from horovod_abs.exchanges import Gradients, ModelUpdates
from horovod_abs.observe.runlog import read_run_log
from horovod_abs.tensorflow.checkpoint import Checkpointer
from horovod_abs.tensorflow.functions import (
    SyncBatchNormalization,
    average,
    average_buffers,
    broadcast_variables,
    evaluate,
)
from horovod_abs.tensorflow.optimizer import DistributedOptimizer as DistributedOptimizer
from horovod_abs.tensorflow.optimizer import DistributedOptimizerMixin
from horovod_abs.tensorflow.sampler import adaptive_dataset

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
    "SyncBatchNormalization",
    "SyncClock",
    "TargetBatchClock",
    "adaptive_dataset",
    "average",
    "average_buffers",
    "broadcast_variables",
    "evaluate",
    "read_run_log",
]


def init(*args: Any, **kwargs: Any) -> None:
    """``horovod.tensorflow.init``, between what has to be done before it (MPI) and after it (the process's end)."""
    _mpi.prepare()
    _horovod.init(*args, **kwargs)
    if _horovod.size() > 1:
        _shutdown.prepare()


def __getattr__(name: str) -> Any:
    """Whatever else ``horovod.tensorflow`` has."""
    return getattr(_horovod, name)
