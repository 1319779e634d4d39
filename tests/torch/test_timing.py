"""How long a micro-batch takes."""

from __future__ import annotations

import time

import torch

from horovod_abs.timing import HostTimer
from horovod_abs.torch.timing import CudaTimer, timer_for


def test_the_host_timer_measures_from_start_to_stop() -> None:
    timer = HostTimer()
    assert timer.stop() == 0.0
    timer.start()
    time.sleep(0.02)
    assert timer.stop() >= 0.02


def test_a_timer_is_chosen_by_the_device() -> None:
    assert isinstance(timer_for(torch.device("cpu")), HostTimer)
    assert isinstance(timer_for(torch.device("cuda", 0)), CudaTimer)
