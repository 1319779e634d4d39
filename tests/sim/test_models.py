"""Clusters as models: what happens by chance, and clusters of other sizes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from horovod_abs.plan.clusters import load
from horovod_abs.sim.network import Network


def test_times_do_not_depend_on_the_order_in_which_ranks_ask() -> None:
    def times(order: list[int]) -> list[list[float]]:
        sampler = load("mixed").sampler(3)
        found: list[list[float]] = [[] for _ in range(4)]
        for step in range(50):
            for rank in order:
                found[rank].append(sampler.seconds(rank, 16, 0.5 * step))
        return found

    assert times([0, 1, 2, 3]) == times([3, 1, 0, 2])
    assert times([0, 1, 2, 3])[0] != times([0, 1, 2, 3])[1]


def test_larger_and_smaller_clusters_repeat_their_ranks() -> None:
    cluster = load("permanent").of_size(6)
    assert [rank.speed for rank in cluster.ranks] == [1.0, 1.0, 0.5, 0.25, 1.0, 1.0]
    assert cluster.of_size(2).ideal == pytest.approx(1600)


def test_a_larger_cluster_does_not_repeat_failures_nor_invent_links() -> None:
    cluster = load("permanent")
    leaving = replace(cluster.ranks[1], leaves=60.0)
    cluster = replace(cluster, ranks=(cluster.ranks[0], leaving, *cluster.ranks[2:]))
    larger = cluster.of_size(6)
    assert larger.ranks[1].leaves == 60.0
    assert larger.ranks[5].leaves == math.inf
    with pytest.raises(ValueError, match="link for each rank"):
        replace(cluster, network=Network(mbit=(1e3, 1e3, 1e3, 1e2))).of_size(6)
