"""How long micro-batches take: mean rates, determinism, and one call for many micro-batches."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_abs.sim.speeds import Bursts, Cost, Drift, Load, Noise, RankModel, RankSpeed, Stall, Trace

COST = Cost(0.00213, 0.00107)
MODELS = {
    "constant": RankModel(COST, speed=0.5),
    "jitter": RankModel(COST, noise=Noise(jitter=0.3)),
    "stragglers": RankModel(COST, noise=Noise(straggling=0.1, factor=5.0)),
    "bursts": RankModel(COST, loads=(Bursts(2.0, 1.0, 3.0),)),
    "trace": RankModel(COST, loads=(Trace((1.0, 3.0), (1.0, 2.0)),)),
    "everything": RankModel(COST, 2.0, Noise(0.2, 0.05), (Bursts(2.0, 1.0, 3.0), Trace((1.0, 3.0), (1.0, 2.0)))),
}


def solo(model: RankModel, seconds: float, samples: float = 16, seed: int = 0) -> tuple[RankSpeed, float]:
    """Samples a second of a rank that computes for so long."""
    rank, now, done = RankSpeed(model, (seed,)), 0.0, 0
    while now < seconds:
        now += rank.seconds(samples, now)
        done += 1
    return rank, done * samples / now


@pytest.mark.parametrize("name", MODELS)
def test_a_rank_alone_reaches_its_mean_rate(name: str) -> None:
    rank, rate = solo(MODELS[name], 3000.0)
    assert rate == pytest.approx(MODELS[name].mean_rate(16), rel=0.03)
    assert rate == pytest.approx(rank.mean_rate(16, 0.0, 3000.0), rel=0.02)  # of the bursts that really came


def test_a_micro_batch_costs_a_fixed_part_and_one_for_each_sample() -> None:
    rank = RankSpeed(MODELS["constant"], (0,))
    assert rank.seconds(16, 0.0) == pytest.approx((0.00213 + 0.01712) / 0.5)
    assert rank.seconds(32, 0.0) == pytest.approx((0.00213 + 0.03424) / 0.5)


def test_a_drift_goes_from_one_to_its_factor_and_stays_there() -> None:
    rank = RankSpeed(RankModel(Cost(0.0, 1.0), loads=(Drift(3.0, 100.0),)), (0,))
    assert [rank.seconds(1, now) for now in (0.0, 50.0, 99.9, 100.0, 1e6)] == pytest.approx(
        [1.01, 2.01, 2.99, 3.0, 3.0]
    )
    assert rank.mean_rate(1, 0.0, 100.0) == pytest.approx(math.log(3) / 2, rel=1e-4)  # ∫ dt / (1 + 2t)


def test_a_trace_is_played_over_and_over_again() -> None:
    rank = RankSpeed(RankModel(Cost(0.0, 1.0), loads=(Trace((1.0, 3.0), (1.0, 2.0)),)), (0,))
    assert [rank.seconds(1, now) for now in (0.0, 0.9, 1.0, 2.9, 3.0, 3.9, 4.0, 30.5)] == [1, 1, 2, 2, 1, 1, 2, 1]


def test_a_stall_is_borne_by_the_first_micro_batch_after_it() -> None:
    rank = RankSpeed(RankModel(Cost(0.0, 1.0), stalls=(Stall(2.5, 10.0),)), (0,))
    assert [rank.seconds(1, now) for now in (2.0, 3.0, 14.0)] == [1.0, 11.0, 1.0]
    assert rank.mean_rate(1, 0.0, 20.0) == pytest.approx(0.5)


def test_a_rank_that_leaves_does_nothing_from_then_on() -> None:
    assert RankSpeed(RankModel(Cost(0.0, 1.0), leaves=5.0), (0,)).mean_rate(1, 0.0, 20.0) == pytest.approx(0.25)


def test_the_same_seed_gives_the_same_times_and_another_seed_others() -> None:
    def times(seed: int) -> list[float]:
        rank = RankSpeed(MODELS["everything"], (seed,))
        return [rank.seconds(16, 0.1 * number) for number in range(600)]

    assert times(0) == times(0)
    assert times(0) != times(1)


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_bursts_take_their_share_of_the_time(factor: float) -> None:
    loaded = RankSpeed(RankModel(Cost(0.0, 1e-9), loads=(Bursts(3.0, 1.0, factor),)), (0,))
    factors = [loaded.seconds(1, 0.1 * moment) * 1e9 for moment in range(100_000)]
    assert sum(one == pytest.approx(factor) for one in factors) / len(factors) == pytest.approx(0.25, abs=0.03)


@given(st.sampled_from(sorted(MODELS)), st.integers(0, 1000), st.data())
def test_many_micro_batches_at_once_are_as_many_single_ones(name: str, seed: int, data: st.DataObject) -> None:
    model = MODELS[name]
    if data.draw(st.booleans()):
        stalls = tuple(Stall(at, 0.5) for at in data.draw(st.lists(st.floats(0.0, 5.0), max_size=3)))
        model = RankModel(model.cost, model.speed, model.noise, model.loads, stalls)
    single, many, random = RankSpeed(model, (seed,)), RankSpeed(model, (seed,)), Random(seed)
    now = 0.0
    for _ in range(20):
        end, most = now + random.choice((-0.1, 0.001, 0.3, 30.0)), random.choice((1, 2, 50, 5000))
        done, over = many.until(16, now, end, most)
        times = [now]
        while len(times) <= most and times[-1] < end:
            times.append(times[-1] + single.seconds(16, times[-1]))
        assert done == len(times) - 1
        assert over == pytest.approx(times[-1], abs=1e-9)
        now = over


@pytest.mark.parametrize(
    "make",
    [
        lambda: Cost(0.0, 0.0),
        lambda: Noise(jitter=-1.0),
        lambda: Noise(straggling=1.5),
        lambda: Bursts(0.0, 1.0, 1.0),
        lambda: Drift(0.0, 1.0),
        lambda: Trace((), ()),
        lambda: Trace((2.0, 1.0), (1.0, 1.0)),
        lambda: RankModel(COST, speed=0.0),
    ],
)
def test_what_is_out_of_range_is_refused(make: object) -> None:
    with pytest.raises(ValueError, match=r"must|need"):
        make()  # type: ignore[operator]


def test_loads_are_told_by_protocol() -> None:
    loads: list[Load] = [Bursts(1.0, 1.0, 2.0), Drift(2.0, 1.0), Trace((1.0,), (2.0,))]
    assert [load.mean_speed for load in loads] == [0.75, 0.5, 0.5]
