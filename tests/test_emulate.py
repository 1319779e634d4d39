from __future__ import annotations

import math
import re
import warnings
from statistics import mean

import pytest

from horovod_abs.emulate import Pace, Slowdown, from_speeds


class FakeTime:
    """Time that passes only where a test says so; sleeping overshoots by ``overshoot``."""

    def __init__(self, overshoot: float = 0.0) -> None:
        self.seconds = 100.0
        self.overshoot = overshoot
        self.slept: list[float] = []

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept.append(seconds)
        self.seconds += seconds + self.overshoot

    def work(self, seconds: float) -> None:
        self.seconds += seconds


def pace_of(fake: FakeTime, seconds: float, **keywords: object) -> Pace:
    return Pace(seconds, now=fake.now, sleep=fake.sleep, **keywords)  # type: ignore[arg-type]


def lasted(fake: FakeTime, pace: Pace, work: float) -> float:
    began = fake.seconds
    with pace:
        fake.work(work)
    return fake.seconds - began


def test_stretches_work_to_the_emulated_time() -> None:
    fake = FakeTime()
    assert lasted(fake, pace_of(fake, 0.020), work=0.004) == pytest.approx(0.020)
    assert fake.slept == [pytest.approx(0.016)]


def test_the_mean_is_exact_although_every_sleep_overshoots() -> None:
    fake = FakeTime(overshoot=0.003)
    pace = pace_of(fake, 0.020)
    times = [lasted(fake, pace, work=0.005) for _ in range(100)]
    assert times[0] == pytest.approx(0.023)
    assert mean(times) == pytest.approx(0.020, rel=0.002)


def test_overshoot_that_exceeds_the_next_sleep_is_carried_on() -> None:
    fake = FakeTime(overshoot=0.018)
    pace = pace_of(fake, 0.020)
    times = [lasted(fake, pace, work=0.010) for _ in range(2)]
    fake.overshoot = 0.0
    times += [lasted(fake, pace, work=0.010) for _ in range(4)]
    assert min(times) >= 0.010
    assert mean(times) == pytest.approx(0.020)


def test_a_long_stall_is_made_up_for_by_one_micro_batch_at_most() -> None:
    fake = FakeTime(overshoot=5.0)
    pace = pace_of(fake, 0.020)
    lasted(fake, pace, work=0.0)
    fake.overshoot = 0.0
    times = [lasted(fake, pace, work=0.0) for _ in range(10)]
    assert sum(times) == pytest.approx(9 * 0.020)


def test_time_outside_the_context_is_never_absorbed() -> None:
    fake = FakeTime()
    pace = pace_of(fake, 0.020)
    began = fake.seconds
    for _ in range(10):
        lasted(fake, pace, work=0.005)
        fake.work(0.007)  # step
    assert fake.seconds - began == pytest.approx(10 * 0.027)


def test_work_that_takes_too_long_is_not_made_up_for() -> None:
    fake = FakeTime()
    pace = pace_of(fake, 0.020)
    assert lasted(fake, pace, work=0.035) == pytest.approx(0.035)
    assert lasted(fake, pace, work=0.005) == pytest.approx(0.020)
    assert pace.late == 1


def test_warns_once_naming_rank_and_remedy_when_work_keeps_taking_too_long() -> None:
    fake = FakeTime()
    pace = pace_of(fake, 0.020, rank=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lasted(fake, pace, work=0.030)  # a single one: the first, or a busy machine
        lasted(fake, pace, work=0.001)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(10):
            lasted(fake, pace, work=0.030)
    assert [warning.category for warning in caught] == [RuntimeWarning]
    assert re.search(r"rank 3: .* 30.0 ms, more than the 20.0 ms .* smaller model", str(caught[0].message))
    assert pace.late == 11


def test_jitter_keeps_the_mean_and_repeats_with_its_seed() -> None:
    def draw(seed: int) -> list[float]:
        fake = FakeTime()
        pace = pace_of(fake, 0.020, jitter=0.3, seed=seed)
        return [lasted(fake, pace, work=0.0) for _ in range(4000)]

    times = draw(1)
    logarithms = [math.log(time) for time in times]
    deviation = math.sqrt(mean(value**2 for value in logarithms) - mean(logarithms) ** 2)
    assert mean(times) == pytest.approx(0.020, rel=0.02)
    assert deviation == pytest.approx(0.3, rel=0.05)
    assert draw(1) == times
    assert draw(2) != times


def test_slowdowns_multiply_while_they_last() -> None:
    fake = FakeTime()
    pace = pace_of(fake, 1.0, slowdowns=[Slowdown(2.0, 6.0, 3.0), Slowdown(5.0, math.inf, 2.0)])
    assert [lasted(fake, pace, work=0.0) for _ in range(6)] == pytest.approx([1, 1, 3, 6, 2, 2])


def test_an_exception_passes_through_without_sleeping() -> None:
    fake = FakeTime()
    pace = pace_of(fake, 0.020)
    with pytest.raises(KeyError), pace:
        raise KeyError
    assert fake.slept == []
    assert pace.micro_batches == 0
    assert lasted(fake, pace, work=0.0) == pytest.approx(0.020)


def test_cannot_be_entered_twice() -> None:
    pace = Pace(0.001)
    with pace, pytest.raises(RuntimeError, match="one per rank"):
        pace.__enter__()


def test_speeds_divide_the_base_time() -> None:
    paces = [from_speeds([1, 1, 0.5, 0.25], 0.020, rank) for rank in range(4)]
    assert [pace.seconds for pace in paces] == pytest.approx([0.020, 0.020, 0.040, 0.080])
    assert [pace.rank for pace in paces] == [0, 1, 2, 3]


def test_ranks_of_equal_speed_jitter_differently() -> None:
    times = []
    for rank in range(2):
        fake = FakeTime()
        pace = from_speeds([1, 1], 0.020, rank, jitter=0.5, seed=7)
        pace._now, pace._sleep = fake.now, fake.sleep
        times.append([lasted(fake, pace, work=0.0) for _ in range(3)])
    assert times[0] != times[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pace(0.0), "seconds must be positive"),
        (lambda: Pace(math.nan), "seconds must be positive"),
        (lambda: Pace(1.0, jitter=-1), "jitter must not be negative"),
        (lambda: from_speeds([1, 0], 0.1, 0), "speeds must be positive"),
        (lambda: from_speeds([1, 1], 0.1, 2), "none for rank 2"),
        (lambda: Slowdown(3.0, 2.0, 1.0), "begin < end"),
        (lambda: Slowdown(0.0, 2.0, 0.0), "factor > 0"),
    ],
)
def test_bad_arguments_are_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
