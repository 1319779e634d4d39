"""Rounds as a run would have merged them."""

from __future__ import annotations

from horovod_abs.driver import RoundRecord


def record(round: int, samples: tuple[float, ...], compute: tuple[float, ...], merged_at: float = 0.0) -> RoundRecord:
    return RoundRecord(
        round=round,
        samples=samples,
        micro_batches=tuple(round_of // 16 for round_of in map(int, samples)),
        compute_seconds=compute,
        wait_seconds=(0.0,) * len(samples),
        exchange_seconds=0.01,
        merged_at=merged_at,
    )
