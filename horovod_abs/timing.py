"""How long a micro-batch takes to compute."""

from __future__ import annotations

import time
from typing import Protocol


class Timer(Protocol):
    """Measures from the moment the user's program gets control back until it calls ``step``."""

    def start(self) -> None:
        """The user's program goes on."""

    def stop(self) -> float:
        """The micro-batch is done; seconds that it (on CUDA: the one before it) has taken, 0 for the first."""


class HostTimer:
    """For a device that computes while the host waits: wall-clock time."""

    def __init__(self) -> None:
        self._started: float | None = None

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> float:
        return 0.0 if self._started is None else time.perf_counter() - self._started
