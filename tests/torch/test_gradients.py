"""Gradients on their way, without other ranks: weights, scaling, compression, selection, buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import horovod_abs.torch as hvd
from horovod_abs.core.ledger import Column, Entry, Flag, Floats, Ledger
from horovod_abs.core.scaling import Scaling
from horovod_abs.rounds import FIRST_EXPECTED_WEIGHT
from horovod_abs.torch.gradients import GradientPayload
from horovod_abs.torch.payloads import Options
from horovod_abs.torch.wire import LocalWire


class Wire(LocalWire):
    """Keeps what is sent; the other rank sends the same."""

    size = 2

    def __init__(self) -> None:
        self.names: list[str] = []
        self.sent: list[torch.Tensor] = []

    def sum_(self, tensors: list[torch.Tensor], name: str) -> int:
        self.names.append(name)
        self.sent = [tensor.clone() for tensor in tensors]
        for tensor in tensors[:-1]:
            tensor.mul_(2)
        columns = len(Column)
        ledger = tensors[-1]
        ledger[columns : 2 * columns] = ledger[:columns]
        ledger[2 * columns :] *= 2
        return 0


class Fixture:
    """A payload over two parameters, of a plain SGD with learning rate 1."""

    def __init__(self, *shapes: int, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(n, dtype=dtype)) for n in shapes or (3, 2)]
        self.optimizer = torch.optim.SGD(self.parameters, lr=1.0)
        self.wire = Wire()
        self.updates = 0
        self.ledger = Ledger(2)
        options = {"scaling": Scaling(), **options}
        self.payload = GradientPayload(
            self.optimizer, self.update, self.wire, "name", hvd.Gradients(), Options(**options)
        )

    def update(self) -> None:
        self.updates += 1
        self.optimizer.step()

    def accumulate(self, *values: float | None, samples: float = 1) -> None:
        for parameter, value in zip(self.parameters, values, strict=True):
            parameter.grad = None if value is None else torch.full_like(parameter, value)
        self.payload.accumulate(samples)

    def exchange(self, weight: float) -> Floats:
        """Launch and read; the merged rows."""
        row = np.zeros(len(Column))
        row[Column.WEIGHT] = weight
        self.payload.launch(row, self.ledger)
        assert self.payload.poll()
        return self.payload.read()

    def round(self, weight: float) -> tuple[Entry, bool]:
        """A whole round; the entry and whether it was applied."""
        entry = Entry(self.ledger.rounds, self.exchange(weight))
        applied = self.payload.apply(entry, 0.0)
        self.ledger.append(entry)
        return entry, applied


def test_the_mean_over_samples_is_applied() -> None:
    given = Fixture()
    given.accumulate(1.0, 2.0, samples=3)
    given.accumulate(5.0, 2.0, samples=1)
    entry, applied = given.round(4)
    assert applied
    assert entry.weight == 8
    assert given.updates == 1
    assert given.parameters[0].tolist() == [-2.0] * 3
    assert given.parameters[1].tolist() == [-2.0] * 2


def test_a_parameter_without_gradient_is_left_alone_and_has_none_at_the_update() -> None:
    given = Fixture()
    seen = []
    given.payload._update = lambda: seen.append([p.grad is None for p in given.parameters])
    given.accumulate(1.0, None)
    given.round(1)
    given.accumulate(None, 1.0)
    given.accumulate(1.0, None)
    given.round(2)
    assert seen == [[False, True], [False, False]]
    assert all(p.grad is None for p in given.parameters)


def test_an_empty_round_updates_nothing() -> None:
    given = Fixture()
    assert given.round(0)[1]
    assert given.updates == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_sent(bad: float) -> None:
    given = Fixture()
    given.accumulate(1.0, 1.0)
    given.accumulate(bad, 1.0)
    entry, _ = given.round(2)
    assert all(torch.isfinite(tensor).all() for tensor in given.wire.sent)
    assert entry.weight == 0
    assert entry.ranks_with(Flag.NONFINITE) == (0, 1)
    given.accumulate(1.0, 1.0)
    entry, applied = given.round(1)
    assert applied
    assert entry.weight == 2
    assert not entry.ranks_with(Flag.NONFINITE)
    assert given.parameters[0].tolist() == [-1.0] * 3


def test_a_sum_that_is_not_finite_is_not_applied() -> None:
    given = Fixture()
    given.accumulate(3e38, 1.0)
    assert given.round(1)[1] is False
    assert given.updates == 0
    given.accumulate(1.0, 1.0)
    assert given.round(1)[1] is True
    assert given.parameters[0].tolist() == [-1.0] * 3


def test_compressed_sums_are_scaled_by_the_power_of_two_nearest_the_last_weight() -> None:
    given = Fixture(compression=hvd.Compression.fp16)
    for weight, expected in ((5, FIRST_EXPECTED_WEIGHT), (100, 8.0), (1, 256.0)):
        given.accumulate(3.0, 3.0, samples=weight)
        given.round(weight)
        assert given.wire.sent[0].dtype == torch.float16
        assert given.wire.sent[0].tolist() == pytest.approx([3.0 * weight / expected] * 5, rel=1e-3)
        assert given.wire.sent[1].dtype == torch.float64
    assert given.parameters[0].tolist() == pytest.approx([-9.0] * 3, rel=1e-3)


def test_predividing_is_undone() -> None:
    given = Fixture(gradient_predivide_factor=8.0)
    given.accumulate(4.0, 4.0, samples=2)
    given.round(2)
    assert given.wire.sent[0].tolist() == [1.0] * 5
    assert given.parameters[0].tolist() == [-4.0] * 3


def test_half_precision_parameters_get_gradients_of_their_own_dtype() -> None:
    given = Fixture(dtype=torch.float16)
    dtypes = []
    given.payload._update = lambda: dtypes.extend(p.grad.dtype for p in given.parameters if p.grad is not None)
    given.accumulate(40_000.0, 1.0)
    given.accumulate(40_000.0, 1.0)
    given.round(2)
    assert given.wire.sent[0].dtype == torch.float32
    assert given.wire.sent[0][0] == 80_000
    assert dtypes == [torch.float16] * 2


def test_a_round_is_one_group_of_few_tensors_under_a_name_that_stays() -> None:
    given = Fixture(*range(1, 40))
    for _ in range(3):
        given.accumulate(*[1.0] * 39)
        given.round(1)
    assert given.wire.names == ["name"] * 3
    assert len(given.wire.sent) == 2


def test_two_buffers_take_turns() -> None:
    given = Fixture()
    storages = set()
    for weight in (1, 2, 0, 1, 0, 0, 3):
        if weight:
            given.accumulate(1.0, 1.0, samples=weight)
        given.exchange(weight)
        row = np.zeros(len(Column))
        given.payload.launch(row, given.ledger)  # the next one, before this one is applied
        for buffer in (given.payload._result, given.payload._in_flight):
            assert buffer is not None
            storages.add(buffer.tensors[0].untyped_storage().data_ptr())
        given.payload.apply(Entry(0, np.zeros((2, len(Column)))), 0.0)
        given.payload.read()
        given.payload.apply(Entry(0, np.zeros((2, len(Column)))), 0.0)
    assert len(storages) == 2


def test_a_refused_gradient_changes_nothing() -> None:
    given = Fixture()
    given.parameters[0].grad = torch.ones(3)
    given.parameters[1].grad = torch.ones(2).to_sparse()
    with pytest.raises(ValueError, match="sparse_as_dense=True"):
        given.payload.accumulate(1)
    assert given.parameters[0].grad is not None
    given.accumulate(2.0, None)
    given.round(1)
    assert given.parameters[0].tolist() == [-2.0] * 3
    assert given.parameters[1].tolist() == [0.0] * 2
