"""What a run came to: samples, shares and idle time by rank, and how near the cluster came to its ideal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.table import Table

from horovod_abs.driver import RoundRecord


@dataclass(frozen=True)
class RankSummary:
    """One rank's part of a run.

    Attributes:
        rank: Its number.
        samples: Samples that it added to the averages.
        share: Its part of all samples, 0 to 1.
        compute_seconds: Time spent on forward and backward passes.
        idle_seconds: All other time: waiting, exchanging, merging, loading.
        idle_share: ``idle_seconds`` as a part of the run's time.
    """

    rank: int
    samples: float
    share: float
    compute_seconds: float
    idle_seconds: float
    idle_share: float


@dataclass(frozen=True)
class Summary:
    """A run, or a stretch of one.

    Attributes:
        seconds: How long it took.
        rounds: Global updates in it.
        samples: Samples of all ranks.
        samples_per_second: Their rate.
        ideal: Samples per second of the ranks added up, if none ever waited or did anything but compute.
        share_of_ideal: ``samples_per_second / ideal``.
        idle_share: Mean of the ranks' idle shares.
        ranks: By rank.
    """

    seconds: float
    rounds: int
    samples: float
    samples_per_second: float
    ideal: float
    share_of_ideal: float
    idle_share: float
    ranks: tuple[RankSummary, ...]

    @property
    def mean_batch(self) -> float:
        """Samples in a global update, on average."""
        return self.samples / self.rounds if self.rounds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Summary:
        """The inverse of :meth:`to_dict`."""
        return cls(**{**values, "ranks": tuple(RankSummary(**rank) for rank in values["ranks"])})


def summarise(history: Iterable[RoundRecord], seconds: float, *, ideal: float | None = None) -> Summary:
    """Sum up merged rounds.

    >>> log = hvd.read_run_log("runs/mnist.jsonl")
    >>> summary = summarise(log.history, seconds=2.0)
    >>> summary.samples_per_second
    32.0

    Args:
        history: The rounds of the stretch of time.
        seconds: Its length.
        ideal: See :class:`Summary`; without it, what the ranks achieved while they computed.

    Raises:
        ValueError: there are no rounds.
    """
    rounds = list(history)
    if not rounds:
        raise ValueError("no round was merged, there is nothing to sum up")
    samples = np.array([record.samples for record in rounds]).sum(axis=0)
    compute = np.array([record.compute_seconds for record in rounds]).sum(axis=0)
    return summarise_totals(samples.tolist(), compute.tolist(), seconds, rounds=len(rounds), ideal=ideal)


def summarise_totals(
    samples: Sequence[float],
    compute_seconds: Sequence[float],
    seconds: float,
    *,
    rounds: int,
    ideal: float | None = None,
) -> Summary:
    """Sum up from each rank's totals, for training that keeps no history (plain Horovod).

    Args:
        samples: By rank.
        compute_seconds: By rank.
        seconds: Length of the stretch of time.
        rounds: Global updates in it.
        ideal: As in :func:`summarise`.

    Raises:
        ValueError: the totals are of different numbers of ranks, or no time has passed.
    """
    if len(samples) != len(compute_seconds) or not samples:
        raise ValueError(f"need totals of every rank, got {len(samples)} and {len(compute_seconds)}")
    if seconds <= 0:
        raise ValueError(f"seconds must be positive, got {seconds!r}")
    total = float(sum(samples))
    if ideal is None:
        ideal = sum(n / spent for n, spent in zip(samples, compute_seconds, strict=True) if spent > 0)
    ranks = tuple(
        RankSummary(
            rank=rank,
            samples=float(n),
            share=float(n) / total if total else 0.0,
            compute_seconds=float(spent),
            idle_seconds=max(seconds - spent, 0.0),
            idle_share=max(1 - spent / seconds, 0.0),
        )
        for rank, (n, spent) in enumerate(zip(samples, compute_seconds, strict=True))
    )
    return Summary(
        seconds=seconds,
        rounds=rounds,
        samples=total,
        samples_per_second=total / seconds,
        ideal=float(ideal),
        share_of_ideal=total / seconds / ideal if ideal else 0.0,
        idle_share=sum(rank.idle_share for rank in ranks) / len(ranks),
        ranks=ranks,
    )


def to_table(summary: Summary, title: str) -> Table:
    """A table of the ranks, with the cluster in its last row and below."""
    table = Table(
        title=title,
        caption=f"{summary.samples_per_second:,.0f} samples/s, {summary.share_of_ideal:.1%} of the ideal\n"
        f"{summary.rounds:,} updates of {summary.mean_batch:,.0f} samples",
        min_width=56,
    )
    table.add_column("rank")
    for name in ("samples", "share", "computing", "idle", "idle share"):
        table.add_column(name, justify="right")
    for rank in summary.ranks:
        table.add_row(
            str(rank.rank),
            f"{rank.samples:,.0f}",
            f"{rank.share:.1%}",
            f"{rank.compute_seconds:.1f} s",
            f"{rank.idle_seconds:.1f} s",
            f"{rank.idle_share:.1%}",
        )
    table.add_section()
    table.add_row(
        "all",
        f"{summary.samples:,.0f}",
        "100.0%",
        f"{sum(rank.compute_seconds for rank in summary.ranks):.1f} s",
        f"{sum(rank.idle_seconds for rank in summary.ranks):.1f} s",
        f"{summary.idle_share:.1%}",
    )
    return table
