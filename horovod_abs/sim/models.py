"""A cluster as a model: its ranks' speeds, its network, and what happens to them; by preset or from a TOML file.

    cluster = load("mixed")                                # or "permanent", "transient", or the path of a TOML file
    cluster.network.allreduce_seconds(44.0, cluster.size)  # seconds
    speeds = cluster.sampler(seed=0)
    speeds.seconds(rank=2, samples=16, now=0.0)            # of a micro-batch begun at that moment

The three presets are the kinds of heterogeneity of [ABS-SGD]: GPUs that differ (``permanent``), equal ones whose load
changes (``transient``), and both (``mixed``); they lie beside this module, in ``presets``, as examples of a file::

    [micro_batch]               # what one costs at speed 1
    samples = 16
    fixed_ms = 2.0              # 0 by default
    sample_ms = 1.25

    [network]                   # 0 ms, 1,000 Mbit/s, a ring with overlap by default
    latency_ms = 0.05
    mbit = [1000, 1000, 1000, 100]      # or one number for all
    algorithm = "ring"          # or "tree"
    overlap = true              # synchronous training exchanges during the backward pass

    [[ranks]]                   # as many tables as there are kinds
    count = 3                   # 1 by default
    speed = 0.5                 # 1 by default
    jitter = 0.1                # standard deviation of the logarithm of a micro-batch's time
    stragglers = { probability = 0.02, factor = 4.0, spread = 0.5 }
    bursts = { every_s = 10.0, lasting_s = 5.0, factor = 3.0 }
    drift = { factor = 1.5, over_s = 600.0 }
    trace = { log = "run.jsonl", rank = 2 }     # plays a rank of a run log over and over again

    [[failures]]
    rank = 3
    at_s = 30.0
    pause_s = 5.0               # or leaves = true: it takes part with weight 0 from then on

References:
    [ABS-SGD] Zhou, Chen, Wu, arXiv 2308.15164.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from horovod_abs.sim.network import Network
from horovod_abs.sim.speeds import RankModel, RankSpeed

PRESETS = ("permanent", "transient", "mixed")


class ClusterError(ValueError):
    """A description of a cluster cannot be used: says where, what is wrong, and what to write."""


@dataclass(frozen=True)
class ClusterModel:
    """A cluster.

    Args:
        name: For tables.
        ranks: Its ranks.
        network: Between them.
        samples: In a micro-batch.

    Raises:
        ValueError: there are no ranks, no samples, or links of another number of ranks.
    """

    name: str
    ranks: tuple[RankModel, ...]
    network: Network
    samples: int = 16

    def __post_init__(self) -> None:
        if not self.ranks or self.samples < 1:
            raise ValueError("a cluster has at least one rank, and a micro-batch at least one sample")
        if isinstance(self.network.mbit, tuple) and len(self.network.mbit) != self.size:
            raise ValueError(f"{len(self.network.mbit)} links for {self.size} ranks")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

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
        if isinstance(self.network.mbit, tuple):
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


def load(cluster: str | Path) -> ClusterModel:
    """A preset, or what a TOML file describes.

    Args:
        cluster: Name of a preset (:data:`PRESETS`), or the path of a file.

    Raises:
        ClusterError: there is neither, or the file is wrong; names key, value and remedy.
    """
    from horovod_abs.sim.description import parse

    name = str(cluster)
    path = Path(__file__).parent / "presets" / f"{name}.toml" if name in PRESETS else Path(cluster)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", error)
        raise ClusterError(
            f"{name} is no cluster: pass one of {', '.join(PRESETS)}, or the path of a TOML file ({why})"
        ) from None
    return parse(text, name=path.stem, path=path)
