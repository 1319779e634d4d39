"""Runs that go wrong: the job ends, soon, with a status and a message that say so."""

from __future__ import annotations

import re

import pytest

from tests.ranks import Controller, Outcome, launch

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]
both = pytest.mark.parametrize("controller", ["mpi", "gloo"])


def run(case: str, ranks: int, controller: Controller, timeout: float = 240) -> Outcome:
    """The launch must end by itself, and not well."""
    outcome = launch(ranks, "tests.torch.failures", case, controller=controller, timeout=timeout)
    assert outcome.status is not None, f"the job hangs\n{outcome.tail}"
    assert outcome.status != 0, outcome.tail
    failed = re.search(r"rank 1 fails at ([0-9.]+)", outcome.output)
    assert failed is None or outcome.ended_at - float(failed[1]) < 30, outcome.tail
    return outcome


@both
def test_a_frozen_rank_is_named_and_the_job_ends(controller: Controller) -> None:
    outcome = run("frozen", 3 if controller == "mpi" else 2, controller)
    told = re.findall(
        r"ExchangeTimeout: rank ([02]): exchange \d+ did not complete within 3 s: (.*)\. See", outcome.output
    )
    whats = {what for _, what in told}
    assert "rank 1 has not launched it" in whats, outcome.tail
    assert whats <= {
        "rank 1 has not launched it",
        "ranks 0, 1 have not launched it",
    }  # a busy machine may hold up rank 0


@both
def test_a_killed_rank_ends_the_job(controller: Controller) -> None:
    outcome = run("killed", 2, controller)
    assert "rank 1 fails at" in outcome.output
    if controller == "mpi":
        assert re.search(r"process rank 1 with PID \d+ .* exited on\s+signal 9 \(Killed\)", outcome.output), (
            outcome.tail
        )
    else:
        assert "ExchangeFailed: rank 0: Horovod could not carry out" in outcome.output, outcome.tail
        assert "Process 1 exit with status code 137" in outcome.output, outcome.tail


def test_a_rank_that_raises_is_heard_and_ends_the_job() -> None:
    outcome = run("raising", 2, "mpi")
    assert re.search(r"1\]<stderr>: ?KeyError: \"a fault of the user's\"", outcome.output), outcome.tail


def test_a_rank_that_leaves_a_loop_ends_the_job() -> None:
    outcome = run("leaving", 2, "gloo")
    assert "rank 1 leaves without synchronize()" in outcome.output, outcome.tail
    assert re.search(
        r"ExchangeFailed: rank 0: Horovod could not carry out .*look for the first error in the other ranks' output",
        outcome.output,
    ), outcome.tail


def test_unevenly_made_calls_are_named() -> None:
    outcome = run("uneven", 2, "mpi")
    assert re.search(
        r"synchronize: rank 0: exchange \d+ did not complete within 2 s: rank 1 has not launched it", outcome.output
    )
    assert "step afterwards: rank 0: an exchange has failed before. Start the run again" in outcome.output
    assert re.search(
        r"ExchangeTimeout: rank 0: not every rank has come to 'horovod_abs.0.2.* within 2 s", outcome.output
    )
