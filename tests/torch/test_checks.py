"""What is refused at construction, by a message that names the alternative."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import horovod_abs.torch as hvd
from horovod_abs.checks import check_same_on_all_ranks
from horovod_abs.torch import checks
from horovod_abs.torch.wire import LocalWire

pytestmark = pytest.mark.usefixtures("single_rank")


def distribute(**options: Any) -> Any:
    """A distributed optimizer of a small model."""
    model = options.pop("model", None) or torch.nn.Linear(3, 1)
    optimizer = options.pop("optimizer", torch.optim.SGD)(model.parameters(), lr=0.1)
    return hvd.DistributedOptimizer(optimizer, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backward_passes_per_step": 2}, "backward_passes_per_step must be 1.*clock=CountClock(n)"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be 1"),
        ({"op": hvd.Sum}, "op must be hvd.Average.*multiply the learning rate"),
        ({"op": hvd.Adasum}, "op must be hvd.Average"),
        ({"op": hvd.Sum, "exchange": hvd.Gradients(delay=0)}, "op must be hvd.Average"),
        ({"num_groups": 2}, "groups= has nothing to group.*Remove it"),
        ({"groups": 2}, "groups= has nothing to group"),
        ({"groups": []}, "groups= has nothing to group"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS needs a closure"),
        ({"loss_reduction": "none"}, "loss_reduction must be 'mean' or 'sum', not 'none'"),
        ({"clip_grad_norm": 0.0}, "clip_grad_norm must be positive, got 0.0"),
        ({"clip_grad_norm": float("nan")}, "clip_grad_norm must be positive"),
        ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor must be positive"),
        ({"gradient_predivide_factor": float("inf")}, "gradient_predivide_factor must be positive"),
        ({"lr_scaling": "cubic"}, "lr_scaling must be 'none', 'linear' or 'sqrt', not 'cubic'"),
        ({"lr_scaling": "linear"}, "lr_scaling='linear' needs reference_batch_size="),
        ({"warmup_samples": -1}, "warmup_samples must not be negative"),
        ({"min_micro_batches": 0}, "1 <= min_micro_batches <= max_micro_batches, got 0 and 64"),
        ({"min_micro_batches": 3, "max_micro_batches": 2}, "got 3 and 2"),
        ({"clock": hvd.CountClock(65)}, "pass max_micro_batches=65 or more"),
        ({"exchange_timeout": 0}, "exchange_timeout must be positive"),
        ({"named_parameters": []}, "2 of the optimizer's parameters were not named (of shape (1, 3), (1,))"),
        ({"named_parameters": [1, 2]}, "a sequence of tuples (name, parameter)"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    pattern = ".*".join(re.escape(part) for part in message.split(".*"))
    with pytest.raises(ValueError, match=pattern):
        distribute(**options)


@pytest.mark.parametrize("name", ["HOROVOD_AUTOTUNE", "HOROVOD_ELASTIC"])
def test_settings_of_the_environment_that_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match=rf"{name} is set: .* Unset it"):
        distribute()
    monkeypatch.setenv(name, "0")
    distribute()


def test_wrapping_twice_is_refused() -> None:
    optimizer = distribute()
    with pytest.raises(ValueError, match="already distributed: wrap the plain torch optimizer, once"):
        hvd.DistributedOptimizer(optimizer)


@pytest.mark.parametrize("layer", [torch.nn.SyncBatchNorm, hvd.SyncBatchNorm])
@pytest.mark.parametrize("affine", [True, False])
def test_a_model_with_sync_batch_norm_is_refused(layer: Any, affine: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), layer(3, affine=affine))
    with pytest.raises(ValueError, match=r"SyncBatchNorm layer.*Use BatchNorm, GroupNorm or LayerNorm"):
        distribute(model=model)
    del model
    distribute(model=torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)))


def test_another_models_sync_batch_norm_is_none_of_our_business() -> None:
    other = torch.nn.SyncBatchNorm(3)
    distribute()
    assert other.training


def test_a_name_that_occurs_twice_is_refused() -> None:
    model = torch.nn.Linear(3, 1)
    with pytest.raises(ValueError, match=r"must be unique\. Found duplicates: w"):
        distribute(model=model, named_parameters=[("w", model.weight), ("w", model.bias)])


def test_parameters_that_the_optimizer_has_not_may_be_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


def test_names_are_horovods_where_none_are_given() -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    names = checks.check_names(optimizer, None)
    assert [names[id(p)] for p in (model.weight, model.bias)] == ["allreduce.noname.0.0", "allreduce.noname.1.0"]


def test_a_model_that_is_all_frozen_is_refused() -> None:
    model = torch.nn.Linear(3, 1).requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        distribute(model=model)


def test_a_model_on_several_devices_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Linear(1, 1, device="meta"))
    with pytest.raises(ValueError, match="on several devices: put the model on the one device of this rank"):
        distribute(model=model)


def test_parameters_are_described_by_all_that_must_agree() -> None:
    model = torch.nn.Linear(3, 1, dtype=torch.float16)
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    described = checks.describe_parameters(optimizer, checks.check_names(optimizer, model.named_parameters()))
    assert described.splitlines() == ["weight (1, 3) torch.float16 trained", "bias (1,) torch.float16 frozen"]


def test_the_ranks_that_differ_are_named_with_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = LocalWire()

    def gather(values: list[int], name: str) -> list[list[int]]:
        return [[values[0], 1], values, [values[0], 1], values]

    monkeypatch.setattr(wire, "gather", gather)
    with pytest.raises(
        hvd.Mismatch, match="ranks 1, 3 made DistributedOptimizer with other clock than rank 0"
    ) as caught:
        check_same_on_all_ranks({"exchange": "Gradients()", "clock": "x" * 600}, wire, "name")
    assert f"(here: {'x' * 500} …)" in str(caught.value)
