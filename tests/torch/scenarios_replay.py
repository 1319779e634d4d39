"""Runs of ranks of uneven speed equal a single process that replays them by the formulas (see ``replay``)."""

from __future__ import annotations

import warnings
from typing import Any

import horovod.torch as horovod
import torch

import horovod_abs.torch as hvd
from tests.torch.replay import Regression, Trial, adam, replay, sgd
from tests.torch.scenario import Naps, Ranks, digest, flat, scenario, small_model, wrap


@scenario(gloo=True)
def delay_1_momentum(ranks: Ranks) -> int:
    """SGD with momentum, one round late, two epochs, in which every third micro-batch is smaller."""
    trial = Trial(ranks, task=Regression(20))
    loader = trial.task.loader(ranks)
    assert sorted(len(indices) for indices in loader) == [4, 8, 8]
    trial.train(loader, samples_per_epoch=200)
    trial.train(loader, samples_per_epoch=200)
    rounds = trial.check()
    return len(rounds.indices)


@scenario(gloo=True)
def delay_1_adam(ranks: Ranks) -> int:
    """Adam, one round late."""
    trial = Trial(ranks, adam)
    trial.train(trial.task.loader(ranks))
    return len(trial.check().indices)


@scenario(gloo=True)
def delay_0(ranks: Ranks) -> int:
    """SGD with momentum, waiting for each exchange."""
    trial = Trial(ranks, options={"exchange": hvd.Gradients(delay=0)})
    trial.train(trial.task.loader(ranks))
    return len(trial.check().indices)


@scenario
def delay_0_of_several_micro_batches(ranks: Ranks) -> int:
    """Adam, three micro-batches in a round, waiting for each exchange."""
    trial = Trial(ranks, adam, options={"exchange": hvd.Gradients(delay=0), "clock": hvd.CountClock(3)})
    trial.train(trial.task.loader(ranks))
    return len(trial.check().indices)


@scenario(gloo=True)
def float32_few_rounds(ranks: Ranks) -> int:
    """In float32 the order of summation shows after many rounds, so there are few."""
    task = Regression(dtype=torch.float32)
    trial = Trial(ranks, task=task, model=small_model(torch.float32))
    trial.train(task.loader(ranks), rounds=7)
    rounds = trial.check(1e-6)
    assert 7 <= len(rounds.indices) <= 10
    return len(rounds.indices)


@scenario(gloo=True)
def bit_identical_after_each_merge(ranks: Ranks) -> int:
    """In float32, where every rounding shows, all ranks have the same parameters after each merge."""
    task = Regression(200, dtype=torch.float32)
    trial = Trial(ranks, adam, task, small_model(torch.float32))
    seen: list[tuple[int, str]] = []
    trial.optimizer.on_merge(lambda: seen.append((trial.optimizer.last_round.round, digest(trial.model))))
    trial.train(task.loader(ranks))
    trial.train(task.loader(ranks))
    ranks.assert_same(seen, "rounds and digests of the parameters")
    assert len({each for _, each in seen}) == len(seen) > 5
    return len(seen)


@scenario(gloo=True)
def equals_horovod_step_by_step(ranks: Ranks) -> None:
    """With delay 0, one micro-batch a round and equal micro-batches it is Horovod's own optimizer."""
    for number, make in enumerate((sgd, adam)):
        _compare_with_horovod(ranks, make, number)


def _compare_with_horovod(ranks: Ranks, make: Any, number: int) -> None:
    task = Regression()
    ours, theirs = small_model(), small_model()
    optimizer = wrap(ours, make(ours), exchange=hvd.Gradients(delay=0), clock=hvd.CountClock(1))
    named = [(f"{number}.{name}", parameter) for name, parameter in theirs.named_parameters()]
    reference = horovod.DistributedOptimizer(make(theirs), named_parameters=named)
    generator = torch.Generator().manual_seed(ranks.rank)
    for _ in range(8):
        indices = torch.randint(len(task), (8,), generator=generator)
        optimizer.zero_grad()
        task.loss(ours, indices).backward()
        assert optimizer.step(samples=8), "each step must merge"
        reference.zero_grad()
        task.loss(theirs, indices).backward()
        reference.step()
        torch.testing.assert_close(flat(ours), flat(theirs), rtol=0, atol=1e-12)
    optimizer.synchronize()
    torch.testing.assert_close(flat(ours), flat(theirs), rtol=0, atol=1e-12)


@scenario
def plain_loop_and_synchronize(ranks: Ranks) -> None:
    """A loop without ``epoch`` in which ranks step unequally often and begin to close at different rounds."""
    trial = Trial(ranks)
    for repetition in range(2):
        trial.recorder.opened()
        for step in range(4 + 7 * ranks.rank):
            indices = torch.arange(step + repetition, step + repetition + 5)
            trial.task.loss(trial.model, indices).backward()
            trial.nap()
            trial.recorder.micro_batch(indices.tolist())
            trial.optimizer.step(samples=5)
        trial.optimizer.synchronize()
    trial.check()
    ranks.assert_same(digest(trial.model), "parameters")


@scenario
def two_optimizers(ranks: Ranks) -> None:
    """Two models trained in one loop, as in a GAN; one by ``epoch``, the other by ``step`` alone."""
    first = Trial(ranks)
    second = Trial(ranks, adam, model=small_model(seed=1))
    first.recorder.opened()
    second.recorder.opened()
    for indices in first.optimizer.epoch(first.task.loader(ranks)):
        for trial in (first, second):
            trial.optimizer.zero_grad()
            trial.task.loss(trial.model, indices).backward()
            trial.nap()
            trial.recorder.micro_batch(indices.tolist())
            trial.optimizer.step(samples=len(indices))
    second.optimizer.synchronize()
    first.check()
    second.check()


@scenario
def loss_reduction_sum(ranks: Ranks) -> None:
    """A loss summed over samples gives the same as its mean, micro-batches of unlike size included."""
    task = Regression()
    models = {reduction: small_model() for reduction in ("mean", "sum")}
    for reduction, model in models.items():
        optimizer = wrap(model, sgd(model), loss_reduction=reduction, clock=hvd.CountClock(2), max_micro_batches=2)
        for step in range(9):
            indices = torch.arange(step, step + 3 + (step + ranks.rank) % 4)
            loss = task.loss(model, indices)
            (loss * len(indices) if reduction == "sum" else loss).backward()
            optimizer.step(samples=len(indices))
        optimizer.synchronize()
    torch.testing.assert_close(flat(models["mean"]), flat(models["sum"]), rtol=0, atol=1e-12)


@scenario
def lr_scheduler(ranks: Ranks) -> None:
    """A scheduler stepped by ``on_merge``, in ``step`` and outside (rank 0 has no data), without a warning."""
    trial = Trial(ranks)
    scheduler = torch.optim.lr_scheduler.StepLR(trial.optimizer, step_size=2, gamma=0.8)
    trial.optimizer.on_merge(scheduler.step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trial.train([] if ranks.rank == 0 else trial.task.loader(ranks), samples_per_epoch=len(trial.task))
        trial.train(trial.task.loader(ranks))
    rounds = trial.rounds()
    model = trial.recorder.initial_model
    plain = sgd(model)
    plain_scheduler = torch.optim.lr_scheduler.StepLR(plain, step_size=2, gamma=0.8)
    replay(rounds, model, plain, trial.task.loss, after_merge=plain_scheduler.step)
    torch.testing.assert_close(flat(trial.model), flat(model), rtol=0, atol=1e-10)
    assert trial.optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"] < 0.03


@scenario
def lr_scheduler_made_before_wrapping(ranks: Ranks) -> None:
    """A scheduler of the plain optimizer goes on working, without a warning."""
    model, task = small_model(), Regression()
    plain = sgd(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.StepLR(plain, step_size=1, gamma=0.5)
        optimizer = wrap(model, plain, clock=hvd.CountClock(1))
        optimizer.on_merge(scheduler.step)
        for indices in optimizer.epoch([] if ranks.rank == 0 else task.loader(ranks), rounds=5):
            task.loss(model, indices).backward()
            optimizer.step()
    merges = sum(record.batch > 0 for record in optimizer.history)
    assert merges >= 4
    assert optimizer.param_groups[0]["lr"] == 0.03 * 0.5**merges


@scenario
def lr_scaling(ranks: Ranks) -> None:
    """The learning rate follows the batch of each round, and grows into that during warm-up."""
    rules = {
        "linear": lambda batch, seen: batch / 30,
        "sqrt": lambda batch, seen: (batch / 30) ** 0.5,
        "warmup": lambda batch, seen: 1 + (batch / 30 - 1) * min(1.0, seen / 100),
    }
    for name, factor in rules.items():
        options: dict[str, Any] = {"lr_scaling": "sqrt" if name == "sqrt" else "linear", "reference_batch_size": 30}
        if name == "warmup":
            options["warmup_samples"] = 100
        trial = Trial(ranks, options=options)
        trial.train(trial.task.loader(ranks))
        trial.train(trial.task.loader(ranks))
        trial.check(factor=factor)
        assert trial.optimizer.param_groups[0]["lr"] == 0.03, "the user's learning rate must be left alone"


@scenario
def clip_grad_norm(ranks: Ranks) -> None:
    """The global mean gradient is clipped, as torch clips a single process's; whether it is too long or not."""
    trial = Trial(ranks, options={"clip_grad_norm": 0.35})
    trial.train(trial.task.loader(ranks))
    trial.train(trial.task.loader(ranks))
    rounds = trial.check(clip_grad_norm=0.35)
    unclipped = Trial(ranks, options={"clip_grad_norm": 1e6})
    unclipped.train(unclipped.task.loader(ranks))
    unclipped.check()
    difference = (flat(trial.model) - flat(trial.replayed(rounds))).abs().max()
    assert difference > 1e-6, "clipping must have made a difference"


@scenario
def gradient_predivide_factor(ranks: Ranks) -> None:
    """What is divided before the exchange is multiplied back."""
    trial = Trial(ranks, options={"gradient_predivide_factor": 3.0, "clip_grad_norm": 0.35})
    trial.train(trial.task.loader(ranks))
    trial.check(clip_grad_norm=0.35)


@scenario
def min_and_max_micro_batches(ranks: Ranks) -> None:
    """Every rank does at least and at most so many micro-batches in a round, and still equals the replay."""
    trial = Trial(ranks, options={"min_micro_batches": 2, "max_micro_batches": 3})
    trial.train(trial.task.loader(ranks, batch_size=3))
    rounds = trial.check()
    for record in trial.optimizer.history[: len(rounds.indices) - 3]:
        assert all(2 <= count <= 3 for count in record.micro_batches), record


@scenario
def the_last_step_counts(ranks: Ranks) -> None:
    """Nothing is lost at the end of an epoch: all that was stepped on is in the model, once."""
    trial = Trial(ranks)
    recorder, naps = trial.recorder, Naps(ranks.rank, 0.01)
    recorder.opened()
    stepped = 0
    for indices in trial.optimizer.epoch(trial.task.loader(ranks)):
        trial.task.loss(trial.model, indices).backward()
        naps()
        recorder.micro_batch(indices.tolist())
        trial.optimizer.step(samples=len(indices))
        stepped += len(indices)
    assert trial.optimizer.samples_seen == sum(ranks.gather(stepped))
    assert sum(record.samples[ranks.rank] for record in trial.optimizer.history) == stepped
    trial.check()
