"""What of PyTorch's is refused when the optimizer is made; the rest is in :mod:`horovod_abs.checks`."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.sync_batch_norm import SyncBatchNorm as HorovodSyncBatchNorm

from horovod_abs.checks import refuse_environment, refuse_keywords

NamedParameters = Iterable[tuple[str, torch.Tensor]]


def refuse_unsupported(optimizer: torch.optim.Optimizer, keywords: Mapping[str, Any]) -> None:
    """Raise :class:`ValueError` for what would not keep its meaning here, naming the alternative.

    Args:
        optimizer: The user's optimizer.
        keywords: ``backward_passes_per_step``, ``op``, ``num_groups`` and ``groups``, as in Horovod.
    """
    refuse_keywords(keywords, hvd.Average)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS needs a closure, which cannot be evaluated again after an exchange")
    if hasattr(optimizer, "_rounds"):
        raise ValueError("the optimizer is already distributed: wrap the plain torch optimizer, once")
    refuse_environment()
    parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
    refuse_sync_batch_norm(parameters)


def refuse_sync_batch_norm(parameters: set[int]) -> None:
    """Raise :class:`ValueError` if a living SyncBatchNorm owns one of the parameters (or none at all).

    Args:
        parameters: ``id`` of each parameter.
    """
    kinds = (torch.nn.SyncBatchNorm, HorovodSyncBatchNorm)
    for module in [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]:
        own = {id(p) for p in module.parameters()}
        if not own or own & parameters:
            raise ValueError(
                "the model has a SyncBatchNorm layer: it waits for all ranks in every forward pass, but here ranks do "
                "different numbers of them. Use BatchNorm, GroupNorm or LayerNorm"
            )


def check_names(optimizer: torch.optim.Optimizer, named_parameters: NamedParameters | None) -> dict[int, str]:
    """Names by ``id`` of the optimizer's parameters.

    Raises:
        ValueError: not pairs, a name that occurs twice, or a parameter without a name; as in Horovod.
    """
    if named_parameters is None:
        groups = enumerate(optimizer.param_groups)
        return {id(p): f"allreduce.noname.{i}.{j}" for i, group in groups for j, p in enumerate(group["params"])}
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    named = {id(p): name for name, p in pairs}
    missing = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in named]
    if missing:
        shapes = ", ".join(str(tuple(p.shape)) for p in missing)
        raise ValueError(
            f"named_parameters was specified, but {len(missing)} of the optimizer's parameters were not named "
            f"(of shape {shapes})"
        )
    return named


def describe_parameters(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> str:
    """Name, shape, dtype and whether it is trained, of each parameter in order."""
    return "\n".join(
        f"{names[id(p)]} {tuple(p.shape)} {p.dtype} {'trained' if p.requires_grad else 'frozen'}"
        for group in optimizer.param_groups
        for p in group["params"]
    )
