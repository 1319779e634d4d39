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

import keras
import numpy as np
import tensorflow as tf

import horovod_abs.tensorflow as hvd

MODULES = (
    "tests.tensorflow.scenarios_gradients",
    "tests.tensorflow.scenarios_fit",
    "tests.tensorflow.scenarios_updates",
    "tests.tensorflow.scenarios_recording",
    "tests.tensorflow.scenarios_replay",
    "tests.tensorflow.scenarios_refused",
)


@dataclass(frozen=True)
class Ranks:
    """This rank among the ranks of a launch."""

    rank: int
    size: int
    controller: str
    scenario: str = ""

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, on every rank. Every rank must call it, or the others hang until they are ended."""
        mine = np.frombuffer(pickle.dumps(value), dtype=np.uint8)
        sizes = hvd.allgather(tf.constant([len(mine)]), name=f"tests.sizes.{self.scenario}").numpy()
        everything = hvd.allgather(tf.constant(mine), name=f"tests.gather.{self.scenario}").numpy()
        return [pickle.loads(part.tobytes()) for part in np.split(everything, np.cumsum(sizes)[:-1])]

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


def small_model(dtype: str = "float64", seed: int = 0) -> keras.Model:
    """A network of 65 parameters with 6 inputs, the same for the same seed."""
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((6,)), keras.layers.Dense(8, "tanh", dtype=dtype), keras.layers.Dense(1, dtype=dtype)]
    return keras.Sequential(layers)


def wrap(optimizer: Any, **options: Any) -> Any:
    """``DistributedOptimizer`` with a patience that suits a busy machine."""
    return hvd.DistributedOptimizer(optimizer, **{"exchange_timeout": 40.0, **options})


def flat(model: keras.Model) -> np.ndarray:
    """All trained parameters of a model, as one float64 vector."""
    return np.concatenate([np.asarray(v).astype(np.float64).ravel() for v in model.trainable_variables])


def digest(model: keras.Model) -> str:
    """Tells apart models that differ in any bit."""
    return hashlib.blake2b(flat(model).tobytes(), digest_size=8).hexdigest()


class Naps:
    """Short sleeps of random length, in place of slow and uneven compute."""

    def __init__(self, seed: int, longest: float = 0.006) -> None:
        self._random = random.Random(seed)
        self._longest = longest

    def __call__(self) -> None:
        time.sleep(self._random.choice((0.0, 0.2, 1.0)) * self._longest)
