"""Runs of several ranks, and what they must equal: the formulas, in a single process.

A :class:`Recorder` writes down, on each rank, which samples went into which round, for any loader; :func:`replay`
computes the same rounds by :mod:`horovod_abs.torch.formulas`, which uses nothing of what exchanges gradients. Rounds
are counted by counting launches, and a rank's gradient of a round comes from one backward pass.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from horovod_abs.observe.schedule import RecordedRound
from horovod_abs.torch.formulas import Rules, compute
from tests.torch.scenario import Naps, Ranks, flat, small_model, wrap

Loss = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
"""Mean loss of a model over the samples with these indices."""


class Recorder:
    """Writes down what one rank's optimizer does.

    Args:
        model: Its model, as training begins.
        optimizer: The distributed optimizer.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any) -> None:
        self.model = model
        self.optimizer = optimizer
        self.launches = 0
        self.sessions: list[int] = []
        self.micro_batches: list[tuple[int, list[int]]] = []
        self.initial_model = copy.deepcopy(model)
        self.initial_state = copy.deepcopy({k: v for k, v in optimizer.state_dict().items() if k != "horovod_abs"})
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
        """The samples that the next ``step`` adds to the round."""
        self.micro_batches.append((self.launches, list(indices)))


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


def replay(
    rounds: Rounds,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    *,
    after_merge: Callable[[], object] | None = None,
    **rules: Any,
) -> torch.nn.Module:
    """Compute rounds by the formulas, each rank's samples of a round in one backward pass.

    Args:
        rounds: What to compute.
        model: The initial model, which is trained.
        optimizer: A plain optimizer of it.
        loss: Mean loss.
        after_merge: Called after each update.
        rules: See :class:`horovod_abs.torch.formulas.Rules`.
    """
    recorded = [
        RecordedRound([[own] if own else [] for own in shares], drained=number in rounds.sessions)
        for number, shares in enumerate(rounds.indices)
    ]
    compute(
        recorded,
        model,
        optimizer,
        lambda model, indices: loss(model, torch.tensor(indices)),
        Rules(**rules),
        after_merge=after_merge,
    )
    return model


# -- a whole run, and its replay -------------------------------------------------------------------------------------


class Regression:
    """A small regression task; samples are known by their index.

    Args:
        samples: How many there are.
        dtype: Of inputs and targets.
    """

    def __init__(self, samples: int = 90, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(samples, 6, generator=generator, dtype=torch.float64).to(dtype)
        self.y = torch.sin(self.x.sum(1, keepdim=True)).to(dtype)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> int:
        return index

    def loss(self, model: torch.nn.Module, indices: torch.Tensor) -> torch.Tensor:
        """Mean squared error."""
        return ((model(self.x[indices]) - self.y[indices]) ** 2).mean()

    def loader(self, ranks: Ranks, batch_size: int = 8, seed: int = 0) -> torch.utils.data.DataLoader[Any]:
        """Batches of indices, in another order on every rank; the last one is smaller."""
        generator = torch.Generator().manual_seed(1000 * seed + ranks.rank)
        return torch.utils.data.DataLoader(self, batch_size, shuffle=True, generator=generator)  # type: ignore[arg-type]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum and weight decay."""
    return torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-3)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Adam."""
    return torch.optim.Adam(model.parameters(), lr=0.01)


@dataclass
class Trial:
    """A run of several ranks, written down, to be compared with its replay.

    Attributes:
        ranks: This rank.
        make_optimizer: Makes the plain optimizer of a model.
        task: Loss and data.
        model: The model of this rank.
        options: Keywords of ``DistributedOptimizer``.
        optimizer: The distributed optimizer.
        recorder: What it did.
    """

    ranks: Ranks
    make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] = sgd
    task: Any = field(default_factory=Regression)
    model: torch.nn.Module = field(default_factory=small_model)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.optimizer = wrap(self.model, self.make_optimizer(self.model), **self.options)
        self.nap = Naps(self.ranks.rank)
        self.record()

    def record(self) -> None:
        """Write down from here on what happens; nothing has yet."""
        self.recorder = Recorder(self.model, self.optimizer)

    def train(self, loader: Iterable[torch.Tensor], **end: Any) -> None:
        """One epoch with naps."""
        self.recorder.opened()
        for indices in self.optimizer.epoch(loader, **end):
            self.optimizer.zero_grad()
            self.task.loss(self.model, indices).backward()
            self.nap()
            self.recorder.micro_batch(indices.tolist())
            self.optimizer.step(samples=len(indices))

    def rounds(self) -> Rounds:
        """The rounds of all ranks, which the optimizer's history must agree with. Every rank must call it."""
        rounds = gather_rounds(self.ranks, self.recorder)
        assert self.optimizer._rounds.driver.corrections == 0, "the ranks' parameters have drifted apart"
        assert [record.round for record in self.optimizer.history] == list(range(len(rounds.indices)))
        return rounds

    def replayed(self, rounds: Rounds, **how: Any) -> torch.nn.Module:
        """The same run in this process alone."""
        model = copy.deepcopy(self.recorder.initial_model)
        optimizer = self.make_optimizer(model)
        optimizer.load_state_dict(self.recorder.initial_state)
        how = {"delay": self.optimizer._rounds.driver.engine.delay, **how}
        return replay(rounds, model, optimizer, self.task.loss, **how)

    def check(self, tolerance: float = 1e-10, **how: Any) -> Rounds:
        """Assert that history and parameters are those of the replay. Every rank must call it."""
        rounds = self.rounds()
        for record in self.optimizer.history:
            assert record.samples == rounds.samples(record.round), f"round {record.round}"
        self.compare(rounds, tolerance, **how)
        return rounds

    def compare(self, rounds: Rounds, tolerance: float = 1e-10, **how: Any) -> None:
        """Assert that the parameters are those of the replay."""
        expected = flat(self.replayed(rounds, **how))
        difference = float((flat(self.model) - expected).abs().max())
        assert difference <= tolerance, f"parameters differ from the replay by {difference:g} (allowed: {tolerance:g})"
