"""Who is missing when an exchange does not complete.

A collective that one rank does not enter says nothing about which one. So a rank whose exchange takes suspiciously
long announces how far it has come, over MPI or over the key-value store that Gloo's launcher runs; those that have
announced nothing are missing.
"""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Sequence

from horovod_abs import mpi

GRACE_SECONDS = 2.0
"""How long a rank that gives up listens for announcements of the others."""


class RollCall:
    """Announcements of one optimizer; satisfies :class:`horovod_abs.driver.Announcer`.

    Args:
        optimizer: Number of the optimizer, the same on every rank.
        rank: Number of this rank in ``ranks``.
        ranks: The ranks that exchange, as numbers of the global process set.
    """

    def __init__(self, optimizer: int, rank: int, ranks: Sequence[int]) -> None:
        self._optimizer = optimizer
        self._rank = rank
        self._ranks = list(ranks)

    def announce(self, launches: int, *, busy: bool = False) -> None:
        """Tell all ranks that this one has launched so many exchanges, or is busy with something long."""
        others = [rank for index, rank in enumerate(self._ranks) if index != self._rank]
        control = mpi.control_plane()
        if control:
            control.announce(self._optimizer, launches, busy, others)
        elif _rendezvous():
            _put(f"{self._optimizer}.{self._rank}", f"{launches} {int(busy)}")

    def behind(self, launches: int) -> tuple[list[int], list[int]]:
        """Ranks not known to have launched so many exchanges, and those of them that said they are busy."""
        others = [rank for rank in range(len(self._ranks)) if rank != self._rank]
        deadline = time.monotonic() + GRACE_SECONDS
        while True:
            known = self._known()
            missing = [rank for rank in others if known.get(rank, (0, False))[0] < launches]
            busy = [rank for rank in missing if known.get(rank, (0, False))[1]]
            if not missing or missing == busy or time.monotonic() > deadline:
                return missing, busy
            time.sleep(0.1)

    def _known(self) -> dict[int, tuple[int, bool]]:
        control = mpi.control_plane()
        if control:
            known = control.known(self._optimizer)
            return {index: known[rank] for index, rank in enumerate(self._ranks) if rank in known}
        if not _rendezvous():
            return {}
        found = {index: _get(f"{self._optimizer}.{index}") for index in range(len(self._ranks))}
        return {index: (int(value.split()[0]), value.split()[1] == "1") for index, value in found.items() if value}


def _rendezvous() -> tuple[str, int] | None:
    """Address of the key-value store that ``horovodrun --gloo`` runs."""
    address = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    port = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "0")
    return (address, int(port)) if address and int(port) > 0 else None


def _put(key: str, value: str) -> None:
    _ask(key, value.encode())


def _get(key: str) -> str | None:
    return _ask(key, None) or None


def _ask(key: str, data: bytes | None) -> str:
    """Put ``data`` under ``key``, or get what is there; "" if there is nothing or the store is gone."""
    where = _rendezvous()
    if where is None:
        return ""
    address = f"http://{where[0]}:{where[1]}/horovod_abs/{key}"
    request = urllib.request.Request(address, data=data, method="GET" if data is None else "PUT")
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(request, timeout=2) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""
