"""One launch that runs many scenarios, and what became of each; see ``tests.torch.worker`` and its twin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from horovod_abs.bench.hosts import Hosts
from tests.ranks import Controller, Outcome, launch


class Launch:
    """What became of the scenarios of one launch."""

    def __init__(
        self,
        module: str,
        controller: Controller,
        ranks: int,
        names: list[str],
        directory: Path,
        hosts: Hosts | None = None,
    ) -> None:
        self.outcome: Outcome = launch(
            ranks, module, str(directory), *names, controller=controller, timeout=540, hosts=hosts
        )
        self._records = [_records(directory / f"rank-{rank}.jsonl") for rank in range(ranks)]

    def value(self, name: str) -> Any:
        """What the scenario has returned on the first rank, having passed on all."""
        self.check(name)
        return self._records[0][name]["value"]

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
