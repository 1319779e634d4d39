"""Averaging model updates: runs of ranks of uneven speed equal a single process that follows the formulas."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import horovod_abs.torch as hvd
from horovod_abs.core.ledger import Flag
from horovod_abs.core.scaling import Scaling
from horovod_abs.observe.schedule import RecordedRound, ReplayError
from horovod_abs.torch.formulas import UpdateRules, compute
from horovod_abs.torch.replay import ReplayTask, replay
from tests.torch.replay import Regression, Trial, adam, sgd
from tests.torch.scenario import Ranks, digest, flat, scenario, small_model, wrap
from tests.torch.scenarios_gradients import Weights
from tests.torch.scenarios_gradients import _captured_log as captured_log
from tests.torch.scenarios_recording import Training
from tests.torch.scenarios_recording import _folder as folder

NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
POISON = 90
"""A sample of this index has a loss that is not a number."""


class PoisonedTask(Regression):
    """Regression whose last sample is poisoned."""

    def __init__(self) -> None:
        super().__init__(POISON + 1)

    def loss(self, model: torch.nn.Module, indices: torch.Tensor) -> torch.Tensor:
        """Mean squared error."""
        loss = super().loss(model, indices)
        return loss * float("nan") if POISON in indices else loss


class Updates(Trial):
    """A run with model updates, written down, to be compared with the formulas."""

    @property
    def exchange(self) -> hvd.ModelUpdates:
        return self.options["exchange"]

    def recorded(self) -> list[RecordedRound]:
        """The micro-batches of all ranks, by round. Every rank must call it."""
        everyone = self.ranks.gather((self.recorder.launches, self.recorder.sessions, self.recorder.micro_batches))
        launches, sessions, _ = everyone[0]
        assert all(other[:2] == (launches, sessions) for other in everyone), f"launches, sessions: {everyone}"
        micro_batches: list[list[list[list[int]]]] = [[[] for _ in everyone] for _ in range(launches)]
        for rank, (_, _, done) in enumerate(everyone):
            for round, indices in done:
                micro_batches[round][rank].append(indices)
        return [RecordedRound(each, number in sessions) for number, each in enumerate(micro_batches)]

    def compare_with_formulas(self, tolerance: float = 1e-10) -> list[torch.Tensor]:
        """Assert that the central model is that of the formulas; returns theirs after each round."""
        rules = UpdateRules(
            max_staleness=self.exchange.max_staleness,
            weighting=self.exchange.weighting,
            average_state=self.exchange.average_state,
            outer=self.exchange.outer,
            min_micro_batches=self.options.get("min_micro_batches", 1),
            clip_grad_norm=self.options.get("clip_grad_norm"),
            loss_reduction=self.options.get("loss_reduction", "mean"),
            scaling=Scaling(self.options.get("lr_scaling", "none"), 1.0, self.options.get("warmup_steps", 0)),
        )
        model = self.recorder.initial_model
        optimizer = self.make_optimizer(model)
        optimizer.load_state_dict(self.recorder.initial_state)

        def loss(model: torch.nn.Module, indices: list[int]) -> torch.Tensor:
            return self.task.loss(model, torch.tensor(indices))

        history = compute(self.recorded(), model, optimizer, loss, rules)
        difference = float((flat(self.model) - flat(model)).abs().max())
        assert difference <= tolerance, f"parameters differ from the formulas by {difference:g}"
        self.ranks.assert_same(digest(self.model), "parameters")
        return [torch.from_numpy(np.concatenate([x.ravel() for x in each])) for each in history]


def trial(
    ranks: Ranks,
    make: Callable[[torch.nn.Module], torch.optim.Optimizer] = sgd,
    task: Any = None,
    model: torch.nn.Module | None = None,
    *,
    clock: hvd.Clock | None = None,
    options: dict[str, Any] | None = None,
    **exchange: Any,
) -> Updates:
    chosen = {"exchange": hvd.ModelUpdates(**exchange), "clock": clock or hvd.SyncClock(), **(options or {})}
    return Updates(ranks, make, task or Regression(), model or small_model(), chosen)


# -- the formulas ----------------------------------------------------------------------------------------------------


@scenario(gloo=True)
def updates_momentum(ranks: Ranks) -> int:
    """SGD with momentum under each clock, two epochs; ``step`` returns True for merges, and the loop is the usual."""
    found = 0
    for clock in (hvd.SyncClock(), hvd.CountClock(4), hvd.IntervalClock(0.01), hvd.TargetBatchClock(200)):
        run = trial(ranks, clock=clock)
        merges: list[int] = []
        run.optimizer.on_merge(lambda merges=merges, run=run: merges.append(run.optimizer.last_round.round))
        told = 0
        for _ in range(2):
            run.recorder.opened()
            for indices in run.optimizer.epoch(run.task.loader(ranks), samples_per_epoch=150):
                run.optimizer.zero_grad()
                run.task.loss(run.model, indices).backward()
                run.nap()
                run.recorder.micro_batch(indices.tolist())
                before = len(run.optimizer.history)
                merged = run.optimizer.step()
                assert merged == (len(run.optimizer.history) > before)
                assert all(p.grad is None for p in run.model.parameters())
                told += merged
        assert told
        assert merges == [r.round for r in run.optimizer.history if r.batch]
        found += len(run.compare_with_formulas())
    return found


@scenario(gloo=True)
def updates_adam(ranks: Ranks) -> int:
    """Adam, weighted both ways, and clipped; its moments stay each rank's own."""
    found = 0
    for weighting in ("samples", "workers"):
        run = trial(ranks, adam, weighting=weighting, options={"clip_grad_norm": 0.3})
        run.train(run.task.loader(ranks), samples_per_epoch=400)
        found += len(run.compare_with_formulas())
        moments = ranks.gather(next(iter(run.optimizer.state.values()))["exp_avg"].flatten().tolist())
        assert len({tuple(each) for each in moments}) == ranks.size
    return found


@scenario
def updates_in_single_precision(ranks: Ranks) -> None:
    """In float32 the order of summation shows after many rounds, so there are few."""
    task = Regression(dtype=torch.float32)
    run = trial(ranks, sgd, task, small_model(torch.float32))
    run.train(task.loader(ranks), rounds=7)
    assert 7 <= len(run.compare_with_formulas(1e-6)) <= 10


@scenario
def updates_with_a_small_staleness(ranks: Ranks) -> None:
    """Ranks that wait for the central model in the middle of a round, or before it."""
    for staleness, clock, least in ((1, hvd.SyncClock(), 1), (3, hvd.SyncClock(), 2), (4, hvd.CountClock(4), 1)):
        run = trial(ranks, clock=clock, max_staleness=staleness, options={"min_micro_batches": least})
        run.train(run.task.loader(ranks), samples_per_epoch=200)
        run.compare_with_formulas()
        assert max(max(record.micro_batches) for record in run.optimizer.history) <= staleness


@scenario
def updates_with_scaled_rates(ranks: Ranks) -> None:
    """The rate grows with the number of ranks, phased in over each rank's own steps; the user's value stays."""
    options = {"lr_scaling": "linear", "warmup_steps": 9, "loss_reduction": "sum", "gradient_predivide_factor": 3.0}
    task = Regression()
    run = trial(ranks, lambda model: torch.optim.SGD(model.parameters(), lr=0.005), task, options=options)
    mean = task.loss
    task.loss = lambda model, indices: mean(model, indices) * len(indices)  # type: ignore[method-assign]
    run.train(task.loader(ranks), samples_per_epoch=400)
    run.compare_with_formulas()
    assert run.optimizer.param_groups[0]["lr"] == 0.005
    plain = trial(ranks, run.make_optimizer, options={"loss_reduction": "sum"})
    plain.recorder = run.recorder
    plain.model.load_state_dict(run.model.state_dict())
    with pytest.raises(AssertionError, match="differ from the formulas"):
        plain.compare_with_formulas()


@scenario
def updates_with_an_outer_optimizer(ranks: Ranks) -> None:
    """Nesterov momentum on the mean update equals the formulas; a rate of 1 alone is the paper's rule."""
    run = trial(ranks, outer=NESTEROV)
    run.train(run.task.loader(ranks), samples_per_epoch=300)
    run.compare_with_formulas()
    digests = []
    for outer in (None, functools.partial(torch.optim.SGD, lr=1.0)):
        run = trial(ranks, outer=outer, clock=hvd.CountClock(2))
        run.train(run.task.loader(ranks), rounds=8)
        digests.append(flat(run.model))
    assert (digests[0] - digests[1]).abs().max() < 1e-14


@scenario
def updates_with_averaged_state(ranks: Ranks) -> None:
    """With ``average_state`` all ranks keep the same moments when they have closed."""
    for make, key in ((adam, "exp_avg"), (sgd, "momentum_buffer")):
        run = trial(ranks, make, average_state=True)
        run.train(run.task.loader(ranks), samples_per_epoch=300)
        run.compare_with_formulas()
        ranks.assert_same(next(iter(run.optimizer.state.values()))[key].tolist(), key)


# -- the user's loop ---------------------------------------------------------------------------------------------------


@scenario(gloo=True)
def updates_seen_in_the_middle(ranks: Ranks) -> None:
    """``authoritative`` shows the central model in mid-epoch, the same for ranks that merged as much; and puts back."""
    run = trial(ranks)
    seen: dict[int, str] = {}
    central: dict[int, torch.Tensor] = {}
    run.recorder.opened()
    for number, indices in enumerate(run.optimizer.epoch(run.task.loader(ranks), samples_per_epoch=300)):
        if number % 2:
            own = flat(run.model)
            with run.optimizer.authoritative():
                merged = run.optimizer._rounds.driver.engine.ledger.rounds
                seen[merged], central[merged] = digest(run.model), flat(run.model)
            assert torch.equal(flat(run.model), own)
        run.task.loss(run.model, indices).backward()
        run.nap()
        run.recorder.micro_batch(indices.tolist())
        run.optimizer.step()
    history = run.compare_with_formulas()
    compared = [merged for merged in central if merged]
    assert compared
    for merged in compared:
        assert (central[merged] - history[merged - 1]).abs().max() < 1e-10
    everyone = ranks.gather(seen)
    for merged in set().union(*everyone):
        assert len({other[merged] for other in everyone if merged in other}) == 1


@scenario
def updates_over_epochs_of_a_sampler(ranks: Ranks) -> None:
    """With an adaptive sampler each sample is drawn once; the record repeats the run: same bits, and the formulas."""
    with folder(ranks) as shared:
        for name, exchange in (("plain", hvd.ModelUpdates(4)), ("mean", hvd.ModelUpdates(16, average_state=True))):
            options: dict[str, Any] = {"exchange": exchange, "clip_grad_norm": 0.7}
            path = shared / f"{name}.jsonl"
            first = Training(ranks, {**options, "record": path})
            scheduler = torch.optim.lr_scheduler.StepLR(first.optimizer, 5, 0.9)
            first.optimizer.on_merge(scheduler.step)
            for _ in range(2):
                first.epoch()
            first.assert_each_sample(2)
            hvd.barrier()
            log = hvd.read_run_log(path)
            second = Training(ranks, {**options, "clock": hvd.ReplayClock(log.entries)}, naps=1)
            scheduler = torch.optim.lr_scheduler.StepLR(second.optimizer, 5, 0.9)
            second.optimizer.on_merge(scheduler.step)
            for _ in range(2):
                second.epoch()
            assert second.seen == first.seen
            assert digest(second.model) == digest(first.model), name
            task = Regression(240)
            alone = replay(log, ReplayTask(small_model(seed=9), sgd, task, task.loss))
            assert alone.difference <= 1e-10, (name, alone.difference)


@scenario
def updates_with_an_outer_optimizer_are_recorded(ranks: Ranks) -> None:
    """The log names the outer optimizer; a replay says that it does not hold it."""
    with folder(ranks) as shared:
        path = shared / "outer.jsonl"
        run = Training(ranks, {"exchange": hvd.ModelUpdates(outer=NESTEROV), "record": path})
        run.epoch()
        hvd.barrier()
        log = hvd.read_run_log(path)
        assert "SGD" in str(log.run.exchange["outer"])
        task = Regression(240)
        with pytest.raises(ReplayError, match=r"the log names the outer optimizer SGD\(lr=0.7, .*does not hold it"):
            replay(log, ReplayTask(small_model(seed=9), sgd, task, task.loss))


@scenario(gloo=True)
def updates_resumed(ranks: Ranks) -> None:
    """Saved after an epoch and loaded into new objects, a run goes on bit by bit, each rank with its own moments."""
    task = Regression()
    options = {"clock": hvd.CountClock(2), "exchange": hvd.ModelUpdates(4, outer=NESTEROV), "lr_scaling": "linear"}

    def begin(seed: int = 0) -> tuple[torch.nn.Module, Any]:
        model = small_model(seed=seed)
        return model, wrap(model, adam(model), warmup_steps=40, **options)

    def epoch(model: torch.nn.Module, optimizer: Any, number: int) -> None:
        for indices in optimizer.epoch(task.loader(ranks, seed=number), samples_per_epoch=180):
            task.loss(model, indices).backward()
            optimizer.step()

    whole, uninterrupted = begin()
    for number in range(3):
        epoch(whole, uninterrupted, number)
    first, interrupted = begin()
    epoch(first, interrupted, 0)
    with folder(ranks) as shared:
        hvd.Checkpointer(shared, first, interrupted, signals=False).save()
        second, resumed = begin(seed=1)
        assert hvd.Checkpointer(shared, second, resumed, signals=False).restore()
    file = io.BytesIO()
    torch.save(interrupted.state_dict(), file)
    file.seek(0)
    third, loaded = begin(seed=2)
    third.load_state_dict(first.state_dict())
    loaded.load_state_dict(torch.load(file))
    for model, optimizer in ((second, resumed), (third, loaded)):
        for number in (1, 2):
            epoch(model, optimizer, number)
        assert digest(model) == digest(whole)
        assert optimizer.samples_seen == uninterrupted.samples_seen


@scenario
def updates_close_on_all_ranks(ranks: Ranks) -> None:
    """A rank without data, data that run out, a break, an error, a loop without ``epoch``: all end alike."""
    run = trial(ranks, clock=hvd.SyncClock(), max_staleness=6)
    run.train([] if ranks.rank == 0 else run.task.loader(ranks), samples_per_epoch=150)
    run.train((torch.arange(k, k + 3) for k in range(2 + 3 * ranks.rank)), samples_per_epoch=100_000)
    run.recorder.opened()
    for number, indices in enumerate(run.optimizer.epoch(run.task.loader(ranks), samples_per_epoch=100_000)):
        run.task.loss(run.model, indices).backward()
        run.recorder.micro_batch(indices.tolist())
        run.optimizer.step()
        if ranks.rank == 1 and number == 5:
            break
    run.recorder.opened()
    for number in range(5 + 4 * ranks.rank):
        if number % 3 == 2:
            run.recorder.micro_batch([])
            run.optimizer.step(samples=0)
            continue
        run.task.loss(run.model, torch.arange(number, number + 2)).backward()
        run.recorder.micro_batch([number, number + 1])
        run.optimizer.step(samples=2)
    run.optimizer.synchronize()
    run.compare_with_formulas()
    run.optimizer.state_dict()  # refused while anything is pending
    ranks.assert_same([(r.round, r.samples) for r in run.optimizer.history], "rounds")


@scenario
def updates_of_models_with_batch_norm(ranks: Ranks) -> None:
    """Statistics stay each rank's own until ``average_buffers`` averages them, by samples."""
    task = Regression()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)).double()
    run = trial(ranks, sgd, task, model)
    order = torch.Generator().manual_seed(ranks.rank)
    for _ in range(2):
        loader = torch.utils.data.DataLoader(task, 9, shuffle=True, generator=order)  # type: ignore[arg-type]
        run.train(loader, samples_per_epoch=150)
        assert len({tuple(each) for each in ranks.gather(model[1].running_mean.tolist())}) > 1  # type: ignore[union-attr, operator]
        hvd.average_buffers(model, run.optimizer)
        ranks.assert_same(model[1].running_mean.tolist(), "means")  # type: ignore[union-attr, operator]
    ranks.assert_same(digest(model), "parameters")


@scenario
def updates_in_process_sets(ranks: Ranks) -> None:
    """Ranks 0 and 1 train together, and each other by itself, as with a plain optimizer."""
    pair = hvd.add_process_set([0, 1])
    task, model = Regression(), small_model()
    optimizer = wrap(model, sgd(model), process_set=pair, exchange=hvd.ModelUpdates())
    done = []
    for indices in optimizer.epoch(task.loader(ranks)):
        task.loss(model, indices).backward()
        done.append(indices)
        optimizer.step()
    digests = ranks.gather(digest(model))
    assert digests[0] == digests[1]
    if ranks.rank >= 2:
        plain = small_model()
        alone = sgd(plain)
        for indices in done:
            alone.zero_grad()
            task.loss(plain, indices).backward()
            alone.step()
        assert (flat(plain) - flat(model)).abs().max() < 1e-12
    hvd.remove_process_set(pair)


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@scenario(gloo=True)
def updates_that_are_not_finite(ranks: Ranks) -> None:
    """A rank's bad update weighs nothing; it goes on from the central model with moments begun anew; it is told."""
    for make in (adam, sgd):
        run = trial(ranks, make, PoisonedTask())
        poisoned: list[int] = []
        with captured_log() as messages:
            run.recorder.opened()
            for number, indices in enumerate(run.optimizer.epoch(run.task.loader(ranks), samples_per_epoch=300)):
                own = [index for index in indices.tolist() if index != POISON] or [0]
                if ranks.rank == 1 and number in (1, 6):
                    own.append(POISON)
                    poisoned.append(run.recorder.launches)
                run.task.loss(run.model, torch.tensor(own)).backward()
                run.nap()
                run.recorder.micro_batch(own)
                run.optimizer.step(samples=len(own))
        bad = set(ranks.gather(poisoned)[1])
        assert bad
        for record in run.optimizer.history:
            assert (record.samples[1] == 0) or record.round not in bad
        assert run.optimizer.dropped_rounds == tuple(len(bad) if rank == 1 else 0 for rank in range(ranks.size))
        assert len(messages) == (len(bad) if ranks.rank == 1 else 0), messages
        for state in run.optimizer.state.values():
            assert all(bool(torch.isfinite(value).all()) for value in state.values())
        run.compare_with_formulas()


@scenario
def updates_whose_sum_is_not_finite(ranks: Ranks) -> None:
    """Updates that overflow together are dropped by all, who forget them."""
    model = Weights(torch.float32)
    optimizer = wrap(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        exchange=hvd.ModelUpdates(1, "workers"),
        clock=hvd.CountClock(1),
    )
    merges: list[int] = []
    optimizer.on_merge(lambda: merges.append(optimizer.last_round.round))
    with captured_log() as messages:
        for value in (1.0, 3e38, 2.0):
            model.set_gradient(value)
            optimizer.step(samples=1)
        optimizer.synchronize()
    assert merges == [0, 2]
    assert optimizer.dropped_rounds == (0,) * ranks.size, "no rank is to blame"
    assert ["sum of round 1 is not finite" in message for message in messages] == [True]
    assert torch.equal(model.parts[0].detach(), torch.full((5,), -3.0))


@scenario
def updates_with_a_grad_scaler(ranks: Ranks) -> None:
    """Steps that a GradScaler skips are drawn and weigh nothing; the others are unscaled before they are taken."""
    run = trial(ranks, adam)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    drawn = 0
    run.recorder.opened()
    for number, indices in enumerate(run.optimizer.epoch(run.task.loader(ranks), samples_per_epoch=300)):
        drawn += len(indices)
        run.optimizer.zero_grad()
        loss = run.task.loss(run.model, indices)
        overflows = ranks.rank == 0 and number % 3 == 1
        scaler.scale(loss * float("inf") if overflows else loss).backward()
        run.nap()
        run.recorder.micro_batch([] if overflows else indices.tolist())
        scaler.step(run.optimizer)
        scaler.update()
    run.compare_with_formulas()
    assert run.optimizer._rounds.driver.engine.ledger.drawn[ranks.rank] == drawn
    assert run.optimizer.dropped_rounds == (0,) * ranks.size


@scenario(gloo=True)
def updates_compressed(ranks: Ranks) -> None:
    """Updates travel as float16: close to the formulas, and the same central model on all ranks."""
    task = Regression(dtype=torch.float32)
    for weighting in ("samples", "workers"):
        run = trial(
            ranks,
            sgd,
            task,
            small_model(torch.float32),
            weighting=weighting,
            options={"compression": hvd.Compression.fp16},
        )
        run.train(task.loader(ranks), rounds=12)
        run.compare_with_formulas(5e-3)
        with pytest.raises(AssertionError, match="differ from the formulas"):
            run.compare_with_formulas(1e-7)
        assert run.optimizer._rounds.driver.overflows == 0


@scenario
def updates_in_half_precision(ranks: Ranks) -> None:
    """Models of half precision, and of several precisions, end alike on all ranks, close to the formulas."""

    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Linear(6, 4)
            self.gain = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
            self.shift = torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))
            self.head = torch.nn.Linear(4, 1, dtype=torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head((torch.tanh(self.body(x)) * self.gain + self.shift).double())

    task = Regression(dtype=torch.float32)
    torch.manual_seed(0)
    run = trial(ranks, lambda model: torch.optim.SGD(model.parameters(), lr=0.05), task, Mixed())
    run.train(task.loader(ranks), rounds=8)
    run.compare_with_formulas(0.05)
    assert [p.dtype for p in run.model.parameters()] == [p.dtype for p in Mixed().parameters()]


@scenario
def updates_of_models_apart(ranks: Ranks) -> None:
    """Ranks that begin apart, or drift apart, take over rank 0's central model and outer momentum, and are told."""
    run = trial(ranks, model=small_model(seed=ranks.rank), outer=NESTEROV, options={"digest_every": 4})
    with captured_log() as messages:
        run.train(run.task.loader(ranks), rounds=6)
        ranks.assert_same(digest(run.model), "parameters")
        assert run.optimizer._rounds.driver.corrections == 1
        payload = run.optimizer._rounds.payload
        if ranks.rank == 1:
            for kept in payload._outer.state.values():
                kept["momentum_buffer"].mul_(1.5)
        run.train(run.task.loader(ranks), rounds=12)
        ranks.assert_same(digest(run.model), "parameters")
        momentum = [kept["momentum_buffer"].tolist() for kept in payload._outer.state.values()]
        ranks.assert_same(momentum, "outer momentum")
    assert run.optimizer._rounds.driver.corrections == 2
    assert len(messages) == (2 if ranks.rank == 0 else 0), messages


@scenario
def updates_at_different_rates(ranks: Ranks) -> None:
    """Rank 1 changes its learning rate by itself: every rank says so at the merge of that round."""
    task, model = Regression(), small_model()
    optimizer = wrap(model, sgd(model), clock=hvd.CountClock(1), exchange=hvd.ModelUpdates(2))
    with pytest.raises(hvd.Mismatch, match="on rank 1 differ from those on rank 0 in round 5"):  # noqa: PT012
        for number, indices in enumerate(optimizer.epoch(task.loader(ranks), rounds=1000)):
            if ranks.rank == 1 and number == 5:
                optimizer.param_groups[0]["lr"] *= 0.5
            task.loss(model, indices).backward()
            optimizer.step()


@scenario(gloo=True)
def updates_refused(ranks: Ranks) -> None:
    """What would not keep its meaning is refused; what differs between ranks is named."""
    model = small_model()

    def make(**options: Any) -> Any:
        return wrap(model, sgd(model), **{"exchange": hvd.ModelUpdates(8), **options})

    for match, options in (
        ("max_micro_batches=9 or more .and max_staleness", {"clock": hvd.CountClock(9)}),
        ("min_micro_batches <= max_staleness, got 9 and 8", {"min_micro_batches": 9}),
        ("scaled by the number of ranks, and phased in over warmup_steps=", {"reference_batch_size": 9}),
        ("scaled by the number of ranks, and phased in over warmup_steps=", {"warmup_samples": 9}),
        ("warmup_steps= is for ModelUpdates", {"warmup_steps": 9, "exchange": hvd.Gradients()}),
        (
            "average_state=True with compression",
            {"exchange": hvd.ModelUpdates(average_state=True), "compression": hvd.Compression.fp16},
        ),
        ("op must be hvd.Average", {"op": hvd.Sum}),
    ):
        with pytest.raises(ValueError, match=match):
            make(**options)
    for wrong, kind in (
        ({"max_staleness": 0}, ValueError),
        ({"weighting": "rank"}, ValueError),
        ({"outer": 1}, TypeError),
    ):
        with pytest.raises(kind, match=next(iter(wrong))):
            hvd.ModelUpdates(**wrong)
    odd = ranks.rank == 1
    for mine in (
        hvd.ModelUpdates(9 if odd else 8),
        hvd.ModelUpdates(weighting="workers" if odd else "samples"),
        hvd.ModelUpdates(outer=NESTEROV if odd else None),
        hvd.ModelUpdates(outer=functools.partial(torch.optim.SGD, lr=0.1 if odd else 0.2)),
        hvd.ModelUpdates() if odd else hvd.Gradients(),
    ):
        with pytest.raises(hvd.Mismatch, match="rank 1 made DistributedOptimizer with other exchange than rank 0"):
            make(exchange=mine)
    make(exchange=hvd.ModelUpdates(outer=functools.partial(torch.optim.SGD, lr=0.1))).synchronize()


@scenario
def updates_bounded(ranks: Ranks) -> None:
    """A fast rank stops at τ while a slow one computes, and its rounds say so."""
    run = trial(ranks, max_staleness=2)
    nap = run.nap
    run.nap = (lambda: [nap() for _ in range(20)]) if ranks.rank == 0 else (lambda: None)  # type: ignore[assignment]
    run.train(run.task.loader(ranks), rounds=8)
    run.compare_with_formulas()
    entries = run.optimizer._rounds.driver.engine.ledger.recent
    assert any(entry.ranks_with(Flag.BOUNDED) for entry in entries)
    assert max(max(record.micro_batches) for record in run.optimizer.history) <= 2
