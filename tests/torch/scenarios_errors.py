"""Ranks that were given different things: found at construction or at the next merge, by name, and not by a hang."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import horovod_abs.torch as hvd
from tests.torch.replay import Regression, Trial, sgd
from tests.torch.scenario import Ranks, digest, scenario, small_model, wrap


def _mismatch(ranks: Ranks, model: torch.nn.Module, expected: str, **options: Any) -> str:
    """Construction must fail on every rank, blaming rank 1; returns the message."""
    with pytest.raises(hvd.Mismatch) as caught:
        wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
    message = str(caught.value)
    assert message.startswith(f"rank {ranks.rank}: rank 1 made DistributedOptimizer with other {expected} than rank 0")
    assert "Give every rank the same model, options and clock" in message
    return message


@scenario(gloo=True)
def different_models(ranks: Ranks) -> None:
    """Another shape, name, precision, or choice of frozen parameters on rank 1."""
    odd = ranks.rank == 1
    message = _mismatch(ranks, torch.nn.Linear(3, 2 if odd else 1), "parameters")
    assert f"weight ({2 if odd else 1}, 3) torch.float32 trained" in message
    model = torch.nn.Linear(3, 1)
    names = [("x" if odd else "w", model.weight), ("b", model.bias)]
    _mismatch(ranks, model, "parameters", named_parameters=names)
    _mismatch(ranks, torch.nn.Linear(3, 1, dtype=torch.float64 if odd else torch.float32), "parameters")
    frozen = torch.nn.Linear(3, 1)
    frozen.bias.requires_grad_(not odd)
    _mismatch(ranks, frozen, "parameters")


@scenario
def different_numbers_of_parameters(ranks: Ranks) -> None:
    """A layer more on rank 1."""
    layers = [torch.nn.Linear(3, 3) for _ in range(2 if ranks.rank == 1 else 1)]
    _mismatch(ranks, torch.nn.Sequential(*layers), "parameters")


@scenario(gloo=True)
def different_options(ranks: Ranks) -> None:
    """Another clock, exchange or keyword on rank 1."""
    odd = ranks.rank == 1
    model = torch.nn.Linear(3, 1)
    message = _mismatch(ranks, model, "clock", clock=hvd.CountClock(3) if odd else hvd.SyncClock())
    assert ("CountClock(micro_batches=3)" if odd else "SyncClock()") in message
    _mismatch(ranks, model, "exchange", exchange=hvd.Gradients(delay=0 if odd else 1))
    for option, here, there in (
        ("compression", hvd.Compression.fp16, hvd.Compression.none),
        ("gradient_predivide_factor", 2.0, 1.0),
        ("sparse_as_dense", True, False),
        ("loss_reduction", "sum", "mean"),
        ("clip_grad_norm", 1.0, None),
        ("warmup_samples", 10, 0),
        ("min_micro_batches", 2, 1),
        ("max_micro_batches", 32, 64),
    ):
        _mismatch(ranks, model, "options", **{option: here if odd else there})


@scenario
def different_optimizers(ranks: Ranks) -> None:
    """Adam on rank 1 and SGD elsewhere."""
    model = torch.nn.Linear(3, 1)
    make = torch.optim.Adam if ranks.rank == 1 else torch.optim.SGD
    with pytest.raises(hvd.Mismatch, match="rank 1 made DistributedOptimizer with other options"):
        wrap(model, make(model.parameters(), lr=0.1))  # type: ignore[operator]


@scenario
def equal_compressors(ranks: Ranks) -> None:
    """A compressor of the user's own, an object, is the same on all ranks although its address is not."""

    class Own(hvd.Compression.fp16):  # type: ignore[misc, name-defined]
        pass

    blocks = [object() for _ in range(1 + 50 * ranks.rank)]
    trial = Trial(ranks, options={"compression": Own()})
    trial.train(trial.task.loader(ranks))
    trial.check(1e-2)
    assert blocks


@scenario(gloo=True)
def different_learning_rates(ranks: Ranks) -> None:
    """Rank 1 changes its learning rate by itself: every rank says so, at the merge of that round, and gives up."""
    task, model = Regression(), small_model()
    optimizer = wrap(model, sgd(model), clock=hvd.CountClock(1), max_micro_batches=1)
    with pytest.raises(hvd.Mismatch) as caught:  # noqa: PT012
        for number, indices in enumerate(optimizer.epoch(task.loader(ranks), rounds=1000)):
            if ranks.rank == 1 and number == 5:
                optimizer.param_groups[0]["lr"] *= 0.5
            task.loss(model, indices).backward()
            optimizer.step()
    message = str(caught.value)
    assert message.startswith(f"rank {ranks.rank}: ")
    assert "learning rate" in message
    assert "on rank 1 differ from those on rank 0 in round 5" in message
    assert "optimizer.on_merge(scheduler.step)" in message
    with pytest.raises(hvd.ExchangeFailed, match="an exchange has failed before"):
        optimizer.step(samples=1)


@scenario(gloo=True)
def different_parameters(ranks: Ranks) -> None:
    """Models that were never broadcast are put right at the first merge, and told so; nothing else is corrected."""
    trial = Trial(ranks, model=small_model(seed=ranks.rank))
    assert len(set(ranks.gather(digest(trial.model)))) == ranks.size
    trial.train(trial.task.loader(ranks))
    ranks.assert_same(digest(trial.model), "parameters")
    ranks.assert_same(trial.optimizer._rounds.driver.corrections, "corrections")
    assert trial.optimizer._rounds.driver.corrections == 1


@scenario
def learning_rates_changed_by_all_ranks(ranks: Ranks) -> None:
    """Between epochs, or in ``on_merge``, all ranks may change hyper-parameters."""
    trial = Trial(ranks)
    trial.train(trial.task.loader(ranks))
    trial.optimizer.param_groups[0]["lr"] = 0.01

    def decay() -> None:
        trial.optimizer.param_groups[0]["momentum"] *= 0.9

    trial.optimizer.on_merge(decay)
    trial.train(trial.task.loader(ranks))
    ranks.assert_same(trial.optimizer.param_groups[0]["momentum"], "momentum")
    assert trial.optimizer.param_groups[0]["momentum"] < 0.9


@scenario
def refused_steps(ranks: Ranks) -> None:
    """Wrong arguments of ``step`` harm nothing: the same call with right ones works."""
    trial = Trial(ranks, options={"clock": hvd.CountClock(1), "exchange": hvd.Gradients(delay=0)})
    trial.task.loss(trial.model, torch.arange(4)).backward()
    with pytest.raises(ValueError, match="step\\(\\) takes no closure"):
        trial.optimizer.step(lambda: 1.0)
    with pytest.raises(ValueError, match="step\\(\\) needs samples="):
        trial.optimizer.step()
    for samples in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="samples must not be negative or infinite"):
            trial.optimizer.step(samples=samples)
    trial.recorder.opened()
    trial.recorder.micro_batch(range(4))
    assert trial.optimizer.step(samples=4)
    trial.optimizer.synchronize()
    trial.check()


# -- two optimizers --------------------------------------------------------------------------------------------------


@scenario(gloo=True)
def two_optimizers_of_unlike_length(ranks: Ranks) -> None:
    """As of a GAN, in loops of unlike length and in an adaptive epoch: a rank at its end holds up nobody."""
    task = Regression(240)
    for clock in (hvd.SyncClock(), hvd.IntervalClock(0.01)):
        models = [small_model(seed=seed) for seed in (1, 2)]
        pair = [wrap(model, sgd(model), clock=clock) for model in models]

        def micro_batches(indices: torch.Tensor, models: Any = models, pair: Any = pair) -> None:
            for model, optimizer in zip(models, pair, strict=True):
                task.loss(model, indices).backward()
                optimizer.step(samples=len(indices))

        for step in range(10 if ranks.rank == 0 else 150):
            micro_batches(torch.arange(step, step + 2 + ranks.rank))
        for optimizer in pair:
            optimizer.synchronize()
        seen = sum(ranks.gather((10 if ranks.rank == 0 else 150) * (2 + ranks.rank)))
        assert [optimizer.samples_seen for optimizer in pair] == [seen, seen]
        loader = torch.utils.data.DataLoader(
            task,  # type: ignore[arg-type]
            batch_size=4,
            sampler=hvd.AdaptiveSampler(task, pair[0]),
        )
        for _ in range(2):
            for indices in pair[0].epoch(loader):
                micro_batches(indices)
        pair[1].synchronize()
        assert [optimizer.samples_seen for optimizer in pair] == [seen + 480, seen + 480]
        for model in models:
            ranks.assert_same(digest(model), "parameters")


@scenario
def two_optimizers_that_would_wait_for_one_another(ranks: Ranks) -> None:
    """They are refused, on all ranks, before they do."""
    options = {"clock": hvd.IntervalClock(0.01), "exchange": hvd.Gradients(delay=0)}
    models = [small_model(seed=seed) for seed in (1, 2)]
    pair = [wrap(model, sgd(model), **options) for model in models]
    pair[0].step(samples=0)
    with pytest.raises(hvd.RunError, match=r"two optimizers are in use.*Gradients\(delay=1\) for one of them"):
        pair[1].step(samples=0)
    pair[0].synchronize()
