"""How long a micro-batch takes to compute on CUDA."""

from __future__ import annotations

import torch

from horovod_abs.timing import HostTimer, Timer


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
