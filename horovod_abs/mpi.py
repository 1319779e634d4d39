"""The control plane: small messages between ranks, beside Horovod's exchanges.

The only module that imports mpi4py, and it does so only where ranks run under MPI. ``mpi4py.MPI`` must be imported
before Horovod starts: then both share one MPI with full thread support, and a rank's exception does not make Horovod
finalise MPI under the others. Everything travels over a duplicate of the world communicator, because Horovod's
background thread uses the world itself.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Message = NDArray[np.int64]

_LAUNCHED_BY_MPI = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE")
_ANNOUNCEMENT_TAG = 4171
_TICK_TAG = 4172
RING = {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1", "OMPI_MCA_coll_tuned_allreduce_algorithm": "4"}
_control: ControlPlane | None = None


def prepare() -> None:
    """Get MPI ready for Horovod, if ranks run under it. Call before ``hvd.init()``, on every rank."""
    global _control
    if _control is not None or not launched_by_mpi():
        return
    for name, value in settings(os.environ, len(os.sched_getaffinity(0))).items():
        os.environ[name] = value
    from mpi4py import MPI

    _control = ControlPlane(MPI.COMM_WORLD.Dup())


def settings(environment: Mapping[str, str], processors: int) -> dict[str, str]:
    """What makes Open MPI faster where a rank runs, besides what the user has set, as variables of the environment.

    Over several hosts sums go around a ring: Open MPI's own choice sends twice as much over a slow network, see
    ``horovod-abs bench network``.

    Args:
        environment: Of a rank.
        processors: That it may run on.
    """
    chosen: dict[str, str] = {}
    size, local_size = (int(environment.get(f"OMPI_COMM_WORLD_{which}SIZE", "1")) for which in ("", "LOCAL_"))
    if local_size > processors and "OMPI_MCA_mpi_yield_when_idle" not in environment:
        chosen["OMPI_MCA_mpi_yield_when_idle"] = "1"  # ranks spin while they wait
    if size > local_size and not any(name in environment for name in RING):
        chosen.update(RING)
    return chosen


def launched_by_mpi() -> bool:
    """Whether this process is a rank that MPI's launcher has started, with Horovod's MPI controller."""
    if os.environ.get("HOROVOD_CONTROLLER", "mpi").lower() != "mpi":
        return False
    return any(name in os.environ for name in _LAUNCHED_BY_MPI)


def control_plane() -> ControlPlane | None:
    """The control plane that :func:`prepare` has set up; ``None`` without MPI."""
    return _control


class ControlPlane:
    """Small messages between ranks: ticks, and how far each optimizer has come.

    Ticks go from rank 0 to each rank directly, without waiting, and are looked for at micro-batch boundaries. A
    broadcast would be passed on by ranks in between, each at a boundary of its own: behind a slow rank the tick would
    come late. Nothing is ever posted to receive, so that nothing is left pending at the end.

    Announcements cost nothing while all is well: a rank sends one only when an exchange takes suspiciously long, or
    when it begins and ends something long of its own.

    Args:
        comm: A communicator that nothing else uses.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._sent: list[tuple[Any, np.ndarray]] = []
        self._ticks: dict[int, int] = {}  # optimizer -> the last round that was called
        self._sending = threading.Lock()
        self._known: dict[int, dict[int, tuple[int, bool]]] = {}  # optimizer -> rank -> (launches, busy)

    def announce(self, optimizer: int, launches: int, busy: bool, to: list[int]) -> None:
        """Send without waiting: this rank has launched so many exchanges, and is busy or is not."""
        self._send(np.array([optimizer, launches, busy], dtype=np.int64), to, _ANNOUNCEMENT_TAG)

    def known(self, optimizer: int) -> dict[int, tuple[int, bool]]:
        """What the other ranks have announced last: ``{rank: (launches, busy)}``."""
        for source, message in self._received(_ANNOUNCEMENT_TAG):
            self._known.setdefault(int(message[0]), {})[source] = (int(message[1]), bool(message[2]))
        return self._known.get(optimizer, {})

    def send_tick(self, optimizer: int, round: int, to: Sequence[int]) -> None:
        """Call the end of a round, without waiting."""
        self._send(np.array([optimizer, round, 0], dtype=np.int64), to, _TICK_TAG)

    def latest_tick(self, optimizer: int) -> int:
        """The last round of the optimizer whose end rank 0 has called; -1 if none was."""
        for _, message in self._received(_TICK_TAG):
            about = int(message[0])
            self._ticks[about] = max(self._ticks.get(about, -1), int(message[1]))
        return self._ticks.get(optimizer, -1)

    def _send(self, message: Message, to: Sequence[int], tag: int) -> None:
        with self._sending:  # rank 0's timer sends from a thread of its own
            self._sent = [(request, buffer) for request, buffer in self._sent if not request.Test()]
            for rank in to:
                self._sent.append((self._comm.Isend(message, dest=rank, tag=tag), message))

    def _received(self, tag: int) -> Iterator[tuple[int, Message]]:
        from mpi4py import MPI

        status = MPI.Status()
        while self._comm.Iprobe(source=MPI.ANY_SOURCE, tag=tag, status=status):
            message = np.empty(3, dtype=np.int64)
            self._comm.Recv(message, source=status.Get_source(), tag=tag)
            yield status.Get_source(), message


class Ticker:
    """Calls the end of one optimizer's rounds; satisfies :class:`horovod_abs.driver.Ticker`.

    On rank 0 a timer thread sleeps until the tick is due, so that a slow micro-batch there does not delay it.

    Args:
        control: The control plane.
        optimizer: Number of the optimizer, the same on every rank.
        rank: Number of this rank in ``ranks``.
        ranks: The ranks that exchange, as numbers of the global process set.
    """

    def __init__(self, control: ControlPlane, optimizer: int, rank: int, ranks: Sequence[int]) -> None:
        self._control = control
        self._optimizer = optimizer
        self._keeps_time = rank == 0
        self._others = list(ranks)[1:]
        self._called = -1
        self._timer: threading.Timer | None = None

    def schedule(self, round: int, seconds: float) -> None:
        """On rank 0: call the end of ``round`` in so many seconds, and of no other. On the others: nothing."""
        if not self._keeps_time:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(seconds, self._call, (round,))
        self._timer.daemon = True
        self._timer.start()

    def latest(self) -> int:
        """The last round whose end was called; -1 if none was."""
        return self._called if self._keeps_time else self._control.latest_tick(self._optimizer)

    def _call(self, round: int) -> None:
        self._called = round
        self._control.send_tick(self._optimizer, round, self._others)
