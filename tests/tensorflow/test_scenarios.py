"""Runs every scenario on four ranks over MPI, and those that depend on the controller on two ranks over Gloo.

A launch runs many of them, one after the other; a test then looks at one scenario.
"""

from __future__ import annotations

import pytest

from tests.launched import Launch
from tests.tensorflow.scenario import scenarios

MPI = list(scenarios())
LATER = [name for name in MPI if scenarios()[name].run.__module__.endswith(("recording", "refused"))]
"""Of these a second launch, so that none takes too long."""
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
def over_mpi(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    names = [name for name in MPI if name not in LATER]
    return Launch("tests.tensorflow.worker", "mpi", 4, names, tmp_path_factory.mktemp("mpi"))


@pytest.fixture(scope="session")
def later_over_mpi(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return Launch("tests.tensorflow.worker", "mpi", 4, LATER, tmp_path_factory.mktemp("mpi"))


@pytest.fixture(scope="session")
def over_gloo(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return Launch("tests.tensorflow.worker", "gloo", 2, GLOO, tmp_path_factory.mktemp("gloo"))


@pytest.mark.ranks
@pytest.mark.timeout(570)
@pytest.mark.parametrize("name", MPI)
def test_over_mpi(name: str, request: pytest.FixtureRequest) -> None:
    launch: Launch = request.getfixturevalue("later_over_mpi" if name in LATER else "over_mpi")
    launch.check(name)


@pytest.mark.ranks
@pytest.mark.timeout(570)
@pytest.mark.parametrize("name", GLOO)
def test_over_gloo(name: str, over_gloo: Launch) -> None:
    over_gloo.check(name)


@pytest.mark.ranks
@pytest.mark.timeout(570)
@pytest.mark.parametrize("name", ACROSS)
def test_across_frameworks(name: str, over_mpi: Launch) -> None:
    from tests.tensorflow.across import largest_difference

    records = over_mpi.value(name)
    for record in records if isinstance(records, list) else [records]:
        assert largest_difference(record) < 1e-10, record["rules"]


@pytest.mark.ranks
@pytest.mark.timeout(570)
def test_ranks_end_by_themselves(over_mpi: Launch, later_over_mpi: Launch, over_gloo: Launch) -> None:
    for each in (over_mpi, later_over_mpi, over_gloo):
        assert each.outcome.status == 0, each.outcome.tail
