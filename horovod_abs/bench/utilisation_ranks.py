"""What each rank of the utilisation benchmark runs, given a setting and a file for rank 0 to write to.

Names of :data:`RUNS` that follow are measured besides ``ssgd`` and ``abs``.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import horovod.torch as plain_horovod
import torch
from torch import nn

import horovod_abs.torch as hvd
from horovod_abs import options
from horovod_abs.bench.utilisation import MICRO_BATCH, Setting
from horovod_abs.bench.utilisation_turns import Advance, in_turn, window
from horovod_abs.emulate import Pace
from horovod_abs.observe.stopwatch import Stopwatch
from horovod_abs.observe.summary import Summary, summarise_totals

LOCAL_STEPS = 8
"""Of local SGD between two averages."""
_LAYERS = 4
_LEARNING_RATE = 1e-3


class Device:
    """One rank's emulated device, with a model of its own.

    A micro-batch really computes on one sample, and counts as 16: its gradient has the full size, while the arithmetic,
    which a GPU would take off the processor, is emulated by sleeping.

    Args:
        setting: What is measured.
        pace: Of this rank.
    """

    def __init__(self, setting: Setting, pace: Pace) -> None:
        width = max(round((setting.parameters / _LAYERS) ** 0.5 - 0.5), 1)  # width · (width + 1) parameters a layer
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(_LAYERS)))
        self.sample = torch.randn(1, width)
        self._pace = pace

    def sgd(self) -> torch.optim.SGD:
        """What a user would wrap."""
        return torch.optim.SGD(self.model.parameters(), lr=_LEARNING_RATE)

    def compute(self, sample: torch.Tensor) -> None:
        """A forward and backward pass that takes the emulated time."""
        with self._pace:
            self.model(sample).square().mean().backward()


def synchronous(
    setting: Setting,
    device: Device,
    advance: Advance,
    compression: Any = hvd.Compression.none,
    record: Path | None = None,
) -> Summary:
    """Horovod's own optimizer with equal batches, recorded on request."""
    optimizer = plain_horovod.DistributedOptimizer(
        device.sgd(), named_parameters=device.model.named_parameters(), compression=compression
    )

    recorder = record and hvd.HorovodRecorder(optimizer, record, samples=MICRO_BATCH)

    def round_of_one(computing: Stopwatch) -> None:
        optimizer.zero_grad()
        with computing:
            device.compute(device.sample)
        optimizer.step()

    summary = equal_rounds(setting, round_of_one, advance, micro_batches=1)
    if recorder:
        recorder.close()
    return summary


def local_sgd(setting: Setting, device: Device, advance: Advance) -> Summary:
    """Everybody steps alone :data:`LOCAL_STEPS` times; then models are averaged, and everybody waits for that."""
    optimizer, parameters = device.sgd(), [parameter.data for parameter in device.model.parameters()]

    def local_round(computing: Stopwatch) -> None:
        for _ in range(LOCAL_STEPS):
            optimizer.zero_grad()
            with computing:
                device.compute(device.sample)
            optimizer.step()
        hvd.synchronize(hvd.grouped_allreduce_async_(parameters, op=hvd.Average, name="local_sgd"))

    return equal_rounds(setting, local_round, advance, micro_batches=LOCAL_STEPS)


def equal_rounds(
    setting: Setting, run: Callable[[Stopwatch], None], advance: Advance, *, micro_batches: int
) -> Summary:
    """Rounds of as many micro-batches on every rank."""
    computing = Stopwatch()
    began = computed = 0.0
    hvd.barrier()
    for step in range(setting.warmup_rounds + setting.synchronous_rounds):
        if step == setting.warmup_rounds:
            began, computed = perf_counter(), computing.seconds
        run(computing)
        advance()
    mine = torch.tensor([perf_counter() - began, computing.seconds - computed], dtype=torch.float64)
    by_rank = hvd.allgather(mine.unsqueeze(0), name="synchronous")
    return summarise_totals(
        [float(MICRO_BATCH * micro_batches * setting.synchronous_rounds)] * setting.ranks,
        by_rank[:, 1].tolist(),
        float(by_rank[0, 0]),
        rounds=setting.synchronous_rounds,
        ideal=setting.ideal,
    )


def adaptive(setting: Setting, device: Device, advance: Advance) -> Summary:
    """ABS-SGD."""
    optimizer = hvd.DistributedOptimizer(
        device.sgd(),
        named_parameters=device.model.named_parameters(),
        exchange=options.exchange(setting.exchange),
        clock=options.clock(setting.clock),
    )
    optimizer.on_merge(advance)
    hvd.barrier()
    endless = itertools.repeat(device.sample)
    for sample in optimizer.epoch(endless, rounds=setting.warmup_rounds + setting.rounds + 1):
        optimizer.zero_grad()
        device.compute(sample)
        optimizer.step(samples=MICRO_BATCH)
    return window(list(optimizer.history), setting)


def _measured(
    run: Callable[[Setting, Device, Advance], Summary], setting: Setting, pace: Pace, advance: Advance
) -> Summary:
    return run(setting, Device(setting, pace), advance)


RUNS: dict[str, Callable[[Setting, Device, Advance], Summary]] = {
    "ssgd": synchronous,
    "ssgd-fp16": partial(synchronous, compression=hvd.Compression.fp16),
    "local": local_sgd,
    "abs": adaptive,
    "updates": lambda setting, device, advance: adaptive(replace(setting, exchange="updates"), device, advance),
}


def main() -> None:
    """Measure the algorithms in turn; rank 0 writes the summaries."""
    setting, path = Setting.from_json(sys.argv[1]), Path(sys.argv[2])
    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pace = Pace(1e-3 * setting.micro_batch_ms[hvd.rank()], rank=hvd.rank())
    device = Device(setting, pace)
    parameters = sum(parameter.numel() for parameter in device.model.parameters())
    runs = {name: partial(_measured, RUNS[name], setting, pace) for name in ("ssgd", "abs", *sys.argv[3:])}
    repeats = in_turn(setting, hvd.rank(), runs)
    late = hvd.allgather(torch.tensor([pace.late]), name="late").tolist()
    if hvd.rank() == 0:
        about = {"parameters": parameters, "late_micro_batches": late, "torch": torch.__version__}
        summaries = {name: [summary.to_dict() for summary in of_one] for name, of_one in repeats.items()}
        path.write_text(json.dumps({"repeats": summaries, "about": about}))


if __name__ == "__main__":
    main()
