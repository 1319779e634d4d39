"""Runs every scenario on four ranks over MPI, and those that depend on the controller on two ranks over Gloo.

A launch runs many of them, one after the other; a test then looks at one scenario. The few of ``FIRST`` belong to
``make test``; the others, which take minutes to trace, to ``make test-tensorflow``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.launched import Launch
from tests.tensorflow.scenario import scenarios

FIRST = (
    "equal_parameters_after_different_data",
    "equals_the_gradient_tape",
    "as_published",
    "exact_epochs",
    "horovods_example",
    "updates_by_each_clock",
)
LATER = [name for name in scenarios() if name not in FIRST]
LAST = [name for name in LATER if scenarios()[name].run.__module__.endswith(("recording", "replay", "refused"))]
"""Of these a launch of their own, so that none takes too long."""
ACROSS = (
    "updates_by_each_clock",
    "updates_of_equal_weight",
    "updates_with_averaged_state",
    "updates_with_an_outer_optimizer",
    "updates_with_scaled_rates",
    "gradients_as_pytorch",
)
"""Runs that PyTorch's formulas must compute alike."""
GLOO = [name for name, each in scenarios().items() if each.gloo]


@pytest.fixture(scope="session")
def over_mpi(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Launch]:
    @functools.cache
    def launched(names: tuple[str, ...]) -> Launch:
        return Launch("tests.tensorflow.worker", "mpi", 4, list(names), tmp_path_factory.mktemp("mpi"))

    parts = (FIRST, tuple(name for name in LATER if name not in LAST), tuple(LAST))
    return lambda name: launched(next(part for part in parts if name in part))


@pytest.fixture(scope="session")
def over_gloo(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return Launch("tests.tensorflow.worker", "gloo", 2, GLOO, tmp_path_factory.mktemp("gloo"))


def _marked(names: Iterable[str]) -> list[Any]:
    return [name if name in FIRST else pytest.param(name, marks=pytest.mark.tensorflow) for name in names]


@pytest.mark.ranks
@pytest.mark.timeout(570)
@pytest.mark.parametrize("name", _marked(scenarios()))
def test_over_mpi(name: str, over_mpi: Callable[[str], Launch]) -> None:
    launch = over_mpi(name)
    launch.check(name)
    assert launch.outcome.status == 0, launch.outcome.tail


@pytest.mark.tensorflow
@pytest.mark.ranks
@pytest.mark.timeout(570)
@pytest.mark.parametrize("name", GLOO)
def test_over_gloo(name: str, over_gloo: Launch) -> None:
    over_gloo.check(name)
    assert over_gloo.outcome.status == 0, over_gloo.outcome.tail


@pytest.mark.ranks
@pytest.mark.timeout(570)
@pytest.mark.parametrize("name", _marked(ACROSS))
def test_across_frameworks(name: str, over_mpi: Callable[[str], Launch]) -> None:
    from tests.tensorflow.across import largest_difference

    records = over_mpi(name).value(name)
    for record in records if isinstance(records, list) else [records]:
        assert largest_difference(record) < 1e-10, record["rules"]
