"""Horovod for PyTorch, with exchanges that nobody waits for.

Everything of ``horovod.torch`` is here under its own name, so that one changed import line is enough::

    import horovod_abs.torch as hvd
"""

from __future__ import annotations

from typing import Any

import horovod.torch as _horovod
from horovod.torch import *  # noqa: F403

from horovod_abs import mpi as _mpi
from horovod_abs import shutdown as _shutdown
from horovod_abs.core.clocks import Clock, CountClock, IntervalClock, ReplayClock, SyncClock, TargetBatchClock
from horovod_abs.driver import RoundRecord
from horovod_abs.errors import ExchangeFailed, ExchangeTimeout, Mismatch, RunError
from horovod_abs.observe.runlog import read_run_log
from horovod_abs.torch.checkpoint import Checkpointer
from horovod_abs.torch.exchanges import Gradients, ModelUpdates
from horovod_abs.torch.functions import ShardSampler, average, average_buffers, evaluate
from horovod_abs.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from horovod_abs.torch.optimizer import DistributedOptimizerMixin, broadcast_optimizer_state, join
from horovod_abs.torch.plain import HorovodRecorder
from horovod_abs.torch.sampler import AdaptiveSampler

__all__ = [
    *(name for name in vars(_horovod) if not name.startswith("_")),
    "AdaptiveSampler",
    "Checkpointer",
    "Clock",
    "CountClock",
    "DistributedOptimizerMixin",
    "ExchangeFailed",
    "ExchangeTimeout",
    "Gradients",
    "HorovodRecorder",
    "IntervalClock",
    "Mismatch",
    "ModelUpdates",
    "ReplayClock",
    "RoundRecord",
    "RunError",
    "ShardSampler",
    "SyncClock",
    "TargetBatchClock",
    "average",
    "average_buffers",
    "broadcast_optimizer_state",
    "evaluate",
    "join",
    "read_run_log",
]


def init(*args: Any, **kwargs: Any) -> None:
    """``horovod.torch.init``, between what has to be done before it (MPI) and after it (the end of the process)."""
    _mpi.prepare()
    _horovod.init(*args, **kwargs)
    if _horovod.size() > 1:
        _shutdown.prepare()


def __getattr__(name: str) -> Any:
    """Whatever else ``horovod.torch`` has."""
    return getattr(_horovod, name)
