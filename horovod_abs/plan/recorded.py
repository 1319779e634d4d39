"""What the ranks of a recorded run, and its network, were like, read from its log."""

from __future__ import annotations

import numpy as np

from horovod_abs.core.ledger import Column
from horovod_abs.observe.runlog import RunLog, RunLogError
from horovod_abs.sim.models import ClusterModel
from horovod_abs.sim.network import Measured
from horovod_abs.sim.speeds import Cost, RankModel, Trace


def rank_of(log: RunLog, rank: int) -> RankModel:
    """One rank of a run: its time for a sample, and how that changed from round to round.

    Args:
        log: Of the run.
        rank: Which.

    Raises:
        RunLogError: there is no such rank, or it computed nothing.
    """
    log.refuse_empty()
    rows = np.array([line.rows for line in log.rounds])
    if not 0 <= rank < rows.shape[1]:
        raise RunLogError(f"{log.path}: has {rows.shape[1]} ranks, none of number {rank}. Name one from 0 on")
    samples, seconds = rows[:, rank, Column.WEIGHT], rows[:, rank, Column.COMPUTE_SECONDS]
    ends = np.array([log.training_seconds(line.merged_at) for line in log.rounds])
    busy = (samples > 0) & (seconds > 0) & (np.diff(ends, prepend=0.0) > 0)
    if not busy.any():
        raise RunLogError(f"{log.path}: rank {rank} computed nothing. Record a longer run")
    of_a_sample = seconds[busy] / samples[busy]
    lengths = np.diff(ends[busy], prepend=0.0)
    mean = float(lengths.sum() / (lengths / of_a_sample).sum())
    trace = Trace(tuple(ends[busy].tolist()), tuple((of_a_sample / mean).tolist()))
    return RankModel(Cost(0.0, mean), loads=(trace,))


def cluster_of(log: RunLog) -> ClusterModel:
    """The cluster of a run, also of plain Horovod: ranks as they were, and exchanges as long as they took.

    Args:
        log: Of the run; one of plain Horovod is written by :class:`horovod_abs.torch.HorovodRecorder`.

    Raises:
        RunLogError: the log holds fewer than two rounds, or a rank computed nothing.
    """
    log.refuse_empty()
    rows = np.array([line.rows for line in log.rounds])
    if len(rows) < 2:
        raise RunLogError(f"{log.path}: holds a single round. Record a longer run")
    ends = np.array([log.training_seconds(line.merged_at) for line in log.rounds])
    launched, busy = rows[..., Column.LAUNCHED_AT], rows[:, 0, [Column.COMPUTE_SECONDS, Column.WAIT_SECONDS]].sum(1)
    took = launched[:, 0] + [line.exchange_seconds for line in log.rounds] - launched.max(axis=1)
    # A rank sees at its next boundary that an exchange is complete: the quickest were complete then.
    by_itself = log.run.options.get("allreduce_seconds", max(float(np.quantile(took, 0.05)), 0.0))
    counts = rows[..., Column.MICRO_BATCHES]
    return ClusterModel(
        log.path.stem,
        tuple(rank_of(log, rank) for rank in range(rows.shape[1])),
        Measured(by_itself),
        samples=max(round(float(rows[..., Column.WEIGHT].sum() / counts.sum())), 1),
        merge_seconds=max(float(np.median(np.diff(ends) - busy[1:])), 0.0),
    )
