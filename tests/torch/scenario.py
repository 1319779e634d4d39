"""What a scenario is: a function that every rank of one launch runs, each with a model and an optimizer of its own.

A scenario asserts on every rank; what it returns is kept for a look at the numbers. Scenarios that come one after the
other in a launch share nothing but Horovod.
"""

from __future__ import annotations

import hashlib
import importlib
import pickle
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, overload

import torch

import horovod_abs.torch as hvd

MODULES = (
    "tests.torch.scenarios_replay",
    "tests.torch.scenarios_gradients",
    "tests.torch.scenarios_epochs",
    "tests.torch.scenarios_state",
    "tests.torch.scenarios_errors",
    "tests.torch.scenarios_recording",
    "tests.torch.scenarios_updates",
)


GATHER_SECONDS = 45.0


@dataclass(frozen=True)
class Ranks:
    """This rank among the ranks of a launch."""

    rank: int
    size: int
    controller: str
    scenario: str = ""

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, on every rank. Every rank must call it, or those that do fail."""
        mine = pickle.dumps(value)
        sent = torch.tensor(list(len(mine).to_bytes(8, "big") + mine), dtype=torch.uint8)
        handle = hvd.allgather_async(sent, name=f"tests.gather.{self.scenario}")
        deadline = time.monotonic() + GATHER_SECONDS
        while not hvd.poll(handle):
            assert time.monotonic() < deadline, "some other rank has failed: it did not come to gather() in time"
            time.sleep(0.001)
        received, everyone = bytes(hvd.synchronize(handle).tolist()), []
        while received:
            end = 8 + int.from_bytes(received[:8], "big")
            everyone.append(pickle.loads(received[8:end]))
            received = received[end:]
        return everyone

    def assert_same(self, value: Any, what: str) -> None:
        """Every rank must have the same value; every rank must call it."""
        everyone = self.gather(value)
        assert all(other == everyone[0] for other in everyone), f"{what} by rank: {everyone}"


@dataclass(frozen=True)
class Scenario:
    """A function that all ranks run.

    Attributes:
        run: The function.
        gloo: Whether it runs over Gloo too; over MPI it always does.
    """

    run: Callable[[Ranks], Any]
    gloo: bool


_all: dict[str, Scenario] = {}


@overload
def scenario(function: Callable[[Ranks], Any]) -> Callable[[Ranks], Any]: ...
@overload
def scenario(*, gloo: bool) -> Callable[[Callable[[Ranks], Any]], Callable[[Ranks], Any]]: ...
def scenario(function: Callable[[Ranks], Any] | None = None, *, gloo: bool = False) -> Any:
    """Make a function a scenario, under its own name."""
    if function is None:
        return lambda given: _add(given, gloo)
    return _add(function, gloo)


def _add(function: Callable[[Ranks], Any], gloo: bool) -> Callable[[Ranks], Any]:
    assert function.__name__ not in _all, f"two scenarios are called {function.__name__}"
    _all[function.__name__] = Scenario(function, gloo)
    return function


def scenarios() -> dict[str, Scenario]:
    """All scenarios by name, in the order in which they run."""
    for module in MODULES:
        importlib.import_module(module)
    return dict(_all)


# -- what scenarios are made of --------------------------------------------------------------------------------------


def small_model(dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.nn.Module:
    """A network of 65 parameters with 6 inputs, the same for the same seed."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(dtype)


def wrap(model: torch.nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    """``DistributedOptimizer`` with names, and a patience that suits a busy machine."""
    options = {"exchange_timeout": 40.0, "named_parameters": model.named_parameters(), **options}
    return hvd.DistributedOptimizer(optimizer, **options)


def flat(model: torch.nn.Module) -> torch.Tensor:
    """All parameters of a model, as one float64 vector."""
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def digest(model: torch.nn.Module) -> str:
    """Tells apart models that differ in any bit."""
    return hashlib.blake2b(flat(model).numpy().tobytes(), digest_size=8).hexdigest()


class Naps:
    """Short sleeps of random length, in place of slow and uneven compute."""

    def __init__(self, seed: int, longest: float = 0.006) -> None:
        self._random = random.Random(seed)
        self._longest = longest

    def __call__(self) -> None:
        time.sleep(self._random.choice((0.0, 0.2, 1.0)) * self._longest)
