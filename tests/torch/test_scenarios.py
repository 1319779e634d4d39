"""Runs every scenario on four ranks over MPI, and those that depend on the controller on three ranks over Gloo.

One launch each runs all of them; a test then looks at one scenario.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ranks import Controller, Outcome, launch
from tests.torch.scenario import scenarios

MPI = list(scenarios())
GLOO = [name for name, each in scenarios().items() if each.gloo]


class Launch:
    """What became of the scenarios of one launch."""

    def __init__(self, controller: Controller, ranks: int, names: list[str], directory: Path) -> None:
        self.outcome: Outcome = launch(
            ranks, "tests.torch.worker", str(directory), *names, controller=controller, timeout=270
        )
        self._records = [_records(directory / f"rank-{rank}.jsonl") for rank in range(ranks)]

    def check(self, name: str) -> None:
        """Fail, with what each rank has to say, unless the scenario has passed on all ranks."""
        told = [records.get(name) for records in self._records]
        if all(each is not None and each.get("ok") for each in told):
            return
        lines = []
        for rank, each in enumerate(told):
            if each is None:
                lines.append(f"rank {rank}: never came to it")
            elif "ok" not in each:
                lines.append(f"rank {rank}: began it and never ended it")
            elif not each["ok"]:
                lines.append(f"rank {rank}:\n{each['error']}")
        if any(each is None or "ok" not in each for each in told):
            lines.append(self.outcome.tail)
        pytest.fail("\n".join(lines), pytrace=False)


def _records(path: Path) -> dict[str, dict[str, object]]:
    """The last record of each scenario."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {record["scenario"]: record for record in map(json.loads, lines)}


@pytest.fixture(scope="session")
def over_mpi(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return Launch("mpi", 4, MPI, tmp_path_factory.mktemp("mpi"))


@pytest.fixture(scope="session")
def over_gloo(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return Launch("gloo", 3, GLOO, tmp_path_factory.mktemp("gloo"))


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MPI)
def test_over_mpi(name: str, over_mpi: Launch) -> None:
    over_mpi.check(name)


@pytest.mark.ranks
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", GLOO)
def test_over_gloo(name: str, over_gloo: Launch) -> None:
    over_gloo.check(name)


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_ranks_end_by_themselves(over_mpi: Launch, over_gloo: Launch) -> None:
    for each in (over_mpi, over_gloo):
        assert each.outcome.status == 0, each.outcome.tail
