"""Runs that go wrong: the job ends, soon, with a status and a message that say so."""

from __future__ import annotations

import re

import pytest

from tests.ranks import Controller, Outcome, launch

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]


def run(case: str, ranks: int, controller: Controller) -> Outcome:
    """The launch must end by itself, and not well, within 30 seconds of the failure."""
    outcome = launch(ranks, "tests.tensorflow.failures", case, controller=controller, timeout=240)
    assert outcome.status is not None, f"the job hangs\n{outcome.tail}"
    assert outcome.status != 0, outcome.tail
    failed = re.search(r"rank 1 fails at ([0-9.]+)", outcome.output)
    assert failed is not None, outcome.tail
    assert outcome.ended_at - float(failed[1]) < 30, outcome.tail
    return outcome


def test_a_frozen_rank_is_named_and_the_job_ends() -> None:
    outcome = run("frozen", 3, "mpi")
    told = re.findall(
        r"ExchangeTimeout: rank ([02]): exchange \d+ did not complete within 6 s: (.*)\. See", outcome.output
    )
    assert told, outcome.tail
    assert {what for _, what in told} == {"rank 1 has not launched it"}


@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_a_rank_killed_in_fit_ends_the_job(controller: Controller) -> None:
    outcome = run("killed", 2, controller)
    if controller == "mpi":
        assert re.search(r"process rank 1 with PID \d+ .* exited on\s+signal 9 \(Killed\)", outcome.output), (
            outcome.tail
        )
    else:
        assert "ExchangeFailed: rank 0: Horovod could not carry out" in outcome.output, outcome.tail
        assert "Process 1 exit with status code 137" in outcome.output, outcome.tail
