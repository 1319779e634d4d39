"""The control plane, over a communicator of one process; several ranks use it in ``tests/torch``."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from horovod_abs import mpi

MPI = pytest.importorskip("mpi4py.MPI")


@pytest.fixture
def control() -> Iterator[mpi.ControlPlane]:
    comm = MPI.COMM_SELF.Dup()
    yield mpi.ControlPlane(comm)
    comm.Free()


def wait_for(condition: object, seconds: float = 10) -> bool:
    """Whether ``condition()`` becomes true."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.001)
    return False


def test_announcements_arrive_and_the_last_one_counts(control: mpi.ControlPlane) -> None:
    assert control.known(3) == {}
    control.announce(3, 5, busy=True, to=[0])
    control.announce(3, 6, busy=False, to=[0])
    assert wait_for(lambda: control.known(3) == {0: (6, False)})


def test_announcements_of_two_optimizers_are_kept_apart(control: mpi.ControlPlane) -> None:
    control.announce(1, 5, busy=True, to=[0])
    control.announce(2, 7, busy=False, to=[0])
    assert wait_for(lambda: control.known(1) == {0: (5, True)})
    assert control.known(2) == {0: (7, False)}
    assert control.known(3) == {}


def test_ticks_arrive_apart_from_announcements_and_never_go_back(control: mpi.ControlPlane) -> None:
    assert control.latest_tick(1) == -1
    control.announce(1, 9, busy=False, to=[0])
    control.send_tick(1, 4, to=[0])
    control.send_tick(1, 2, to=[0])
    control.send_tick(2, 8, to=[0])
    assert wait_for(lambda: control.latest_tick(2) == 8)
    assert control.latest_tick(1) == 4
    assert control.known(1) == {0: (9, False)}


def test_messages_that_were_received_are_forgotten(control: mpi.ControlPlane) -> None:
    for launches in range(20):
        control.announce(1, launches, busy=False, to=[0])
        assert wait_for(lambda launches=launches: control.known(1) == {0: (launches, False)})
    assert len(control._sent) <= 2


def test_the_ticker_of_rank_0_calls_the_last_round_that_was_scheduled(control: mpi.ControlPlane) -> None:
    ticker = mpi.Ticker(control, 1, rank=0, ranks=[0])
    assert ticker.latest() == -1
    ticker.schedule(0, 60.0)
    ticker.schedule(1, 0.01)
    assert wait_for(lambda: ticker.latest() == 1)


def test_other_ranks_hear_the_ticks_and_schedule_none(control: mpi.ControlPlane) -> None:
    ticker = mpi.Ticker(control, 1, rank=1, ranks=[5, 0])
    ticker.schedule(7, 0.0)
    time.sleep(0.05)
    assert ticker.latest() == -1
    mpi.Ticker(control, 1, rank=0, ranks=[5, 0]).schedule(3, 0.01)
    assert wait_for(lambda: ticker.latest() == 3)


@pytest.mark.parametrize(
    ("environment", "launched"),
    [
        ({}, False),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, True),
        ({"PMI_RANK": "0", "HOROVOD_CONTROLLER": "mpi"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "4", "HOROVOD_CONTROLLER": "gloo"}, False),
        ({"HOROVOD_CONTROLLER": "gloo"}, False),
    ],
)
def test_mpi_is_used_where_its_launcher_started_the_process_for_it(
    environment: dict[str, str], launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*mpi._LAUNCHED_BY_MPI, "HOROVOD_CONTROLLER"]:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert mpi.launched_by_mpi() is launched


def test_nothing_is_prepared_without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "_control", None)
    monkeypatch.setattr(mpi, "launched_by_mpi", lambda: False)
    mpi.prepare()
    assert mpi.control_plane() is None


@pytest.mark.parametrize(("ranks", "spins"), [("1", True), ("100000", False)])
def test_ranks_yield_while_they_wait_where_there_are_more_than_cores(
    ranks: str, spins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi, "_control", None)
    monkeypatch.setattr(mpi, "launched_by_mpi", lambda: True)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", ranks)
    monkeypatch.setenv("OMPI_MCA_mpi_yield_when_idle", "to be deleted")
    monkeypatch.delenv("OMPI_MCA_mpi_yield_when_idle")
    mpi.prepare()
    control = mpi.control_plane()
    assert control is not None
    assert ("OMPI_MCA_mpi_yield_when_idle" not in os.environ) is spins
    mpi.prepare()
    assert mpi.control_plane() is control


SEVERAL_HOSTS = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
ONE_HOST = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}


def test_over_several_hosts_sums_go_around_a_ring() -> None:
    assert mpi.settings(SEVERAL_HOSTS, 8) == mpi.RING
    assert mpi.settings(ONE_HOST, 8) == {}
    assert mpi.settings({}, 8) == {}


@pytest.mark.parametrize("name", list(mpi.RING))
def test_who_chooses_how_sums_are_made_is_left_alone(name: str) -> None:
    assert mpi.settings({**SEVERAL_HOSTS, name: "0"}, 8) == {}


def test_ranks_that_outnumber_the_processors_yield() -> None:
    assert mpi.settings(ONE_HOST, 2) == {"OMPI_MCA_mpi_yield_when_idle": "1"}
    assert mpi.settings({**ONE_HOST, "OMPI_MCA_mpi_yield_when_idle": "0"}, 2) == {}
