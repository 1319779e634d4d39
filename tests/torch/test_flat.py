"""Flat buffers and digests."""

from __future__ import annotations

import math

import pytest
import torch

from horovod_abs.torch.flat import FlatBuffer, digest_of


def parameters(*dtypes: torch.dtype) -> list[torch.Tensor]:
    """One of shape (2, 3) for each dtype, and a scalar at the end."""
    return [torch.zeros(2, 3, dtype=dtype) for dtype in dtypes] + [torch.zeros((), dtype=dtypes[0])]


def test_one_tensor_for_each_dtype_and_a_view_for_each_parameter() -> None:
    given = parameters(torch.float32, torch.float64, torch.float32)
    buffer = FlatBuffer(given)
    assert [(flat.dtype, flat.numel()) for flat in buffer.tensors] == [(torch.float32, 13), (torch.float64, 6)]
    assert [(view.shape, view.dtype) for view in buffer.views] == [(p.shape, p.dtype) for p in given]
    for number, view in enumerate(buffer.views, start=1):
        view += number
    assert [float(flat.sum()) for flat in buffer.tensors] == [6 * 1 + 6 * 3 + 4, 6 * 2]
    buffer.zero_()
    assert all(not view.any() for view in buffer.views)


def test_half_precision_is_kept_in_float32_beside_float32() -> None:
    buffer = FlatBuffer(parameters(torch.float16, torch.float32, torch.bfloat16))
    assert [flat.dtype for flat in buffer.tensors] == [torch.float32]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1, 2])
def test_one_bad_element_anywhere_is_seen(bad: float, where: int) -> None:
    buffer = FlatBuffer(parameters(torch.float32, torch.float64))
    assert buffer.all_finite()
    buffer.views[where].view(-1)[-1] = bad
    assert not buffer.all_finite()


def test_opposite_infinities_are_seen_and_sums_that_overflow_are_finite() -> None:
    buffer = FlatBuffer(parameters(torch.float32))
    buffer.views[0].view(-1)[:2] = torch.tensor([math.inf, -math.inf])
    assert not buffer.all_finite()
    buffer.tensors[0].fill_(3e38)
    assert not torch.isfinite(buffer.tensors[0].sum())
    assert buffer.all_finite()


@pytest.mark.parametrize("values", [[0.0], [-5.0, 1.0], [1e10, -1e10], [2.0, 3e18]])
def test_the_bound_is_not_exceeded_and_not_far_away(values: list[float]) -> None:
    buffer = FlatBuffer(parameters(torch.float32, torch.float64))
    for view, value in zip(buffer.views, values, strict=False):
        view.fill_(value)
    largest = max(float(flat.abs().max()) for flat in buffer.tensors)
    elements = sum(flat.numel() for flat in buffer.tensors)
    assert largest <= buffer.bound() * (1 + 1e-6)
    assert buffer.bound() <= largest * math.sqrt(elements) * (1 + 1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_the_bound_is_not_finite_if_an_element_is_not_or_might_not_be(bad: float) -> None:
    buffer = FlatBuffer(parameters(torch.float32))
    buffer.views[1].view(-1)[-1] = bad
    assert not math.isfinite(buffer.bound())


def test_the_norm_is_over_all_dtypes() -> None:
    buffer = FlatBuffer(parameters(torch.float32, torch.float64))
    buffer.views[0].view(-1)[0] = 3
    buffer.views[1].view(-1)[5] = 4
    assert buffer.norm() == 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_digest_shows_every_bit(dtype: torch.dtype) -> None:
    given = [torch.linspace(-1, 1, 30).to(dtype), torch.zeros(3, dtype=dtype)]
    digest = digest_of(given)
    assert 0 <= digest < 2**48
    assert digest_of([t.clone() for t in given]) == digest
    for index in (0, 29):
        changed = given[0].clone()
        changed[index] = torch.nextafter(changed[index].float(), torch.tensor(9.0)).to(dtype) * 1.01
        assert digest_of([changed, given[1]]) != digest
    negative_zero = given[1].clone()
    negative_zero[1] = -0.0
    assert digest_of([given[0], negative_zero]) != digest
    assert digest_of([given[0].view(5, 6), given[1]]) == digest
    assert digest_of(given[::-1]) != digest
