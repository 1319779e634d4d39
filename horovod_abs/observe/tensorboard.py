"""Scalars for TensorBoard: while a run goes on, or from its log afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from horovod_abs.driver import RoundRecord
from horovod_abs.observe.progress import Observable
from horovod_abs.observe.runlog import Epoch, Event, Round, Run, RunLog


class TensorBoardWriter:
    """Writes each round's figures, on one rank.

    >>> if hvd.rank() == 0:
    ...     board = TensorBoardWriter("runs/board")
    ...     board.watch(optimizer)
    ...     board.values({"accuracy": 0.93}, step=0)

    Steps are rounds. ``batch/global`` and ``batch/rank i`` are samples, ``speed`` samples per second of all ranks,
    ``idle/rank i`` the share of the time between two merges in which the rank did not compute, ``exchange seconds``
    what an exchange took on rank 0. What a program does between two epochs counts as idle time in the round after, but
    not in a log that is converted.

    Args:
        directory: Where TensorBoard looks.

    Raises:
        ModuleNotFoundError: TensorBoard is not installed.
    """

    def __init__(self, directory: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"writing for TensorBoard needs PyTorch and TensorBoard, and {error.name} is not installed: "
                "pip install torch tensorboard"
            ) from error
        self._writer: Any = SummaryWriter(str(directory))
        self._merged_at: float | None = None

    def watch(self, optimizer: Observable) -> None:
        """Write at every global update of ``optimizer``."""

        def take() -> None:
            record = optimizer.last_round
            if record is not None:
                self.round(record, [float(group["lr"]) for group in getattr(optimizer, "param_groups", [])])

        optimizer.on_merge(take)

    def round(
        self, record: RoundRecord, learning_rates: list[float] | tuple[float, ...] = (), at: float | None = None
    ) -> None:
        """Write a round.

        Args:
            record: What was merged.
            learning_rates: That the merge used, by parameter group.
            at: When, in seconds since 1970; now by default.
        """
        scalars = {"batch/global": record.batch, "exchange seconds": record.exchange_seconds}
        scalars |= {f"batch/rank {rank}": samples for rank, samples in enumerate(record.samples)}
        scalars |= {f"learning rate/group {group}": rate for group, rate in enumerate(learning_rates)}
        if self._merged_at is not None and record.merged_at > self._merged_at:
            seconds = record.merged_at - self._merged_at
            scalars["speed"] = record.batch / seconds
            scalars |= {
                f"idle/rank {rank}": max(1 - computing / seconds, 0.0)
                for rank, computing in enumerate(record.compute_seconds)
            }
        self._merged_at = record.merged_at
        self._add(scalars, record.round, at)

    def values(self, values: Mapping[str, float | str], step: int, at: float | None = None) -> None:
        """Write what a program tells, such as its accuracy; text is left out."""
        self._add({name: value for name, value in values.items() if not isinstance(value, str)}, step, at)

    def paused(self) -> None:
        """The time until now is no part of the next round."""
        self._merged_at = None

    def close(self) -> None:
        """Write what is still in memory."""
        self._writer.close()

    def __enter__(self) -> TensorBoardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _add(self, scalars: Mapping[str, float], step: int, at: float | None) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step, at)


def convert(log: RunLog, directory: str | Path) -> None:
    """Write a recorded run for TensorBoard. Raises :class:`ModuleNotFoundError` as :class:`TensorBoardWriter` does."""
    with TensorBoardWriter(directory) as board:
        run = log.of(Run)[0]
        for line in log.lines:
            run = line if isinstance(line, Run) else run
            if isinstance(line, (Run, Epoch)):
                board.paused()
            if isinstance(line, Round):
                board.round(line.record, line.learning_rates, run.since_1970(line.merged_at))
            elif isinstance(line, Event):
                board.values(line.values, line.round, run.since_1970(line.at))
