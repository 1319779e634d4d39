"""A cluster as a model: its ranks' speeds, its network, and what happens to them.

    cluster.network.allreduce_seconds(44.0, cluster.size)  # seconds
    speeds = cluster.sampler(seed=0)
    speeds.seconds(rank=2, samples=16, now=0.0)            # of a micro-batch begun at that moment

:mod:`horovod_abs.plan.clusters` reads one from a file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from horovod_abs.sim.network import Measured, Network
from horovod_abs.sim.speeds import RankModel, RankSpeed


@dataclass(frozen=True)
class ClusterModel:
    """A cluster.

    Args:
        name: For tables.
        ranks: Its ranks.
        network: Between them.
        samples: In a micro-batch.
        merge_seconds: That each rank needs to apply an exchange, and does not compute.

    Raises:
        ValueError: there are no ranks, no samples, links of another number of ranks, or a merge of negative time.
    """

    name: str
    ranks: tuple[RankModel, ...]
    network: Network | Measured
    samples: int = 16
    merge_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.merge_seconds < math.inf:
            raise ValueError(f"a merge takes a time of at least 0, not {self.merge_seconds}")
        if not self.ranks or self.samples < 1:
            raise ValueError("a cluster has at least one rank, and a micro-batch at least one sample")
        links = self._links
        if links and len(links) != self.size:
            raise ValueError(f"{len(links)} links for {self.size} ranks")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def _links(self) -> tuple[float, ...]:
        """Of each rank, where they have some of their own."""
        mbit = self.network.mbit if isinstance(self.network, Network) else ()
        return mbit if isinstance(mbit, tuple) else ()

    @property
    def ideal(self) -> float:
        """Σ samples / tᵢ: samples a second in the long run if every rank always computed; without failures."""
        return sum(self.mean_rate(rank) for rank in range(self.size))

    def mean_rate(self, rank: int, samples: float | None = None) -> float:
        """Samples a second of one rank alone, in the long run, in micro-batches of so many."""
        return self.ranks[rank].mean_rate(self.samples if samples is None else samples)

    def sampler(self, seed: int = 0) -> Sampler:
        """The cluster as it happens once."""
        return Sampler(self, seed)

    def of_size(self, size: int) -> ClusterModel:
        """As many ranks, each as in turn the ranks of this one; failures stay with the first ones.

        Raises:
            ValueError: links of their own for each rank.
        """
        if size == self.size:
            return self
        if self._links:
            raise ValueError(
                "a cluster with a link for each rank cannot be made larger or smaller: set mbit to one number"
            )
        ranks = [
            rank if number < self.size else replace(rank, stalls=(), leaves=math.inf)
            for number in range(size)
            for rank in [self.ranks[number % self.size]]
        ]
        return replace(self, ranks=tuple(ranks))


class Sampler:
    """A cluster as it happens once: the same seed, the same times, whatever the order in which ranks ask.

    Args:
        cluster: Its model.
        seed: Of all that is random.

    Attributes:
        ranks: Each rank.
    """

    def __init__(self, cluster: ClusterModel, seed: int = 0) -> None:
        self.cluster = cluster
        self.ranks: Sequence[RankSpeed] = [RankSpeed(model, (seed, rank)) for rank, model in enumerate(cluster.ranks)]

    def seconds(self, rank: int, samples: float, now: float) -> float:
        """Time of the rank's next micro-batch, of so many samples and begun at ``now`` (virtual seconds)."""
        return self.ranks[rank].seconds(samples, now)

    def leaves(self, rank: int) -> float:
        """When the rank begins its last micro-batch at the latest, in virtual seconds; infinite if it stays."""
        return self.cluster.ranks[rank].leaves

    def ideal(self, begin: float, end: float, samples: float | None = None) -> float:
        """Samples a second that the ranks would do from ``begin`` to ``end``, each alone, as things happen here."""
        of_each = self.cluster.samples if samples is None else samples
        return sum(rank.mean_rate(of_each, begin, end) for rank in self.ranks)
