"""Simulated algorithms against what can be worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from horovod_abs.sim.models import ClusterModel
from horovod_abs.sim.network import Measured, Network
from horovod_abs.sim.simulate import ALGORITHMS, simulate
from horovod_abs.sim.speeds import Bursts, Cost, Noise, RankModel, Stall

SPEEDS = (1.0, 1.0, 0.5, 0.25)
MEGABYTES = 20.0  # over 1,000 Mbit/s, among four: 0.24 s


def cluster(*, overlap: bool = False, **of_ranks: float) -> ClusterModel:
    """Micro-batches of 20, 20, 40 and 80 ms for 16 samples: 2,200 samples/s together."""
    ranks = tuple(RankModel(Cost(0.0, 0.00125), speed, **of_ranks) for speed in SPEEDS)  # type: ignore[arg-type]
    return ClusterModel("four", ranks, Network(mbit=1000.0, overlap=overlap), samples=16)


def test_synchronous_training_takes_the_slowest_and_the_exchange() -> None:
    result = simulate(cluster(), "synchronous", megabytes=MEGABYTES)
    assert result.samples_per_second == pytest.approx(64 / (0.08 + 0.24))
    assert result.ideal == pytest.approx(2200.0)
    assert result.idle == pytest.approx((0.9375, 0.9375, 0.875, 0.75), abs=0.003)
    assert (result.batch, result.batch_deviation, result.staleness) == (64.0, 0.0, 0.0)


def test_two_thirds_of_the_slowest_micro_batch_hide_the_exchange() -> None:
    result = simulate(cluster(overlap=True), "synchronous", megabytes=MEGABYTES)
    assert result.samples_per_second == pytest.approx(64 / (0.08 + 0.24 - 0.08 * 2 / 3))
    hidden = simulate(cluster(overlap=True), "synchronous", megabytes=1.0)
    assert hidden.samples_per_second == pytest.approx(64 / 0.08)


def test_local_sgd_pays_for_the_exchange_once_in_eight_steps() -> None:
    result = simulate(cluster(overlap=True), "local", megabytes=MEGABYTES)
    assert result.samples_per_second == pytest.approx(8 * 64 / (8 * 0.08 + 0.24))


def test_steps_by_speed_wait_for_the_exchange_alone() -> None:
    result = simulate(cluster(), "proportional", megabytes=MEGABYTES, seconds=600.0)
    # 12, 12, 6 and 3 steps (of 8 · v / v̄: 11.6, 5.8, 2.9) of 0.24 s.
    assert result.batch == pytest.approx(33 * 16, rel=0.002)
    assert result.samples_per_second == pytest.approx(33 * 16 / 0.48, rel=0.002)


def test_dynamic_batches_come_to_equal_times() -> None:
    result = simulate(cluster(), "dynamic", megabytes=MEGABYTES, seconds=600.0)
    # 23, 23, 12 and 6 samples take at most 30 ms.
    assert result.samples_per_second == pytest.approx(64 / (0.03 + 0.24), rel=0.02)


@pytest.mark.parametrize("algorithm", ["abs", "updates"])
def test_ours_never_wait_and_have_one_round_of_staleness(algorithm: str) -> None:
    result = simulate(cluster(), algorithm, megabytes=MEGABYTES)
    assert result.share_of_ideal == pytest.approx(1.0, abs=0.01)
    assert max(result.idle) == 0.0
    # A round lasts as long as the exchange, and up to the last rank's next boundary after it.
    assert 0.24 * 2200 <= result.batch <= (0.24 + 0.08) * 2200
    assert result.staleness == pytest.approx(result.batch / 16 / 4)


def test_a_merge_takes_its_time_from_computing() -> None:
    slow = replace(cluster(), merge_seconds=0.03)
    result = simulate(slow, "synchronous", megabytes=MEGABYTES)
    assert result.samples_per_second == pytest.approx(64 / (0.03 + 0.08 + 0.24), rel=0.01)
    ours = simulate(slow, "abs", megabytes=MEGABYTES)
    round_seconds = ours.batch / ours.samples_per_second
    assert ours.share_of_ideal == pytest.approx(1 - 0.03 / round_seconds, abs=0.005)


def test_a_measured_network_takes_what_was_measured() -> None:
    measured = replace(cluster(), network=Measured(0.24, overlap=False))
    assert simulate(measured, "abs", megabytes=1.0) == simulate(cluster(), "abs", megabytes=MEGABYTES)


def test_steered_batches_come_to_equal_times() -> None:
    assert simulate(cluster(), "steered", megabytes=MEGABYTES).samples_per_second == pytest.approx(
        64 / (0.03 + 0.24), rel=0.03
    )


def test_asynchronous_workers_wait_for_the_server_alone() -> None:
    """20 MB there and back over 1,000 Mbit/s: three quarters of 0.16 s each way if the server is sharded."""
    result = simulate(cluster(), "asynchronous", megabytes=MEGABYTES)
    seconds = np.array([0.02, 0.02, 0.04, 0.08])
    steps = 1 / (seconds + 0.24)  # a second
    assert result.samples_per_second == pytest.approx(16 * steps.sum(), rel=0.01)
    assert result.idle == pytest.approx(1 - steps * seconds, abs=0.01)
    # From its pull to the end of its push, others push as many as they do in that time.
    ages = (seconds + 0.12) * (steps.sum() - steps)
    assert result.staleness == pytest.approx((steps * ages).sum() / steps.sum() / 4, rel=0.05)
    one = simulate(cluster(), "one-server", megabytes=MEGABYTES)
    assert one.samples_per_second == pytest.approx(16 / 0.16, rel=0.01), "its link is always busy"


def test_bounds_and_spare_workers_have_the_slowest_set_the_pace_or_left_behind() -> None:
    slowest = 16 / (0.08 + 0.03)  # 2.5 MB
    small = {name: simulate(cluster(), name, megabytes=2.5) for name in ("ssp", "dssp", "asynchronous", "backup")}
    assert small["ssp"].samples_per_second == pytest.approx(4 * slowest, rel=0.02)
    assert small["dssp"].samples_per_second == pytest.approx(4 * slowest, rel=0.02)
    assert small["backup"].samples_per_second == pytest.approx(3 * 16 / (0.04 + 0.03), rel=0.02)
    assert small["backup"].staleness == 0.0
    assert small["asynchronous"].samples_per_second > 1.5 * small["ssp"].samples_per_second


def test_a_partial_allreduce_waits_for_the_first_or_for_one_at_random() -> None:
    solo, majority = (simulate(cluster(), f"eager-{name}", megabytes=2.5) for name in ("solo", "majority"))
    assert solo.rounds == pytest.approx(120 / (0.02 + 0.03), rel=0.03)
    assert majority.rounds < 0.8 * solo.rounds
    assert solo.batch < majority.batch <= 64.5


def test_a_rank_that_leaves_takes_its_share_with_it() -> None:
    whole = cluster()
    left = replace(whole, ranks=(replace(whole.ranks[0], leaves=30.0), *whole.ranks[1:]))
    for algorithm in ALGORITHMS:
        result = simulate(left, algorithm, megabytes=MEGABYTES, seconds=120.0)
        assert result.idle[0] > 0.5, algorithm
        assert result.ideal == pytest.approx(2200 - 0.75 * 800, rel=0.001), algorithm
        assert result.share_of_ideal <= 1.01, algorithm


def test_while_one_pauses_the_others_go_on_up_to_their_bound() -> None:
    whole = cluster()
    paused = replace(whole, ranks=(replace(whole.ranks[0], stalls=(Stall(10.0, 5.0),)), *whole.ranks[1:]))
    result = simulate(paused, "updates", megabytes=MEGABYTES, seconds=60.0)
    # 64 micro-batches take ranks 1 and 2 1.3 and 2.6 of the 5 s, rank 3 all of it; then they wait.
    lost = ((5 - 1.28) * 800 + (5 - 2.56) * 400) / (60 * result.ideal)
    assert 1 - result.share_of_ideal == pytest.approx(lost, abs=0.012)


def test_the_same_seed_gives_the_same_and_another_another() -> None:
    noisy = cluster(noise=Noise(0.3, 0.05), loads=(Bursts(5.0, 2.0, 3.0),))  # type: ignore[arg-type]
    first, second, other = (simulate(noisy, "abs", megabytes=MEGABYTES, seed=seed) for seed in (1, 1, 2))
    assert first == second
    assert first != other


def test_it_ends_after_so_many_rounds_or_seconds_and_tells_of_its_progress() -> None:
    told: list[float] = []
    result = simulate(cluster(), "abs", megabytes=MEGABYTES, seconds=math.inf, rounds=40, on_progress=told.append)
    assert result.rounds == 40
    assert told == pytest.approx([number / 40 for number in range(1, 41)])
    assert 9.5 < simulate(cluster(), "abs", megabytes=MEGABYTES, seconds=10.0).seconds <= 10.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "abc"}, "'abc' is not an algorithm: one of synchronous, dynamic"),
        ({"megabytes": 0.0}, "more than 0 megabytes, seconds and rounds"),
        ({"seconds": 0.1}, "in 0.1 virtual seconds no exchange was merged: simulate more"),
    ],
)
def test_what_cannot_be_simulated_is_refused(options: dict[str, float], message: str) -> None:
    given = {"algorithm": "abs", "megabytes": MEGABYTES, **options}
    with pytest.raises(ValueError, match=message):
        simulate(cluster(), **given)  # type: ignore[arg-type]
