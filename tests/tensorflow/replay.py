"""Runs of several ranks, and what they must equal: the formulas, in a single process, with a plain Keras optimizer.

A :class:`Recorder` writes down, on each rank, which samples went into which round; a :class:`Trial` computes the same
rounds by :mod:`horovod_abs.tensorflow.formulas`, which uses nothing of what exchanges gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from horovod_abs.observe.schedule import RecordedRound
from horovod_abs.tensorflow.formulas import Rules, compute
from tests.tensorflow.scenario import Naps, Ranks, flat, small_model, wrap

INDICES = tf.TensorSpec([None], tf.int64)


class Recorder:
    """Writes down what one rank's optimizer does.

    Args:
        model: Its model, as training begins.
        optimizer: The distributed optimizer.
    """

    def __init__(self, model: keras.Model, optimizer: Any) -> None:
        self.launches = 0
        self.sessions: list[int] = []
        self.micro_batches: list[tuple[int, list[int]]] = []
        self.initial_weights = model.get_weights()
        self.initial_state = [np.array(v) for v in optimizer.variables] if optimizer.built else []
        payload = optimizer._rounds.payload
        launch = payload.launch

        def counted(*arguments: Any) -> None:
            self.launches += 1
            launch(*arguments)

        payload.launch = counted

    def opened(self) -> None:
        """Nothing is pending now, and an epoch begins."""
        self.sessions.append(self.launches)

    def micro_batch(self, indices: Iterable[int]) -> None:
        """The samples that the next ``apply_gradients`` adds to the round."""
        self.micro_batches.append((self.launches, [int(index) for index in indices]))


@dataclass
class Rounds:
    """The rounds of all ranks.

    Attributes:
        indices: ``indices[k][i]``: the samples of rank i in round k.
        sessions: Rounds before which nothing was pending.
    """

    indices: list[list[list[int]]]
    sessions: list[int]

    def samples(self, round: int) -> tuple[int, ...]:
        """Samples in the round, by rank."""
        return tuple(len(own) for own in self.indices[round])

    def drop(self, rank: int, round: int) -> None:
        """The round of this rank was thrown away."""
        self.indices[round][rank] = []


def gather_rounds(ranks: Ranks, recorder: Recorder) -> Rounds:
    """Put the records of all ranks together; every rank must call it. All must have launched as often."""
    everyone = ranks.gather((recorder.launches, recorder.sessions, recorder.micro_batches))
    launches, sessions, _ = everyone[0]
    assert all(other[:2] == (launches, sessions) for other in everyone), f"launches, sessions: {everyone}"
    indices: list[list[list[int]]] = [[[] for _ in everyone] for _ in range(launches)]
    for rank, (_, _, micro_batches) in enumerate(everyone):
        for round, drawn in micro_batches:
            indices[round][rank].extend(drawn)
    return Rounds(indices, sessions)


# -- a whole run, and its replay -------------------------------------------------------------------------------------


class Regression:
    """A small regression task; samples are known by their index.

    Args:
        samples: How many there are.
        dtype: Of inputs and targets.
    """

    def __init__(self, samples: int = 90, dtype: str = "float64") -> None:
        self.x = np.random.default_rng(7).standard_normal((samples, 6)).astype(dtype)
        self.y = np.sin(self.x.sum(1, keepdims=True))

    def loss(self, model: keras.Model, indices: Any) -> Any:
        """Mean squared error of some samples."""
        return tf.reduce_mean((model(tf.gather(self.x, indices)) - tf.gather(self.y, indices)) ** 2)

    def batches(self, ranks: Ranks, size: int = 8, seed: int = 0) -> Iterator[np.ndarray]:
        """Batches of indices, in another order on every rank; the last one is smaller."""
        order = np.random.default_rng((seed, ranks.rank)).permutation(len(self.x))
        yield from np.split(order, range(size, len(order), size))


class Loader:
    """Batches that can be gone through again."""

    def __init__(self, task: Regression, ranks: Ranks, size: int = 8) -> None:
        self._make = lambda: task.batches(ranks, size)

    def __iter__(self) -> Iterator[np.ndarray]:
        return self._make()


def sgd() -> Any:
    """SGD with momentum and weight decay."""
    return keras.optimizers.SGD(0.03, momentum=0.9, weight_decay=1e-3)


def adam() -> Any:
    """Adam."""
    return keras.optimizers.Adam(0.01)


@dataclass
class Trial:
    """A run of several ranks, written down, to be compared with its replay.

    Attributes:
        ranks: This rank.
        make_optimizer: Makes the plain optimizer.
        task: Loss and data.
        model: The model of this rank.
        options: Keywords of ``DistributedOptimizer``.
        eagerly: Hand micro-batches over eagerly, and not in a graph.
    """

    ranks: Ranks
    make_optimizer: Callable[[], Any] = sgd
    task: Any = field(default_factory=Regression)
    model: keras.Model = field(default_factory=small_model)
    options: dict[str, Any] = field(default_factory=dict)
    eagerly: bool = False

    def __post_init__(self) -> None:
        self.optimizer = wrap(self.make_optimizer(), **self.options)
        self.nap = Naps(self.ranks.rank)
        self.recorder = Recorder(self.model, self.optimizer)
        self._compiled = tf.function(self.micro_batch, input_signature=[INDICES], autograph=False)

    def micro_batch(self, indices: Any) -> None:
        """Compute and hand over a micro-batch."""
        with tf.GradientTape() as tape:
            loss = self.task.loss(self.model, indices)
        variables = self.model.trainable_variables
        gradients = tape.gradient(loss, [v.value for v in variables])
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def step(self, indices: np.ndarray) -> None:
        """One micro-batch, and what follows."""
        self.nap()
        self.recorder.micro_batch(indices)
        if self.eagerly:
            self.micro_batch(indices)
        else:
            self._compiled(tf.constant(indices, tf.int64))
            self.optimizer.boundary()

    def train(self, batches: Iterable[np.ndarray] | None = None, **end: Any) -> None:
        """One epoch with naps."""
        self.recorder.opened()
        batches = Loader(self.task, self.ranks) if batches is None else batches
        for indices in self.optimizer.epoch(batches, **(end or {"samples_per_epoch": len(self.task.x)})):
            self.step(indices)

    def differs(self, rounds: Rounds, **how: Any) -> bool:
        """Whether a replay by other rules comes out otherwise; asked of the first rank alone."""
        return self.ranks.rank > 0 or bool(np.abs(self.replayed(rounds, **how) - flat(self.model)).max() > 1e-8)

    def replayed(self, rounds: Rounds, after: Callable[[], object] = lambda: None, **how: Any) -> np.ndarray:
        """The parameters of the same run in this process alone."""
        model = keras.models.clone_model(self.model)
        model.set_weights(self.recorder.initial_weights)
        optimizer = self.make_optimizer()
        optimizer.build(model.trainable_variables)
        for variable, value in zip(optimizer.variables, self.recorder.initial_state, strict=False):
            variable.assign(value)
        rules = Rules(**{"delay": self.optimizer._rounds.driver.engine.delay, **how})
        recorded = [
            RecordedRound([[own] if own else [] for own in shares], drained=number in rounds.sessions)
            for number, shares in enumerate(rounds.indices)
        ]
        compute(recorded, model, optimizer, np.array, self.task.loss, rules, after_merge=after)
        return flat(model)

    def check(self, tolerance: float = 1e-10, **how: Any) -> Rounds:
        """Assert that history and parameters are those of the replay, and the same on all ranks."""
        self.ranks.assert_same(flat(self.model).tobytes(), "parameters")
        rounds = gather_rounds(self.ranks, self.recorder)
        assert self.optimizer._rounds.driver.corrections == 0, "the ranks' parameters have drifted apart"
        for record in self.optimizer.history:
            assert record.samples == rounds.samples(record.round), f"round {record.round}"
        assert len(rounds.indices) > 3
        if self.ranks.rank > 0:  # they have the same parameters, and processors to leave alone
            return rounds
        expected = self.replayed(rounds, **how)
        difference = float(np.abs(flat(self.model) - expected).max())
        moved = float(np.abs(expected - np.concatenate([w.ravel() for w in self.recorder.initial_weights])).max())
        assert moved > 1e-3, "nothing was trained"
        assert difference <= tolerance, f"parameters differ from the replay by {difference:g} (allowed: {tolerance:g})"
        return rounds
