"""Four hosts with a network between them: what works on one works on several, and what goes wrong there ends.

Needs root and the packages iproute2 and openssh-server; skipped elsewhere, with the reason. `make test-hosts` runs it.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from horovod_abs.bench.hosts import Hosts, HostsUnavailable, unavailable
from tests.launched import Launch
from tests.ranks import Controller, Outcome, launch

pytestmark = [pytest.mark.hosts, pytest.mark.ranks, pytest.mark.timeout(300)]

SCENARIOS: dict[Controller, list[str]] = {
    "mpi": ["delay_1_momentum", "updates_momentum", "updates_over_epochs_of_a_sampler"],
    "gloo": ["delay_1_momentum", "bit_identical_after_each_merge"],
}
"""The replay equality; ticks, model updates and exact epochs."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    try:
        with Hosts(4) as made:
            yield made
    except HostsUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_training_over_hosts_is_training(controller: Controller, hosts: Hosts, tmp_path: Path) -> None:
    launched = Launch("tests.torch.worker", controller, 4, SCENARIOS[controller], tmp_path, hosts=hosts)
    for name in SCENARIOS[controller]:
        launched.check(name)
    assert launched.outcome.status == 0, launched.outcome.tail


def endure(
    controller: Controller, hosts: Hosts, then: Callable[[], None], told: str = "", *, patience: float = 60
) -> tuple[Outcome, float]:
    """What becomes of a run if something happens while it trains.

    Args:
        then: What happens.
        told: What must be printed thereupon, a regular expression.
        patience: Seconds until everything is killed.

    Returns:
        How the launch ended, and the seconds from what happened until what was to be printed.
    """
    seconds = 0.0

    def during(output: Path) -> None:
        nonlocal seconds
        wait_for(output, "(?s)(is training.*){4}", 90)
        then()
        began = time.monotonic()
        wait_for(output, told, 45)
        seconds = time.monotonic() - began

    outcome = launch(
        4, "tests.torch.failures", "enduring", controller=controller, timeout=patience, hosts=hosts, during=during
    )
    return outcome, seconds


def wait_for(output: Path, told: str, patience: float) -> None:
    """Until something is printed."""
    deadline = time.monotonic() + patience
    while not re.search(told, text := output.read_text(errors="replace")):
        assert time.monotonic() < deadline, text[-6000:]
        time.sleep(0.2)


def test_a_host_that_is_cut_off_for_five_seconds_goes_on(hosts: Hosts) -> None:
    def then() -> None:
        hosts.cut(2)
        time.sleep(5)
        hosts.mend(2)

    outcome, _ = endure("mpi", hosts, then)
    assert outcome.status == 0, outcome.tail
    ends = re.findall(r"rank (\d) ends after round (\d+), longest ([0-9.]+) s", outcome.output)
    assert sorted(rank for rank, _, _ in ends) == ["0", "1", "2", "3"]
    assert len({number for _, number, _ in ends}) == 1
    assert all(float(longest) > 4 for _, _, longest in ends), "nobody has noticed"


@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_a_host_that_is_cut_off_for_good_is_named(controller: Controller, hosts: Hosts) -> None:
    """Open MPI's own launcher then waits for its daemon on that host; the ranks have ended, and said why."""
    told = r"rank [012]: exchange \d+ did not complete within 12 s: .*rank 3 has not launched it"
    try:
        outcome, seconds = endure(controller, hosts, lambda: hosts.cut(3), told, patience=25)
    finally:
        hosts.mend(3)
    assert outcome.status != 0, outcome.tail
    assert controller == "mpi" or outcome.status is not None, outcome.tail
    assert seconds < 30, outcome.tail


def test_a_host_that_dies_ends_the_job() -> None:
    """Open MPI says so and ends all ranks, with an exit status of 0."""
    try:
        with Hosts(4) as hosts:
            outcome, _ = endure("mpi", hosts, lambda: hosts.kill(3), patience=30)
    except HostsUnavailable as error:
        pytest.skip(str(error))
    assert outcome.status is not None, outcome.tail
    assert re.search(r"lost communication with a remote daemon(?s:.*)on node h3", outcome.output), outcome.tail
    assert "ends after round" not in outcome.output


@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_an_evaluation_that_outlasts_the_exchange_timeout_survives(controller: Controller, hosts: Hosts) -> None:
    """80 s with the default of 60 s, both divided by 10: who is busy inside ``authoritative`` is not missing."""
    outcome = launch(4, "tests.torch.failures", "evaluating", "8", "6", controller=controller, timeout=120, hosts=hosts)
    assert outcome.status == 0, outcome.tail
    ends = re.findall(r"rank (\d) ends, longest ([0-9.]+) s", outcome.output)
    assert sorted(rank for rank, _ in ends) == ["0", "1", "2", "3"]
    assert all(float(longest) > 6 for rank, longest in ends if rank != "0"), "nobody has waited for it"


def test_hosts_leave_nothing_behind() -> None:
    if reason := unavailable():
        pytest.skip(reason)
    made = Hosts(2)
    with contextlib.suppress(KeyError), made:
        assert made.start(["ssh", "h1", "test $(hostname) = h1"]).wait(30) == 0
        raise KeyError("a fault")
    left = [subprocess.run(["ip", *what], capture_output=True, text=True, check=True) for what in (["netns"], ["link"])]
    assert not any(made._bridge in each.stdout for each in left)
    assert not list(Path("/etc/netns").glob(f"{made._bridge}*"))


def test_a_rate_that_tc_does_not_know_is_told_and_nothing_is_left() -> None:
    if reason := unavailable():
        pytest.skip(reason)
    with pytest.raises(HostsUnavailable, match=r"tc qdisc replace .* failed"), Hosts(2, rate="fast"):
        pass
    assert "fast" not in subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
def test_a_program_that_is_told_to_end_leaves_no_hosts_behind() -> None:
    code = "from horovod_abs.bench.hosts import Hosts\nwith Hosts(1) as hosts: print(hosts.names, flush=True); input()"
    before = subprocess.run(["ip", "netns"], capture_output=True, check=True).stdout
    program = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert program.stdout is not None
    assert program.stdout.readline() == b"['h0']\n"
    assert subprocess.run(["ip", "netns"], capture_output=True, check=True).stdout != before
    program.terminate()
    assert program.wait(30) == 128 + signal.SIGTERM
    assert subprocess.run(["ip", "netns"], capture_output=True, check=True).stdout == before
