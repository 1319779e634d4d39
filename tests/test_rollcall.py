"""Who is missing: over a control plane that is played, and over the store that Gloo's launcher really runs."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from horovod_abs import mpi, rollcall
from horovod_abs.rollcall import RollCall


class PlayedControlPlane:
    """Knows what it is told to know; keeps what is announced."""

    def __init__(self) -> None:
        self.announced: list[tuple[int, int, bool, list[int]]] = []
        self.knowledge: dict[int, tuple[int, bool]] = {}

    def announce(self, optimizer: int, launches: int, busy: bool, to: list[int]) -> None:
        self.announced.append((optimizer, launches, busy, to))

    def known(self, optimizer: int) -> dict[int, tuple[int, bool]]:
        return self.knowledge if optimizer == 9 else {}


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> PlayedControlPlane:
    """MPI's control plane, played; waiting for announcements is short."""
    control = PlayedControlPlane()
    monkeypatch.setattr(mpi, "control_plane", lambda: control)
    monkeypatch.setattr(rollcall, "GRACE_SECONDS", 0.2)
    return control


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The store that ``horovodrun --gloo`` runs; no MPI."""
    from horovod.runner.http.http_server import RendezvousServer

    server = RendezvousServer()
    port = server.start()
    monkeypatch.setattr(mpi, "control_plane", lambda: None)
    monkeypatch.setattr(rollcall, "GRACE_SECONDS", 0.2)
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(port))
    yield
    server.stop()


def test_announcements_go_to_the_other_ranks_of_the_set(control: PlayedControlPlane) -> None:
    RollCall(9, 1, [2, 4, 6]).announce(12, busy=True)
    assert control.announced == [(9, 12, True, [2, 6])]


def test_missing_and_busy_ranks_are_numbered_within_the_set(control: PlayedControlPlane) -> None:
    control.knowledge = {2: (5, False), 6: (4, True)}
    roll = RollCall(9, 1, [2, 4, 6, 8])
    assert roll.behind(5) == ([2, 3], [2])
    assert roll.behind(4) == ([3], [])
    assert roll.behind(6) == ([0, 2, 3], [2])


def test_who_has_announced_nothing_is_missing(control: PlayedControlPlane) -> None:
    assert RollCall(9, 0, [0, 1, 2]).behind(1) == ([1, 2], [])
    control.knowledge = {1: (1, False), 2: (1, False)}
    assert RollCall(8, 0, [0, 1, 2]).behind(1) == ([1, 2], []), "another optimizer"


def test_late_announcements_are_waited_for_but_not_busy_ranks(
    control: PlayedControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollcall, "GRACE_SECONDS", 60.0)
    control.knowledge = {1: (2, False), 2: (1, True)}
    began = time.monotonic()
    assert RollCall(9, 0, [0, 1, 2]).behind(2) == ([2], [2])
    assert time.monotonic() - began < 30

    answers = iter([{}, {}, {1: (2, False), 2: (2, False)}])
    monkeypatch.setattr(control, "known", lambda optimizer: next(answers))
    assert RollCall(9, 0, [0, 1, 2]).behind(2) == ([], [])


@pytest.mark.usefixtures("store")
def test_the_store_of_gloos_launcher_keeps_announcements() -> None:
    ranks = [RollCall(9, rank, [3, 5, 7]) for rank in range(3)]
    assert ranks[0].behind(1) == ([1, 2], [])
    ranks[1].announce(1)
    ranks[2].announce(0, busy=True)
    assert ranks[0].behind(1) == ([2], [2])
    ranks[2].announce(1)
    assert ranks[0].behind(1) == ([], [])
    assert ranks[1].behind(1) == ([0], [])
    assert RollCall(10, 0, [3, 5, 7]).behind(1) == ([1, 2], []), "another optimizer"


def test_a_store_that_is_gone_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setattr(mpi, "control_plane", lambda: None)
        monkeypatch.setattr(rollcall, "GRACE_SECONDS", 0.0)
        monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
        monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", str(taken.getsockname()[1]))
        roll = RollCall(9, 0, [0, 1])
        roll.announce(1)
        assert roll.behind(1) == ([1], [])


def test_without_a_launcher_nobody_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "control_plane", lambda: None)
    monkeypatch.setattr(rollcall, "GRACE_SECONDS", 0.0)
    monkeypatch.delenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", raising=False)
    roll = RollCall(9, 0, [0, 1])
    roll.announce(1)
    assert roll.behind(1) == ([1], [])
