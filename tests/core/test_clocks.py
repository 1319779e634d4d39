"""The clocks: when a rank that has come so far ends its round. What surrounds them is in ``test_engine.py``."""

from __future__ import annotations

import pytest

from horovod_abs.core.clocks import Clock, CountClock, Progress, SyncClock


def test_the_sync_clock_ends_a_round_at_once() -> None:
    assert SyncClock().is_due(Progress(rank=0, round=0, micro_batches=1, elapsed=0.0))


def test_the_sync_clock_works_within_any_bound() -> None:
    SyncClock().validate(1)


@pytest.mark.parametrize(("done", "due"), [(0, False), (2, False), (3, True), (4, True)])
def test_the_count_clock_ends_a_round_after_its_count(done: int, due: bool) -> None:
    assert CountClock(3).is_due(Progress(rank=0, round=7, micro_batches=done, elapsed=99.0)) is due


@pytest.mark.parametrize("wrong", [0, -1, 2.0, "2", None])
def test_the_count_clock_takes_a_whole_number(wrong: object) -> None:
    with pytest.raises(ValueError, match="whole number of micro-batches >= 1, not"):
        CountClock(wrong)  # type: ignore[arg-type]


def test_the_count_clock_must_fit_the_bound() -> None:
    CountClock(8).validate(8)
    with pytest.raises(ValueError, match=r"CountClock\(micro_batches=9\) asks .* \(8\): pass max_micro_batches=9"):
        CountClock(9).validate(8)


def test_clocks_of_two_ranks_are_the_same_if_they_are_written_the_same() -> None:
    clocks: list[Clock] = [SyncClock(), CountClock(1), CountClock(2)]
    assert len({repr(clock) for clock in clocks}) == 3
    assert repr(CountClock(2)) == repr(CountClock(micro_batches=2))
