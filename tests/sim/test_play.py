"""Playing a cluster through: what comes out adds up, and refuses what makes no sense."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from horovod_abs.core.clocks import CountClock, SyncClock
from horovod_abs.sim.play import play

SPEEDS = (1.0, 1.0, 0.5, 0.25)


def test_synchronous_ranks_wait_for_the_slowest_and_the_exchange() -> None:
    played = play(CountClock(1), SPEEDS, delay=0, exchange=0.01)
    assert played.share_of_ideal == pytest.approx(0.02 / 0.09 * 4 / 2.75, abs=0.02)
    assert set(played.global_batches) == {64.0}


def test_adaptive_ranks_never_wait_and_contribute_by_speed() -> None:
    played = play(SyncClock(), SPEEDS, exchange=0.01, seconds=10)
    assert played.share_of_ideal > 0.99
    assert not any(block.what == "wait" for block in played.blocks)
    samples = played.batches[5:].sum(axis=0)
    assert samples / samples[0] == pytest.approx(np.array(SPEEDS), abs=0.02)
    assert len(played.merged_at) == len(played.batches)


def test_no_rank_does_two_things_at_once() -> None:
    played = play(CountClock(3), SPEEDS, jitter=0.3, seed=3)
    for rank in range(4):
        own = sorted((block.begin, block.end) for block in played.blocks if block.rank == rank)
        assert all(end <= begin + 1e-12 for (_, end), (begin, _) in itertools.pairwise(own))


@pytest.mark.parametrize("wrong", [{"speeds": []}, {"speeds": [0.0]}, {"seconds": 0}, {"jitter": -1}, {"exchange": 0}])
def test_what_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        play(SyncClock(), **{"speeds": SPEEDS, **wrong})  # type: ignore[arg-type]
