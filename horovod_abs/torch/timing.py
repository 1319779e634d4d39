"""How long a micro-batch takes to compute."""

from __future__ import annotations

import time
from typing import Protocol

import torch


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


class CudaTimer:
    """For CUDA: time between events, and never more than one micro-batch of work queued ahead of the device.

    ``stop`` waits for the micro-batch *before* the one that was just queued, so the device always has work, while the
    engine's boundaries keep up with what has really been computed. Written for CUDA; not tested, for want of one.
    """

    def __init__(self) -> None:
        self._started: torch.cuda.Event | None = None
        self._before: tuple[torch.cuda.Event, torch.cuda.Event] | None = None

    def start(self) -> None:
        self._started = self._record()

    def stop(self) -> float:
        queued = (self._started, self._record()) if self._started else None
        before, self._before = self._before, queued
        if before is None:
            return 0.0
        before[1].synchronize()
        return float(before[0].elapsed_time(before[1])) / 1e3

    @staticmethod
    def _record() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def timer_for(device: torch.device) -> Timer:
    """The timer that fits a device."""
    return CudaTimer() if device.type == "cuda" else HostTimer()
