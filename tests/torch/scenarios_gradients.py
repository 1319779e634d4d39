"""Gradients of every kind: absent, frozen, half-precision, compressed, sparse, scaled, not finite."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import horovod_abs.torch as hvd
from horovod_abs.torch.flat import FlatBuffer
from tests.torch.replay import Regression, Trial, adam, gather_rounds, sgd
from tests.torch.scenario import Ranks, digest, flat, scenario, small_model, wrap

# -- parameters ------------------------------------------------------------------------------------------------------


@scenario
def several_parameter_groups(ranks: Ranks) -> None:
    """Each group keeps its own hyper-parameters."""

    def make(model: Any) -> torch.optim.Optimizer:
        groups = [
            {"params": model[0].parameters(), "lr": 0.01, "weight_decay": 0.1},
            {"params": [model[2].weight], "momentum": 0.5, "nesterov": True},
            {"params": [model[2].bias], "lr": 0.2},
        ]
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)

    trial = Trial(ranks, make, options={"lr_scaling": "linear", "reference_batch_size": 60})
    trial.train(trial.task.loader(ranks))
    trial.check(factor=lambda batch, seen: batch / 60)
    assert [group["lr"] for group in trial.optimizer.param_groups] == [0.01, 0.05, 0.2]


class Branches(torch.nn.Module):
    """Parameters that only some samples use: ``odd`` those of odd index, ``never`` none."""

    def __init__(self) -> None:
        super().__init__()
        self.base = small_model()
        self.odd = torch.nn.Linear(6, 1, dtype=torch.float64)
        self.never = torch.nn.Linear(6, 1, dtype=torch.float64)

    def forward(self, x: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
        """Both branches; ``odd`` is left out where no sample uses it."""
        out = self.base(x)
        return torch.where(odd[:, None], out + self.odd(x), out) if odd.any() else out


class BranchesTask(Regression):
    """Regression with :class:`Branches`."""

    def loss(self, model: torch.nn.Module, indices: torch.Tensor) -> torch.Tensor:
        """Mean squared error."""
        return ((model(self.x[indices], indices % 2 == 1) - self.y[indices]) ** 2).mean()


@scenario(gloo=True)
def parameters_without_gradient(ranks: Ranks) -> None:
    """A gradient that some ranks lack counts as theirs of zero; one that all lack stays None, untouched by decay."""
    task = BranchesTask()
    torch.manual_seed(0)
    trial = Trial(ranks, sgd, task, Branches())
    before = flat(trial.model.never)  # type: ignore[arg-type]
    evens, odds = list(range(0, 90, 2)), list(range(1, 90, 2))
    for own in (evens, odds if ranks.rank == 1 else evens, evens):
        loader = torch.utils.data.DataLoader(torch.utils.data.Subset(task, own), 8)  # type: ignore[type-var]
        trial.train(loader, samples_per_epoch=90)
    rounds = trial.check()
    kinds = {
        tuple(bool(own) and own[0] % 2 == 1 for own in shares)
        for shares in rounds.indices
        if all(shares)  # rounds in which every rank took part
    }
    assert {sum(kind) for kind in kinds} == {0, 1}, f"rounds with and without odd samples are needed, got {kinds}"
    assert torch.equal(flat(trial.model.never), before)  # type: ignore[arg-type]
    assert all(p.grad is None for p in trial.model.parameters())


@scenario
def frozen_parameters(ranks: Ranks) -> None:
    """Frozen parameters are left alone; unfreezing one later is an error that says what to do."""
    model = small_model()
    for parameter in model[0].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    trial = Trial(ranks, model=model)
    before = flat(model[0])  # type: ignore[index]
    trial.train(trial.task.loader(ranks))
    trial.check()
    assert torch.equal(flat(model[0]), before)  # type: ignore[index]
    assert not torch.equal(flat(model[2]), flat(small_model()[2]))  # type: ignore[index]
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    trial.task.loss(model, torch.arange(4)).backward()
    with pytest.raises(ValueError, match=r"was frozen when DistributedOptimizer was made.*add_param_group"):
        trial.optimizer.step(samples=4)


@scenario
def adding_a_parameter_group(ranks: Ranks) -> None:
    """Parameters can be added between epochs, by all ranks, and are trained from then on."""
    model = small_model()
    optimizer = wrap(model, torch.optim.SGD(model[0].parameters(), lr=0.1), clock=hvd.CountClock(1))  # type: ignore[index]
    task = Regression()
    task.loss(model, torch.arange(4)).backward()
    optimizer.step(samples=4)
    with pytest.raises(RuntimeError, match=r"add_param_group\(\) while rounds are pending: call synchronize\(\)"):
        optimizer.add_param_group({"params": list(model[2].parameters())})  # type: ignore[index]
    optimizer.synchronize()
    before = flat(model[2])  # type: ignore[index]
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.05})  # type: ignore[index]
    model.zero_grad()
    for _ in range(3):
        task.loss(model, torch.arange(ranks.rank, ranks.rank + 4)).backward()
        optimizer.step(samples=4)
    optimizer.synchronize()
    assert not torch.equal(flat(model[2]), before)  # type: ignore[index]
    ranks.assert_same(digest(model), "parameters")


# -- half precision --------------------------------------------------------------------------------------------------


class Weights(torch.nn.Module):
    """A model whose loss has a gradient that is known: ``loss(value)`` has ``value`` for each parameter."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(5, dtype=dtype)) for dtype in dtypes)

    def loss(self, value: float) -> torch.Tensor:
        """Scalar loss whose gradient is ``value`` everywhere."""
        return sum(((part * value).sum().double() for part in self.parts), torch.zeros((), dtype=torch.float64))

    def set_gradient(self, value: float) -> None:
        """As if ``loss(value).backward()`` had been called, whatever the precision."""
        for part in self.parts:
            part.grad = torch.full_like(part, value)


def _one_round(ranks: Ranks, model: Weights, values: list[float], samples: float = 1, **options: Any) -> Any:
    """One merge with learning rate 1 of gradients ``values``, one by one, on each rank."""
    optimizer = wrap(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        clock=hvd.CountClock(len(values)),
        max_micro_batches=max(64, len(values)),
        **options,
    )
    for value in values:
        model.set_gradient(value)
        optimizer.step(samples=samples)
    optimizer.synchronize()
    return optimizer


@scenario(gloo=True)
def half_precision_sums_are_kept_in_float32(ranks: Ranks) -> None:
    """300 gradients of 1 have the mean 1, although adding them up in bfloat16 stops at 256."""
    model = Weights(torch.float16, torch.bfloat16, torch.float32, torch.float64)
    _one_round(ranks, model, [1.0] * 300)
    for part in model.parts:
        assert torch.equal(part.detach().double(), torch.full((5,), -1.0).double()), part


@scenario
def mixed_precision_models(ranks: Ranks) -> None:
    """Parameters of several precisions in one model train together, and end alike on all ranks."""
    torch.manual_seed(0)

    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Linear(6, 4)
            self.gain = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
            self.shift = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
            self.head = torch.nn.Linear(4, 1, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.body(x)) * self.gain + self.shift
            return self.head(hidden.double())

    task = Regression(dtype=torch.float32)
    trial = Trial(ranks, lambda model: torch.optim.SGD(model.parameters(), lr=0.05), task, Mixed())
    trial.train(task.loader(ranks))
    trial.check(0.02)
    assert [p.dtype for p in trial.model.parameters()] == [p.dtype for p in Mixed().parameters()]
    ranks.assert_same(digest(trial.model), "parameters")


@scenario(gloo=True)
def fp16_compression(ranks: Ranks) -> None:
    """Compressed gradients travel as float16: close to the replay, and the same on all ranks; counts stay exact."""
    task = Regression(dtype=torch.float32)
    trial = Trial(ranks, sgd, task, small_model(torch.float32), {"compression": hvd.Compression.fp16})
    trial.train(task.loader(ranks))
    rounds = trial.check(2e-3)
    exact = flat(trial.replayed(rounds))
    assert (flat(trial.model) - exact).abs().max() > 1e-7, "nothing was compressed"
    ranks.assert_same(digest(trial.model), "parameters")


@scenario(gloo=True)
def fp16_compression_of_large_sums(ranks: Ranks) -> None:
    """Sums far above float16's 65,504 arrive, in the first round (whose size is a guess) and in later ones."""
    model = Weights(torch.float32)
    optimizer = wrap(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        compression=hvd.Compression.fp16,
        clock=hvd.CountClock(4),
        exchange=hvd.Gradients(delay=0),
    )
    for merges in range(1, 4):
        for _ in range(4):
            model.set_gradient(300.0)
            optimizer.step(samples=250.0)
        torch.testing.assert_close(model.parts[0].detach(), torch.full((5,), -300.0 * merges), rtol=1e-3, atol=0)
    optimizer.synchronize()
    assert optimizer._rounds.driver.overflows == 0


@scenario
def counts_beyond_float16(ranks: Ranks) -> None:
    """A count of 3,001 samples, which float16 cannot hold, is exact under compression."""
    optimizer = _one_round(ranks, Weights(torch.float32), [1.0], samples=3001, compression=hvd.Compression.fp16)
    assert optimizer.samples_seen == 3001 * ranks.size


@scenario
def sparse_gradients(ranks: Ranks) -> None:
    """Refused with the remedy, which works."""
    for as_dense in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Embedding(10, 3, sparse=True, dtype=torch.float64)
        optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=1.0), sparse_as_dense=as_dense)
        before = model.weight.detach().clone()
        model(torch.tensor([ranks.rank, ranks.rank, 9])).sum().backward()
        if not as_dense:
            with pytest.raises(ValueError, match="sparse_as_dense=True"):
                optimizer.step(samples=3)
            optimizer.zero_grad()
            optimizer.synchronize()
            continue
        optimizer.step(samples=3)
        optimizer.synchronize()
        mean = torch.zeros_like(before)
        mean[: ranks.size] = 2 * 3
        mean[9] = ranks.size * 3
        torch.testing.assert_close(model.weight.detach(), before - mean / (3 * ranks.size))


# -- not finite ------------------------------------------------------------------------------------------------------


@contextmanager
def _captured_log() -> Iterator[list[str]]:
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Keep()
    logger = logging.getLogger("horovod_abs")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


@scenario(gloo=True)
def nonfinite_gradients_of_one_rank(ranks: Ranks) -> None:
    """A round of a rank with a NaN or an infinity weighs nothing; the others' count; it is reported and counted."""
    trial = Trial(ranks)
    optimizer = trial.optimizer
    poisoned: list[int] = []
    with _captured_log() as messages:
        trial.recorder.opened()
        for number, indices in enumerate(optimizer.epoch(trial.task.loader(ranks), samples_per_epoch=200)):
            loss = trial.task.loss(trial.model, indices)
            if ranks.rank == 1 and number in (1, 4):
                loss = loss * (float("nan") if number == 1 else float("inf"))
                poisoned.append(trial.recorder.launches)
            loss.backward()
            trial.nap()
            trial.recorder.micro_batch(indices.tolist())
            optimizer.step(samples=len(indices))
    rounds = trial.rounds()
    bad = set(ranks.gather(poisoned)[1])
    drawn = sum(sum(rounds.samples(k)) for k in range(len(rounds.indices)))
    assert bad
    for round in bad:
        assert rounds.indices[round][1]
        rounds.drop(1, round)
    for record in optimizer.history:
        assert record.samples == rounds.samples(record.round)
    trial.compare(rounds)
    assert optimizer.dropped_rounds == tuple(len(bad) if rank == 1 else 0 for rank in range(ranks.size))
    assert len(messages) == (len(bad) if ranks.rank == 1 else 0), messages
    assert all("rank 1" in message and "not finite" in message for message in messages)
    assert optimizer.samples_seen < drawn == optimizer._rounds.driver.engine.ledger.drawn.sum()


@scenario
def nonfinite_gradients_of_all_ranks(ranks: Ranks) -> None:
    """A round that is bad on every rank merges nothing, and training goes on."""
    model = Weights(torch.float32)
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=1.0), exchange=hvd.Gradients(delay=0))
    merges: list[int] = []
    optimizer.on_merge(lambda: merges.append(optimizer.last_round.round))
    for value in (1.0, float("nan"), 2.0):
        model.set_gradient(value)
        optimizer.step(samples=1)
    optimizer.synchronize()
    assert merges == [0, 2]
    assert optimizer.dropped_rounds == (1,) * ranks.size
    assert torch.equal(model.parts[0].detach(), torch.full((5,), -3.0))


@scenario(gloo=True)
def nonfinite_sum(ranks: Ranks) -> None:
    """Gradients that are finite on each rank and overflow together are dropped, reported, and not applied."""
    model = Weights(torch.float32)
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=1.0), exchange=hvd.Gradients(delay=0))
    merges: list[int] = []
    optimizer.on_merge(lambda: merges.append(optimizer.last_round.round))
    with _captured_log() as messages:
        for value in (1.0, 3e38, 2.0):
            model.set_gradient(value)
            optimizer.step(samples=1)
        optimizer.synchronize()
    assert merges == [0, 2]
    assert optimizer.dropped_rounds == (0,) * ranks.size, "no rank is to blame"
    assert ["sum of round 1 is not finite" in message for message in messages] == [True]
    assert torch.equal(model.parts[0].detach(), torch.full((5,), -3.0))


@scenario
def grad_scaler(ranks: Ranks) -> None:
    """Steps that a GradScaler skips are drawn and weigh nothing; the others are unscaled before they add up."""
    trial = Trial(ranks)
    optimizer = trial.optimizer
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    skipped = drawn = 0
    trial.recorder.opened()
    for number, indices in enumerate(optimizer.epoch(trial.task.loader(ranks))):
        drawn += len(indices)
        optimizer.zero_grad()
        loss = trial.task.loss(trial.model, indices)
        overflows = ranks.rank == 0 and number % 3 == 1
        scaler.scale(loss * float("inf") if overflows else loss).backward()
        trial.nap()
        if overflows:
            skipped += 1
        else:
            trial.recorder.micro_batch(indices.tolist())
        scaler.step(optimizer)
        scaler.update()
    assert skipped or ranks.rank, "nothing was skipped"
    trial.check()
    ledger = optimizer._rounds.driver.engine.ledger
    assert ledger.drawn[ranks.rank] == drawn
    assert ledger.drawn.sum() >= len(trial.task)
    assert optimizer.dropped_rounds == (0,) * ranks.size


# -- memory ----------------------------------------------------------------------------------------------------------


@scenario
def two_buffers_whatever_happens(ranks: Ranks) -> None:
    """Two flat buffers suffice for training, waiting, starving, closing; ``p.grad`` is never part of one in flight."""
    made: list[FlatBuffer] = []
    initialise = FlatBuffer.__init__

    def counted(self: FlatBuffer, *arguments: Any) -> None:
        made.append(self)
        initialise(self, *arguments)

    FlatBuffer.__init__ = counted  # type: ignore[method-assign]
    try:
        trial = Trial(ranks, adam, options={"max_micro_batches": 4})
        payload = trial.optimizer._rounds.payload
        update = payload._update

        def checked() -> None:
            if payload._in_flight is not None:
                busy = {tensor.untyped_storage().data_ptr() for tensor in payload._in_flight.tensors}
                grads = [p.grad for p in trial.model.parameters()]
                assert not busy & {g.untyped_storage().data_ptr() for g in grads if g is not None}
            update()

        payload._update = checked
        length = len(trial.task)
        for number in range(ranks.size):
            trial.train([] if number == ranks.rank else trial.task.loader(ranks), samples_per_epoch=length)
        for _ in range(3):
            trial.optimizer.synchronize()
        trial.recorder.opened()
        for _ in range(5 + ranks.rank):
            trial.task.loss(trial.model, torch.arange(3)).backward()
            trial.recorder.micro_batch([0, 1, 2])
            trial.optimizer.step(samples=3)
            assert all(p.grad is None for p in trial.model.parameters())
        trial.optimizer.synchronize()
    finally:
        FlatBuffer.__init__ = initialise  # type: ignore[method-assign]
    assert len(made) <= 2, f"{len(made)} buffers"
    rounds = gather_rounds(ranks, trial.recorder)
    trial.compare(rounds)
