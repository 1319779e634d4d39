"""What every binding refuses, and that all ranks were given the same; found early, and not by a hang."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any, Protocol

from horovod_abs.errors import Mismatch, name_ranks


class Gatherer(Protocol):
    """The part of a wire that compares need."""

    rank: int

    def gather(self, values: list[int], name: str) -> list[list[int]]:
        """The values of every rank."""


def refuse_keywords(keywords: Mapping[str, Any], average: Any) -> None:
    """Raise :class:`ValueError` for keywords of Horovod's that would not keep their meaning, naming the alternative.

    Args:
        keywords: ``backward_passes_per_step``, ``op``, ``num_groups`` and ``groups``, as in Horovod.
        average: Horovod's ``Average``.
    """
    if keywords["backward_passes_per_step"] != 1:
        raise ValueError(
            "backward_passes_per_step must be 1: gradients are handed over after every backward pass, and a round "
            "accumulates by itself. For n passes in a round use clock=CountClock(n)"
        )
    if keywords["op"] != average:
        raise ValueError(
            "op must be hvd.Average: gradients are averaged over samples, so op=Sum, Adasum and the like would change "
            "their meaning. For a sum multiply the learning rate"
        )
    if keywords["num_groups"] or keywords["groups"] is not None:
        raise ValueError("groups= has nothing to group here: all gradients already travel as one group. Remove it")


def refuse_environment() -> None:
    """Raise :class:`ValueError` for settings of Horovod's under which a run would not be what it is meant to be."""
    for name, remedy in (
        ("HOROVOD_AUTOTUNE", "it changes how sums are fused, so ranks and runs would differ in the last bits"),
        ("HOROVOD_ELASTIC", "elastic training is not supported yet; start the run without it"),
    ):
        if os.environ.get(name, "0") not in ("", "0"):
            raise ValueError(f"{name} is set: {remedy}. Unset it")


def check_same_on_all_ranks(given: Mapping[str, str], wire: Gatherer, name: str) -> None:
    """Compare what the ranks were given; every rank calls it.

    Args:
        given: What is compared, in words, e.g. ``{"clock": "SyncClock()"}``; the same keys on every rank.
        wire: Between the ranks that compare.
        name: Name of the exchange.

    Raises:
        Mismatch: not all are the same; names the ranks and what differs.
        ExchangeTimeout: not every rank came.
    """
    digests = [int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big") for text in given.values()]
    everyone = wire.gather(digests, f"{name}.check")
    for column, (what, text) in enumerate(given.items()):
        others = [rank for rank, row in enumerate(everyone) if row[column] != everyone[0][column]]
        if others:
            raise Mismatch(
                wire.rank,
                f"{name_ranks(others)} made DistributedOptimizer with other {what} than rank 0 "
                f"(here: {text if len(text) < 500 else text[:500] + ' …'})",
                "Give every rank the same model, options and clock",
            )
