"""The control plane: small messages between ranks, beside Horovod's exchanges.

The only module that imports mpi4py, and it does so only where ranks run under MPI. ``mpi4py.MPI`` must be imported
before Horovod starts: then both share one MPI with full thread support, and a rank's exception does not make Horovod
finalise MPI under the others. Everything travels over a duplicate of the world communicator, because Horovod's
background thread uses the world itself.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

_LAUNCHED_BY_MPI = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE")
_ANNOUNCEMENT_TAG = 4171
_control: ControlPlane | None = None


def prepare() -> None:
    """Get MPI ready for Horovod, if ranks run under it. Call before ``hvd.init()``, on every rank."""
    global _control
    if _control is not None or not launched_by_mpi():
        return
    if int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1")) > len(os.sched_getaffinity(0)):
        os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")  # ranks spin while they wait
    from mpi4py import MPI

    _control = ControlPlane(MPI.COMM_WORLD.Dup())


def launched_by_mpi() -> bool:
    """Whether this process is a rank that MPI's launcher has started, with Horovod's MPI controller."""
    if os.environ.get("HOROVOD_CONTROLLER", "mpi").lower() != "mpi":
        return False
    return any(name in os.environ for name in _LAUNCHED_BY_MPI)


def control_plane() -> ControlPlane | None:
    """The control plane that :func:`prepare` has set up; ``None`` without MPI."""
    return _control


class ControlPlane:
    """Tells the other ranks how far each optimizer of this rank has come.

    Announcements cost nothing while all is well: a rank sends one only when an exchange takes suspiciously long, or
    when it begins and ends something long of its own.

    Args:
        comm: A communicator that nothing else uses.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._sent: list[tuple[Any, np.ndarray]] = []
        self._known: dict[int, dict[int, tuple[int, bool]]] = {}  # optimizer -> rank -> (launches, busy)

    def announce(self, optimizer: int, launches: int, busy: bool, to: list[int]) -> None:
        """Send without waiting: this rank has launched so many exchanges, and is busy or is not."""
        message = np.array([optimizer, launches, busy], dtype=np.int64)
        self._sent = [(request, buffer) for request, buffer in self._sent if not request.Test()]
        for rank in to:
            self._sent.append((self._comm.Isend(message, dest=rank, tag=_ANNOUNCEMENT_TAG), message))

    def known(self, optimizer: int) -> dict[int, tuple[int, bool]]:
        """What the other ranks have announced last: ``{rank: (launches, busy)}``."""
        from mpi4py import MPI

        status = MPI.Status()
        while self._comm.Iprobe(source=MPI.ANY_SOURCE, tag=_ANNOUNCEMENT_TAG, status=status):
            message = np.empty(3, dtype=np.int64)
            self._comm.Recv(message, source=status.Get_source(), tag=_ANNOUNCEMENT_TAG)
            about = self._known.setdefault(int(message[0]), {})
            about[status.Get_source()] = (int(message[1]), bool(message[2]))
        return self._known.get(optimizer, {})
