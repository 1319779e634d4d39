"""Runs of several ranks, and what they must equal: the formulas, in a single process, with a plain Keras optimizer.

A :class:`Recorder` writes down, on each rank, which samples went into which round; :func:`replay` computes the same
rounds as ``horovod_abs.torch.formulas`` says, and uses nothing of what exchanges gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.tensorflow.scenario import Naps, Ranks, flat, small_model, wrap

Gradients = list[Any]
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


# -- the formulas ------------------------------------------------------------------------------------------------------


@dataclass
class Rules:
    """How gradients become updates; the names are those of ``DistributedOptimizer`` and ``Gradients``."""

    delay: int = 1
    staleness: str | None = None
    taylor_lambda: float = 0.04
    clip_grad_norm: float | None = None
    factor: Callable[[float, float], float] = lambda batch, seen: 1.0


@dataclass
class _Gradient:
    samples: tuple[int, ...]
    mean: Gradients
    own: list[Gradients]
    taken_at: list[np.ndarray]


class Replay:
    """One loop over rounds, with a model and a plain optimizer."""

    def __init__(
        self, model: keras.Model, optimizer: Any, task: Any, rules: Rules, after: Callable[[], object]
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.task = task
        self.rules = rules
        self.after = after
        self.pending: list[_Gradient] = []
        self.seen = self.last_batch = 0

    def run(self, rounds: Rounds) -> None:
        for number, shares in enumerate(rounds.indices):
            drained = self.rules.delay == 0 or number in rounds.sessions
            self._apply_all_but(0 if drained else 1)
            self.pending.append(self._gradient(shares, self.pending[-1] if self.pending else None))
        self._apply_all_but(0)

    def _gradient(self, shares: list[list[int]], before: _Gradient | None) -> _Gradient:
        here = self.model.get_weights()
        sums = []
        for rank, indices in enumerate(shares):
            if self.rules.staleness == "lookahead" and before is not None and before.samples[rank]:
                self._predict(before, rank)
            sums.append(self._sum(indices))
            self.model.set_weights(here)
        samples = tuple(map(len, shares))
        own = [_scaled(total, 1 / max(count, 1)) for total, count in zip(sums, samples, strict=True)]
        mean = _scaled([sum(parts) for parts in zip(*sums, strict=True)], 1 / max(sum(samples), 1))
        return _Gradient(samples, mean, own, [np.array(v) for v in self.model.trainable_variables])

    def _sum(self, indices: list[int]) -> Gradients:
        variables = self.model.trainable_variables
        if not indices:
            return [np.zeros(v.shape) for v in variables]
        return [g.numpy() for g in self._gradients(tf.constant(indices, tf.int64))]

    @tf.function(input_signature=[INDICES], autograph=False)
    def _gradients(self, indices: tf.Tensor) -> Gradients:
        with tf.GradientTape() as tape:
            loss = self.task.loss(self.model, indices) * tf.cast(tf.size(indices), tf.float64)
        return tape.gradient(loss, [v.value for v in self.model.trainable_variables])

    def _predict(self, before: _Gradient, rank: int) -> None:
        kept = [np.array(v) for v in self.optimizer.variables]
        factor = self.rules.factor(self.last_batch or before.samples[rank], self.seen)
        self._step(self._clipped(before.own[rank]), factor)
        for variable, value in zip(self.optimizer.variables, kept, strict=True):
            variable.assign(value)

    def _apply_all_but(self, in_flight: int) -> None:
        while len(self.pending) > in_flight:
            gradient = self.pending.pop(0)
            batch, before = sum(gradient.samples), self.seen
            self.seen += batch
            if batch == 0:
                continue
            self.last_batch = batch
            mean = self._clipped(gradient.mean)
            if self.rules.staleness == "taylor":
                now = [np.array(v) for v in self.model.trainable_variables]
                moved = zip(mean, now, gradient.taken_at, strict=True)
                mean = [g + self.rules.taylor_lambda * g * g * (x - then) for g, x, then in moved]
            self._step(mean, self.rules.factor(batch, before))
            self.after()

    def _clipped(self, gradients: Gradients) -> Gradients:
        if self.rules.clip_grad_norm is None:
            return gradients
        norm = np.sqrt(sum(float((g**2).sum()) for g in gradients))
        return _scaled(gradients, min(1.0, self.rules.clip_grad_norm / (norm + 1e-6)))

    def _step(self, gradients: Gradients, factor: float) -> None:
        rate = float(self.optimizer.learning_rate)
        if factor != 1.0:
            self.optimizer.learning_rate = rate * factor
        self._apply([tf.constant(g) for g in gradients])
        if factor != 1.0:
            self.optimizer.learning_rate = rate

    @tf.function(autograph=False)
    def _apply(self, gradients: Gradients) -> None:
        self.optimizer.apply(gradients, self.model.trainable_variables)


def _scaled(gradients: Gradients, factor: float) -> Gradients:
    return [g * factor for g in gradients]


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
        Replay(model, optimizer, self.task, rules, after).run(rounds)
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
