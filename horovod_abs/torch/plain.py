"""Records a run of plain Horovod, to ask what it would have done otherwise, before anything is changed."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import horovod
import horovod.torch as hvd
import torch

from horovod_abs import __version__
from horovod_abs.observe.runlog import COLUMNS, KINDS, Closed, Epoch, Line, Round, Run
from horovod_abs.rounds import RoundsMixin
from horovod_abs.torch.functions import gather_objects

_FLUSHED_EVERY = 100
_TRIALS = 5


class HorovodRecorder:
    """Writes the run log of plain, synchronous Horovod, for ``horovod-abs simulate --from-log``; every rank makes one.

    >>> optimizer = horovod.torch.DistributedOptimizer(  # Horovod's own, unchanged
    ...     torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=model.named_parameters()
    ... )
    >>> recorder = HorovodRecorder(optimizer, "plain.jsonl", samples=16)
    >>> for x, y in loader:
    ...     optimizer.zero_grad()
    ...     loss_fn(model(x), y).backward()
    ...     optimizer.step()
    >>> with recorder.pausing():  # evaluation does not count as computing
    ...     evaluate(model)
    >>> recorder.close()

    A rank computes from the end of one ``step`` until the next one waits for the gradients; loading is part of that.
    How long an exchange takes by itself is measured at the beginning, with nothing to hide it behind. All ranks gather
    what they saw every 100 steps and at the end, and the first one writes. On CUDA (not run by us) each step waits for
    the device before it takes the time.

    Args:
        optimizer: Made by ``horovod.torch.DistributedOptimizer``.
        path: The run log; a file that exists is replaced.
        samples: Of one rank in a step.

    Raises:
        TypeError: the optimizer is not Horovod's, or is ours, which records by itself.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, path: str | Path, *, samples: int) -> None:
        if isinstance(optimizer, RoundsMixin):
            raise TypeError("this optimizer records by itself: pass record=PATH to DistributedOptimizer")
        if not hasattr(optimizer, "skip_synchronize"):
            raise TypeError(f"{type(optimizer).__name__} is not Horovod's: pass what DistributedOptimizer returns")
        self.path = Path(path)
        self._optimizer: Any = optimizer
        self._samples = float(samples)
        self._rows: list[tuple[float, ...]] = []  # of this rank: a row, when its round ended, how long it waited
        self._pauses: list[tuple[int, float, float]] = []
        self._written = 0
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._cuda = any(p.is_cuda for p in parameters)
        size = sum(p.numel() * p.element_size() for p in parameters)
        probed = _allreduce_seconds(size, parameters[0].device)
        if hvd.rank() == 0:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text("", encoding="utf-8")
        self._synchronize = optimizer.synchronize  # type: ignore[attr-defined]
        optimizer.synchronize = self._timed  # type: ignore[attr-defined]
        self._hook = optimizer.register_step_post_hook(lambda *_: self._stepped())
        self._epoch = self._begun = self._now()
        self._write(
            Run(
                software={
                    "horovod_abs": __version__,
                    "python": platform.python_version(),
                    "torch": torch.__version__,
                    "horovod": horovod.__version__,
                },
                ranks=hvd.size(),
                exchange={"kind": "horovod"},
                clock="CountClock(1)",
                options={"allreduce_seconds": probed, "megabytes": size / 1e6},
                optimizer=type(optimizer).__name__,
                columns=COLUMNS,
                seed=None,
                started_at=time.time(),
                at=0.0,
                round=0,
            )
        )

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """What happens inside is no training."""
        begun = self._now()
        yield
        now = self._now()
        self._pauses.append((self._written + len(self._rows), begun - self._epoch, now - self._epoch))
        self._begun += now - begun

    def close(self) -> None:
        """Write what is left, and leave the optimizer as it was; every rank calls it."""
        self._flush()
        del self._optimizer.synchronize
        self._hook.remove()

    def _timed(self) -> None:
        """Horovod's ``synchronize``, between two looks at the clock."""
        entered, at = self._now(), time.time()
        self._synchronize()
        left = self._now()
        row = (self._samples, self._samples, 1.0, entered - self._begun, left - entered, 0.0, 0.0, 0.0, at)
        self._rows.append((*row, left - self._epoch, left - entered))
        if len(self._rows) == _FLUSHED_EVERY:
            self._flush()

    def _stepped(self) -> None:
        self._begun = self._now()

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return perf_counter()

    def _flush(self) -> None:
        """Gather the rounds of all ranks, and write them."""
        of_all = gather_objects(self._rows, "horovod_abs.plain")
        steps = min(map(len, of_all))
        rates = tuple(float(group.get("lr", 0.0)) for group in self._optimizer.param_groups)
        for step in range(steps):
            self._write_pauses(self._written + step)
            *_, ended, waited = of_all[0][step]
            rows = tuple(tuple(rank[step][: len(COLUMNS)]) for rank in of_all)
            self._write(Round(self._written + step, ended, waited, rates, rows))
        self._written += steps
        self._write_pauses(self._written)
        self._rows.clear()

    def _write_pauses(self, round: int) -> None:
        while self._pauses and self._pauses[0][0] <= round:
            _, begin, end = self._pauses.pop(0)
            self._write(Closed(round, begin))
            self._write(Epoch(round, end, None))

    def _write(self, line: Line) -> None:
        if hvd.rank() == 0:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": KINDS[type(line)], **asdict(line)}) + "\n")


def _allreduce_seconds(size: int, device: torch.device) -> float:
    """How long it takes to sum so many bytes over all ranks, begun by all at the same time: the median, in seconds."""
    buffer = torch.zeros(max(size // 4, 1), device=device)
    took = []
    for _ in range(1 + _TRIALS):  # the first one also sets up connections
        hvd.allreduce(torch.zeros(1), name="horovod_abs.together")
        begun = perf_counter()
        hvd.allreduce_(buffer, op=hvd.Sum, name="horovod_abs.probe")
        took.append(perf_counter() - begun)
    return max(gather_objects(median(took[1:]), "horovod_abs.probed"))
