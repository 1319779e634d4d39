"""Run logs as a run would have written them, from one rank of a made-up cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from horovod_abs.core.clocks import SyncClock
from horovod_abs.core.engine import Engine
from horovod_abs.core.ledger import Column, Entry, Flag, Floats, Ledger
from horovod_abs.driver import Driver
from horovod_abs.observe.recorder import Facts, Recorder
from horovod_abs.observe.runlog import RunLog, read_run_log

STARTED_AT = 1_700_000_000.0


class Peers:
    """A payload whose exchanges are complete at once; the other ranks do what this one does, and wait a little."""

    launches_first = True

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._row: Floats = np.zeros(0)

    def launch(self, row: Floats, ledger: Ledger) -> None:
        self._row = row

    def poll(self) -> bool:
        return True

    def read(self) -> Floats:
        rows = np.tile(self._row, (self._ranks, 1))
        rows[1:, Column.WAIT_SECONDS] += 0.25
        return rows

    def apply(self, entry: Entry, samples_before: float) -> bool:
        return True

    def settle(self, closed: bool) -> None: ...

    def agree(self) -> None: ...

    def options(self) -> int:
        return 7


class Cluster:
    """Records to a file; each micro-batch takes a second of a time of its own.

    Args:
        path: The run log.
        ranks: How many.
        rounds: Rounds that were merged before, if the run goes on from a checkpoint.
    """

    def __init__(self, path: Path, ranks: int = 2, *, rounds: int = 0) -> None:
        self.now = 0.0
        self.saved: list[tuple[str, int]] = []
        self.driver = Driver(
            Engine(ranks, SyncClock()),
            Peers(ranks),
            rank=0,
            seconds=lambda: self.now,
        )
        for number in range(rounds):
            self.driver.engine.ledger.append(Entry(number, np.zeros((ranks, len(Column)))))
        facts = Facts(
            software={"torch": "2.13.0"},
            exchange={"name": "Gradients", "delay": 1},
            clock="SyncClock()",
            options={"clip_grad_norm": None},
            optimizer="SGD",
            seed=3,
        )
        self.recorder = Recorder(
            path, self.driver, facts, learning_rates=lambda: [0.1], save_parameters=self._save_parameters
        )
        self.driver.log = self.recorder

    def epoch(self, micro_batches: int, samples: int = 16) -> None:
        """An epoch of so many micro-batches, and what closes it."""
        for batch in self.driver.epoch([samples] * micro_batches, lambda batch: batch):
            self.now += 1.0
            self.driver.micro_batch_done(batch, 0.75)

    def _save_parameters(self, path: Path, rounds: int) -> None:
        self.saved.append((path.name, rounds))
        path.write_text("parameters")


def recorded(path: Path, epochs: Sequence[int] = (5, 4), ranks: int = 2) -> RunLog:
    """The log of so many micro-batches an epoch, with an evaluation of ten seconds after each."""
    cluster = Cluster(path, ranks)
    for number, micro_batches in enumerate(epochs):
        cluster.epoch(micro_batches)
        cluster.now += 10.0
        cluster.recorder.event({"accuracy": 0.5 + 0.1 * number, "loss": 2.0 - number})
    return read_run_log(path)


def spread_out(rounds: int, ranks: int) -> Floats:
    """Rows of rounds of a second each, of ranks of unequal speed; shape ``(rounds, ranks, columns)``."""
    rows = np.zeros((rounds, ranks, len(Column)))
    for rank in range(ranks):
        rows[:, rank, Column.WEIGHT] = rows[:, rank, Column.DRAWN] = 16 * (ranks - rank)
        rows[:, rank, Column.MICRO_BATCHES] = ranks - rank
        rows[:, rank, Column.COMPUTE_SECONDS] = 0.9 - 0.1 * rank
        rows[:, rank, Column.WAIT_SECONDS] = 0.05 * rank
        rows[:, rank, Column.LAUNCHED_AT] = STARTED_AT + 1.0 + np.arange(rounds) + 0.01 * rank
    rows[-1, :, Column.FLAGS] = int(Flag.CLOSING)
    return rows
