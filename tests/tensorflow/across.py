"""A run of TensorFlow's, computed again by the formulas of PyTorch's binding, in this process alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from horovod_abs.core.scaling import Scaling
from horovod_abs.observe.schedule import MicroBatch, RecordedRound
from horovod_abs.torch.formulas import Rules, UpdateRules, compute

_x = np.random.default_rng(7).standard_normal((90, 6))
INPUTS, TARGETS = torch.from_numpy(_x), torch.from_numpy(np.sin(_x.sum(1, keepdims=True)))


def largest_difference(record: dict[str, Any]) -> float:
    """Between the parameters that TensorFlow's ranks ended with and those of the formulas.

    Args:
        record: What :func:`tests.tensorflow.scenarios_updates.record_of` has returned.
    """
    rounds = [
        RecordedRound(micro_batches, drained=number in record["sessions"])
        for number, micro_batches in enumerate(record["micro_batches"])
    ]
    rules = dict(record["rules"])
    kind, scaling = rules.pop("kind", None), Scaling(rules.pop("lr_scaling", "none"), 1.0, rules.pop("warmup_steps", 0))
    model = _model(record["initial"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.875 if scaling.rule == "none" else 0.0)
    if kind == "Gradients":
        compute(rounds, model, optimizer, _loss, Rules(**rules))
    else:
        if "outer" in rules:
            rate = rules["outer"]
            rules["outer"] = lambda tensors: torch.optim.SGD(tensors, lr=rate, momentum=0.875, nesterov=True)
        compute(rounds, model, optimizer, _loss, UpdateRules(scaling=scaling, **rules))
    expected = [_as_keras(p) for p in model.parameters()]
    final = [np.array(weight) for weight in record["final"]]
    moved = max(np.abs(e - np.array(i)).max() for e, i in zip(expected, record["initial"], strict=True))
    assert moved > 1e-2, "nothing was trained"
    return float(max(np.abs(e - f).max() for e, f in zip(expected, final, strict=True)))


def _model(weights: list[Any]) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(torch.from_numpy(np.array(weight).T))
    return model


def _as_keras(parameter: torch.Tensor) -> Any:
    return parameter.detach().numpy().T


def _loss(model: torch.nn.Module, indices: MicroBatch) -> torch.Tensor:
    return ((model(INPUTS[indices]) - TARGETS[indices]) ** 2).mean()
