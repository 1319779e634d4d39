"""Runs that go wrong: the job ends, soon, with a status and a message that say so."""

from __future__ import annotations

import re

import pytest

from tests.ranks import Controller, Outcome, launch

pytestmark = [pytest.mark.tensorflow, pytest.mark.ranks, pytest.mark.timeout(200)]


def run(case: str, controller: Controller) -> Outcome:
    """The launch must end by itself, within 30 s of the failure, and not well."""
    outcome = launch(2, "tests.tensorflow.failures", case, controller=controller, timeout=180)
    assert outcome.status is not None, f"the job hangs\n{outcome.tail}"
    assert outcome.status != 0, outcome.tail
    failed = re.search(r"rank 1 fails at ([0-9.]+)", outcome.output)
    assert failed is not None, outcome.tail
    assert outcome.ended_at - float(failed[1]) < 30, outcome.tail
    return outcome


def test_a_frozen_rank_is_named_and_the_job_ends() -> None:
    outcome = run("frozen", "mpi")
    told = r"ExchangeTimeout: rank 0: exchange \d+ did not complete within 3 s: rank 1 has not launched it"
    assert re.search(told, outcome.output), outcome.tail


def test_a_killed_rank_ends_the_job() -> None:
    outcome = run("killed", "gloo")
    assert "ExchangeFailed: rank 0: Horovod could not carry out" in outcome.output, outcome.tail
    assert "Process 1 exit with status code 137" in outcome.output, outcome.tail
