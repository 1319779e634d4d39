"""What is refused, and that all ranks were given the same; found when the optimizer is made, not by a hang."""

from __future__ import annotations

import gc
import hashlib
import os
from collections.abc import Iterable, Mapping
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.sync_batch_norm import SyncBatchNorm as HorovodSyncBatchNorm

from horovod_abs.errors import Mismatch, name_ranks
from horovod_abs.torch.wire import Wire

NamedParameters = Iterable[tuple[str, torch.Tensor]]


def refuse_unsupported(optimizer: torch.optim.Optimizer, keywords: Mapping[str, Any]) -> None:
    """Raise :class:`ValueError` for what would not keep its meaning here, naming the alternative.

    Args:
        optimizer: The user's optimizer.
        keywords: ``backward_passes_per_step``, ``op``, ``num_groups`` and ``groups``, as in Horovod.
    """
    if keywords["backward_passes_per_step"] != 1:
        raise ValueError(
            "backward_passes_per_step must be 1: step() is called after every backward pass, and a round accumulates "
            "by itself. For n passes in a round use clock=CountClock(n)"
        )
    if keywords["op"] != hvd.Average:
        raise ValueError(
            "op must be hvd.Average: gradients are averaged over samples, so op=Sum, Adasum and the like would change "
            "their meaning. For a sum multiply the learning rate"
        )
    if keywords["num_groups"] or keywords["groups"] is not None:
        raise ValueError("groups= has nothing to group here: all gradients already travel as one group. Remove it")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS needs a closure, which cannot be evaluated again after an exchange")
    if hasattr(optimizer, "_rounds"):
        raise ValueError("the optimizer is already distributed: wrap the plain torch optimizer, once")
    for name, remedy in (
        ("HOROVOD_AUTOTUNE", "it changes how sums are fused, so ranks and runs would differ in the last bits"),
        ("HOROVOD_ELASTIC", "elastic training is not supported yet; start the run without it"),
    ):
        if os.environ.get(name, "0") not in ("", "0"):
            raise ValueError(f"{name} is set: {remedy}. Unset it")
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


def check_same_on_all_ranks(given: Mapping[str, str], wire: Wire, name: str, timeout: float) -> None:
    """Compare what the ranks were given; every rank calls it.

    Args:
        given: What is compared, in words, e.g. ``{"clock": "SyncClock()"}``; the same keys on every rank.
        wire: Between the ranks that compare.
        name: Name of the exchange.
        timeout: Seconds to wait for the other ranks.

    Raises:
        Mismatch: not all are the same; names the ranks and what differs.
        ExchangeTimeout: not every rank came.
    """
    digests = [int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big") for text in given.values()]
    everyone = wire.gather(digests, f"{name}.check", timeout)
    for column, (what, text) in enumerate(given.items()):
        others = [rank for rank, row in enumerate(everyone) if row[column] != everyone[0][column]]
        if others:
            raise Mismatch(
                wire.rank,
                f"{name_ranks(others)} made DistributedOptimizer with other {what} than rank 0 "
                f"(here: {text if len(text) < 500 else text[:500] + ' …'})",
                "Give every rank the same model, options and clock",
            )
