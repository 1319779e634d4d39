"""Runs every scenario on four ranks over MPI, and those that depend on the controller on three ranks over Gloo.

One launch each runs all of them; a test then looks at one scenario.
"""

from __future__ import annotations

import pytest

from tests.launched import Launch
from tests.torch.scenario import scenarios

MPI = list(scenarios())
GLOO = [name for name, each in scenarios().items() if each.gloo]


@pytest.fixture(scope="session")
def over_mpi(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return Launch("tests.torch.worker", "mpi", 4, MPI, tmp_path_factory.mktemp("mpi"))


@pytest.fixture(scope="session")
def over_gloo(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return Launch("tests.torch.worker", "gloo", 3, GLOO, tmp_path_factory.mktemp("gloo"))


@pytest.mark.ranks
@pytest.mark.timeout(570)
@pytest.mark.parametrize("name", MPI)
def test_over_mpi(name: str, over_mpi: Launch) -> None:
    over_mpi.check(name)


@pytest.mark.ranks
@pytest.mark.timeout(570)
@pytest.mark.parametrize("name", GLOO)
def test_over_gloo(name: str, over_gloo: Launch) -> None:
    over_gloo.check(name)


@pytest.mark.ranks
@pytest.mark.timeout(570)
def test_ranks_end_by_themselves(over_mpi: Launch, over_gloo: Launch) -> None:
    for each in (over_mpi, over_gloo):
        assert each.outcome.status == 0, each.outcome.tail
