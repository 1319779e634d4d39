"""Learning-rate scaling: the rules, and the warm-up counted in samples."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_abs.core.scaling import Rule, Scaling

batches = st.floats(1, 1e6)


@pytest.mark.parametrize(("rule", "factor"), [("none", 1), ("linear", 4), ("sqrt", 2)])
def test_the_factor_at_four_times_the_reference(rule: Rule, factor: float) -> None:
    assert Scaling(rule, reference_batch_size=64).factor(256, samples_seen=0) == factor


@given(st.sampled_from(["none", "linear", "sqrt"]), batches, st.floats(0, 1e9))
def test_the_reference_batch_is_not_scaled(rule: Rule, batch: float, seen: float) -> None:
    assert Scaling(rule, batch, warmup_samples=1000).factor(batch, seen) == 1


def test_warm_up_goes_from_one_to_the_full_factor_in_proportion_to_the_samples_seen() -> None:
    scaling = Scaling("linear", reference_batch_size=100, warmup_samples=1000)
    assert [scaling.factor(500, seen) for seen in (0, 250, 500, 1000, 5000)] == [1, 2, 3, 5, 5]


def test_warm_up_moves_downwards_for_small_batches() -> None:
    scaling = Scaling("linear", reference_batch_size=100, warmup_samples=1000)
    assert [scaling.factor(50, seen) for seen in (0, 500, 1000)] == [1, 0.75, 0.5]


@given(st.sampled_from(["linear", "sqrt"]), batches, batches, st.lists(st.floats(0, 1e6), min_size=2, max_size=9))
def test_warm_up_is_monotone_and_never_overshoots(
    rule: Rule, reference: float, batch: float, seen: list[float]
) -> None:
    scaling = Scaling(rule, reference, warmup_samples=1e5)
    full = scaling.factor(batch, math.inf)
    factors = [scaling.factor(batch, samples) for samples in sorted(seen)]
    distances = [abs(full - factor) for factor in factors]
    assert distances == sorted(distances, reverse=True)
    assert all(min(1, full) <= factor <= max(1, full) for factor in factors)


def test_an_empty_batch_has_a_factor() -> None:
    assert Scaling("sqrt", 64).factor(0, 0) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rule": "cubic"}, "must be 'none', 'linear' or 'sqrt', not 'cubic'"),
        ({"rule": "linear"}, "lr_scaling='linear' needs reference_batch_size="),
        ({"rule": "sqrt", "reference_batch_size": 0}, "got 0"),
        ({"rule": "linear", "reference_batch_size": -1}, "got -1"),
        ({"warmup_samples": -5}, "must not be negative, got -5"),
    ],
)
def test_arguments_are_checked_at_construction(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Scaling(**arguments)
