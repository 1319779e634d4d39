"""Sums over ranks, on one; and what is said when Horovod fails."""

from __future__ import annotations

from typing import Any

import horovod.torch as horovod
import pytest
import torch

import horovod_abs.torch as hvd
from horovod_abs import shutdown
from horovod_abs.torch.wire import HorovodWire, LocalWire, Wire, open_wire

pytestmark = pytest.mark.usefixtures("single_rank")


@pytest.fixture(params=["horovod", "local"])
def wire(request: pytest.FixtureRequest) -> Wire:
    return HorovodWire(hvd.global_process_set) if request.param == "horovod" else LocalWire()


def test_one_rank_sums_to_what_it_sends(wire: Wire) -> None:
    tensors = [torch.arange(3.0), torch.tensor([1, 2], dtype=torch.float64)]
    handle = wire.sum_(tensors, "tests.wire.sum")
    while not wire.poll(handle):
        pass
    wire.finish(handle)
    assert [tensor.tolist() for tensor in tensors] == [[0.0, 1.0, 2.0], [1.0, 2.0]]


def test_one_rank_gathers_and_broadcasts_its_own(wire: Wire) -> None:
    assert wire.gather([1, 2**60], "tests.wire.gather") == [[1, 2**60]]
    tensor = torch.ones(2)
    wire.broadcast_([tensor], "tests.wire.broadcast")
    assert tensor.tolist() == [1.0, 1.0]


def test_a_process_outside_the_set_is_alone() -> None:
    class Elsewhere:
        def included(self) -> bool:
            return False

    assert isinstance(open_wire(Elsewhere()), LocalWire)
    assert isinstance(open_wire(hvd.global_process_set), HorovodWire)


@pytest.mark.parametrize("what", ["sum_", "finish", "gather", "broadcast_"])
def test_horovods_failures_name_the_rank_and_what_to_look_for(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise horovod.HorovodInternalError("Horovod has been\nshut down")

    wire = HorovodWire(hvd.global_process_set)
    monkeypatch.setattr(horovod, "poll", lambda handle: True)
    for name in ("grouped_allreduce_async_", "broadcast_async_", "synchronize"):
        monkeypatch.setattr(horovod, name, fail)
    action = {
        "sum_": lambda: wire.sum_([torch.ones(1)], "the name"),
        "finish": lambda: wire.finish(0),
        "gather": lambda: wire.gather([1], "tests.wire.failing"),
        "broadcast_": lambda: wire.broadcast_([torch.ones(1)], "the name"),
    }[what]
    message = (
        r"^rank 0: Horovod could not carry out .*\(Horovod has been shut down\)\. .*first error in the other ranks"
    )
    with pytest.raises(hvd.ExchangeFailed, match=message):
        action()


@pytest.mark.parametrize("what", ["gather", "broadcast_"])
def test_ranks_that_do_not_come_are_not_waited_for(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(shutdown, "expect_no_answer", lambda: told.append(True))
    monkeypatch.setattr(horovod, "poll", lambda handle: False)
    wire, name = HorovodWire(hvd.global_process_set, 0.05), f"tests.wire.lonely.{what}"
    come = {
        "gather": lambda: wire.gather([1], name),
        "broadcast_": lambda: wire.broadcast_([torch.ones(1)], name),
    }
    with pytest.raises(hvd.ExchangeTimeout, match=rf"rank 0: not every rank has come to '{name}' within 0.05 s"):
        come[what]()
    assert told == [True]
