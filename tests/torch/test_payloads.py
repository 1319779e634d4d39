"""What every exchange has in common; see ``test_gradients`` and ``test_updates`` for what is exchanged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from horovod_abs.core.scaling import Scaling
from horovod_abs.torch.payloads import ExchangedSum, Options, learning_rates
from horovod_abs.torch.wire import LocalWire


def test_hyper_parameters_are_fingerprinted_whatever_they_are_kept_in() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=0.5)
    payload = ExchangedSum(optimizer, optimizer.step, LocalWire(), "name", Options(Scaling()))
    before = payload.options()
    assert 0 <= before < 2**48
    parameter.grad = torch.ones(3)
    optimizer.step()
    assert payload.options() == before, "parameters and state are none"
    group = optimizer.param_groups[0]
    seen = {before}
    for key, value in (("lr", torch.tensor(0.5)), ("lr", torch.tensor(0.25)), ("momentum", 0.9), ("new", "key")):
        group[key] = value
        assert payload.options() not in seen
        seen.add(payload.options())
    group.update(lr=1.0, momentum=0.5)
    del group["new"]
    assert payload.options() == before


def test_frozen_parameters_are_not_sent_and_may_not_thaw() -> None:
    trained, frozen = torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    optimizer = torch.optim.SGD([frozen, trained], lr=1.0)
    payload = ExchangedSum(optimizer, optimizer.step, LocalWire(), "name", Options(Scaling()))
    assert [p is trained for p in payload.parameters] == [True]
    payload.refuse_thawed()
    frozen.requires_grad_(True)
    frozen.grad = torch.ones(2)
    with pytest.raises(ValueError, match=r"was frozen .* add it with add_param_group after synchronize\(\)"):
        payload.refuse_thawed()


@pytest.mark.parametrize("rate", [0.5, torch.tensor(0.5)])
def test_learning_rates_are_put_back_even_after_an_error(rate: Any) -> None:
    groups: list[dict[str, Any]] = [{"lr": rate}, {"lr": 2.0}]
    with pytest.raises(KeyError), learning_rates(groups, 3.0):  # noqa: PT012
        assert [float(group["lr"]) for group in groups] == [1.5, 6.0]
        raise KeyError
    assert groups[0]["lr"] is rate
    assert float(groups[0]["lr"]) == 0.5
    assert groups[1]["lr"] == 2.0
