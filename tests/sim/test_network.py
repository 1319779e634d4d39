"""The network's formulas."""

from __future__ import annotations

import pytest

from horovod_abs.sim.network import Network


def test_a_ring_of_four_over_a_gigabit_takes_half_a_second_for_44_megabytes() -> None:
    assert Network(mbit=1000).allreduce_seconds(44.0, 4) == pytest.approx(2 * 44e6 * 8 / 1e9 * 3 / 4)


def test_a_ring_takes_two_steps_less_than_twice_its_ranks() -> None:
    assert Network(latency=0.001, mbit=800).allreduce_seconds(100.0, 5) == pytest.approx(8 * (0.001 + 20 / 100))


@pytest.mark.parametrize(("size", "steps"), [(2, 2), (3, 4), (4, 4), (1024, 20)])
def test_a_tree_passes_everything_up_and_down(size: int, steps: int) -> None:
    network = Network(latency=0.001, mbit=800, algorithm="tree")
    assert network.allreduce_seconds(10.0, size) == pytest.approx(steps * (0.001 + 0.1))


def test_the_slowest_link_counts() -> None:
    links = Network(mbit=(1000.0, 100.0, 1000.0))
    assert links.allreduce_seconds(44.0, 3) == Network(mbit=100).allreduce_seconds(44.0, 3)
    assert [links.link(rank) for rank in range(3)] == [125.0, 12.5, 125.0]
    assert Network(mbit=80).link(7) == 10.0


def test_one_rank_exchanges_nothing() -> None:
    assert Network(latency=1.0).allreduce_seconds(44.0, 1) == 0.0


def test_servers() -> None:
    network = Network(latency=0.001, mbit=(800.0, 80.0, 800.0, 800.0))
    assert network.server_seconds(44.0, 4, rank=0) == pytest.approx(0.002 + 2 * 44 * 3 / 4 / 100)
    assert network.server_seconds(44.0, 4, rank=1) == pytest.approx(0.002 + 2 * 44 * 3 / 4 / 10)
    assert network.server_seconds(44.0, 4, sharded=False, rank=0) == pytest.approx(0.002 + 2 * 44 / 100)
    assert network.server_seconds(44.0, 4) == network.server_seconds(44.0, 4, rank=1)


@pytest.mark.parametrize("wrong", [{"latency": -1.0}, {"mbit": 0.0}, {"mbit": (1.0, 0.0)}, {"algorithm": "star"}])
def test_what_is_out_of_range_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"need|ring or a tree"):
        Network(**wrong)  # type: ignore[arg-type]
