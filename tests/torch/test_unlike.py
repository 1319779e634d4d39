"""Ranks on unlike processors: their parameters drift apart by rounding, and are put right at an agreed merge."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from tests.ranks import launch

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="this CPU has one set of kernels"),
]


def run(digest_every: int) -> dict[str, Any]:
    outcome = launch(2, "tests.torch.unlike", str(digest_every), timeout=240)
    found = re.search(r"\{.*\}", outcome.output)
    assert outcome.status == 0, outcome.tail
    assert found, outcome.tail
    result: dict[str, Any] = json.loads(found[0])
    return result


def test_unlike_ranks_drift_apart_and_are_put_right_at_the_same_merge() -> None:
    alone, compared = run(1000), run(5)
    assert alone["corrections"] == 0
    assert 25 not in alone["same"], "the kernels round alike: nothing was tested"
    assert compared["corrections"] >= 3
    assert {10, 15, 20, 25} <= set(compared["same"])
