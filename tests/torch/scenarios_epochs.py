"""``epoch``: begins and ends on all ranks at the same exchange, whatever the ranks do."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

import horovod_abs.torch as hvd
from tests.torch.replay import Regression, Trial
from tests.torch.scenario import Naps, Ranks, digest, scenario, small_model, wrap


def _assert_closed(ranks: Ranks, trial: Trial) -> None:
    """Every rank is through with the same exchanges, and has the same model."""
    history = [(record.round, record.samples) for record in trial.optimizer.history]
    ranks.assert_same(history, "rounds")
    ranks.assert_same(digest(trial.model), "parameters")
    trial.optimizer.state_dict()  # refused while anything is pending


@scenario(gloo=True)
def ends_when_all_samples_are_drawn(ranks: Ranks) -> list[int]:
    """The default: when all ranks together have drawn as many samples as the data set has; over several epochs."""
    trial = Trial(ranks)
    ledger = trial.optimizer._rounds.driver.engine.ledger
    drawn = []
    for _ in range(3):
        before = int(ledger.drawn.sum())
        trial.train(trial.task.loader(ranks))
        drawn.append(int(ledger.drawn.sum()) - before)
        _assert_closed(ranks, trial)
    assert min(drawn) >= 90, drawn
    assert trial.optimizer.samples_seen == sum(drawn)
    return drawn


@scenario
def ends_by_samples(ranks: Ranks) -> None:
    """``samples=`` replaces the length of the data set, more than once through it."""
    trial = Trial(ranks)
    trial.train(trial.task.loader(ranks), samples_per_epoch=2000)
    _assert_closed(ranks, trial)
    assert 2000 <= trial.optimizer.samples_seen < 4000
    trial.check()


@scenario(gloo=True)
def ends_by_rounds(ranks: Ranks) -> None:
    """``rounds=`` ends after so many rounds, for data without a length."""

    def endless() -> Iterator[torch.Tensor]:
        while True:
            yield torch.arange(4)

    trial = Trial(ranks)
    for expected in (5, 10):
        before = len(trial.optimizer.history)
        trial.train(endless(), rounds=expected)
        _assert_closed(ranks, trial)
        assert expected <= len(trial.optimizer.history) - before <= expected + 2
    trial.check()


@scenario(gloo=True)
def delay_0_ends_too(ranks: Ranks) -> None:
    """Waiting for each exchange, an epoch ends alike; also with a rank that has no data."""
    trial = Trial(ranks, options={"exchange": hvd.Gradients(delay=0)})
    trial.train([] if ranks.rank == 1 else trial.task.loader(ranks), samples_per_epoch=90)
    _assert_closed(ranks, trial)
    assert sum(record.samples[1] for record in trial.optimizer.history) == 0
    trial.check()


@scenario(gloo=True)
def a_rank_without_data(ranks: Ranks) -> None:
    """A rank whose loader is empty takes part with weight 0, and ends with the others."""
    trial = Trial(ranks)
    trial.train([] if ranks.rank == 0 else trial.task.loader(ranks), samples_per_epoch=150)
    _assert_closed(ranks, trial)
    assert sum(record.samples[0] for record in trial.optimizer.history) == 0
    assert trial.optimizer.samples_seen >= 150
    trial.check()


@scenario
def data_that_run_out(ranks: Ranks) -> None:
    """Iterators that end at different times: what they had is used, and the others go on to the end."""
    trial = Trial(ranks)
    limit = {0: 1, 1: 5}.get(ranks.rank, 10_000)
    trial.train((torch.arange(k, k + 3) for k in range(limit) if k < 80), samples_per_epoch=60)
    _assert_closed(ranks, trial)
    trial.check()


@scenario
def data_that_run_out_everywhere(ranks: Ranks) -> None:
    """If no rank has data any more before the epoch is full, it ends on all."""
    trial = Trial(ranks)
    trial.train((torch.arange(k, k + 3) for k in range(2 + ranks.rank)), samples_per_epoch=100_000)
    _assert_closed(ranks, trial)
    assert trial.optimizer.samples_seen == sum(3 * (2 + rank) for rank in range(ranks.size))
    trial.check()


@scenario(gloo=True)
def break_on_one_rank(ranks: Ranks) -> None:
    """``break`` on one rank ends the epoch for all; the next epoch is a whole one."""
    trial = Trial(ranks)
    trial.recorder.opened()
    for number, indices in enumerate(trial.optimizer.epoch(trial.task.loader(ranks), samples_per_epoch=100_000)):
        trial.task.loss(trial.model, indices).backward()
        trial.nap()
        trial.recorder.micro_batch(indices.tolist())
        trial.optimizer.step(samples=len(indices))
        if ranks.rank == 1 and number == 5:
            break
    _assert_closed(ranks, trial)
    assert trial.optimizer.samples_seen < 50_000
    before = trial.optimizer.samples_seen
    trial.train(trial.task.loader(ranks))
    _assert_closed(ranks, trial)
    assert trial.optimizer.samples_seen - before >= 90
    trial.check()


@scenario(gloo=True)
def an_exception_on_one_rank(ranks: Ranks) -> None:
    """An exception in one rank's loop ends the epoch for all, and is passed on to that rank's program."""
    trial = Trial(ranks)
    trial.recorder.opened()

    def loop() -> None:
        for number, indices in enumerate(trial.optimizer.epoch(trial.task.loader(ranks), samples_per_epoch=100_000)):
            if ranks.rank == 0 and number == 4:
                raise KeyError("a fault of the user's")
            trial.task.loss(trial.model, indices).backward()
            trial.recorder.micro_batch(indices.tolist())
            trial.optimizer.step(samples=len(indices))

    if ranks.rank == 0:
        with pytest.raises(KeyError, match="a fault of the user's"):
            loop()
    else:
        loop()
    _assert_closed(ranks, trial)
    trial.optimizer.zero_grad()
    trial.train(trial.task.loader(ranks))
    _assert_closed(ranks, trial)
    trial.check()


@scenario
def a_break_that_nobody_sees(ranks: Ranks) -> None:
    """An epoch that was left while something, a progress bar say, still holds it ends when the next one begins."""
    trial = Trial(ranks)
    bar = trial.optimizer.epoch(trial.task.loader(ranks), samples_per_epoch=100_000)
    trial.recorder.opened()
    for number, indices in enumerate(bar):
        trial.task.loss(trial.model, indices).backward()
        trial.recorder.micro_batch(indices.tolist())
        trial.optimizer.step(samples=len(indices))
        if ranks.rank == 0 and number == 3:
            break
    again = trial.optimizer.epoch(trial.task.loader(ranks))
    trial.recorder.opened()
    for indices in again:
        trial.task.loss(trial.model, indices).backward()
        trial.recorder.micro_batch(indices.tolist())
        trial.optimizer.step(samples=len(indices))
    _assert_closed(ranks, trial)
    trial.check()


@scenario
def batches_that_are_skipped(ranks: Ranks) -> None:
    """``continue`` without a step: the batch is drawn and weighs nothing; so does ``step(samples=0)``."""
    trial = Trial(ranks)
    ledger = trial.optimizer._rounds.driver.engine.ledger
    drawn = 0
    trial.recorder.opened()
    for number, indices in enumerate(trial.optimizer.epoch(trial.task.loader(ranks))):
        drawn += len(indices)
        if number % 3 == 1:
            continue
        trial.task.loss(trial.model, indices).backward()
        if number % 3 == 2:
            trial.optimizer.step(samples=0)
            assert all(p.grad is None for p in trial.model.parameters())
        else:
            trial.recorder.micro_batch(indices.tolist())
            trial.optimizer.step(samples=len(indices))
    assert ledger.drawn[ranks.rank] == drawn
    assert ledger.drawn.sum() >= 90
    trial.check()


@scenario
def the_length_of_a_batch_is_known(ranks: Ranks) -> None:
    """Inside ``epoch`` ``step()`` needs no ``samples=``."""
    task, model = Regression(), small_model()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    drawn = 0
    for indices in optimizer.epoch(task.loader(ranks)):
        task.loss(model, indices).backward()
        optimizer.step()
        drawn += len(indices)
    assert optimizer._rounds.driver.engine.ledger.weight[ranks.rank] == drawn


@scenario
def synchronize_in_the_middle(ranks: Ranks) -> None:
    """All ranks may close within an epoch, e.g. to evaluate, and go on with it."""
    trial = Trial(ranks)
    trial.recorder.opened()
    closed_at = None
    for number, indices in enumerate(trial.optimizer.epoch(trial.task.loader(ranks), samples_per_epoch=400)):
        trial.task.loss(trial.model, indices).backward()
        trial.nap()
        trial.recorder.micro_batch(indices.tolist())
        trial.optimizer.step(samples=len(indices))
        if number == 2:
            trial.optimizer.synchronize()
            trial.optimizer.state_dict()
            closed_at = trial.optimizer.last_round.round
            trial.recorder.opened()
    ranks.assert_same(closed_at, "round that closed in the middle")
    _assert_closed(ranks, trial)
    trial.check()


@scenario
def slow_ranks_and_large_dataset(ranks: Ranks) -> list[float]:
    """Ranks of unlike speed share an epoch by their speed: the slowest does least."""
    trial = Trial(ranks)
    naps = [0.002, 0.002, 0.02, 0.04]
    trial.recorder.opened()
    for indices in trial.optimizer.epoch(trial.task.loader(ranks), samples_per_epoch=1500):
        trial.task.loss(trial.model, indices).backward()
        time.sleep(naps[ranks.rank])
        trial.recorder.micro_batch(indices.tolist())
        trial.optimizer.step(samples=len(indices))
    shares = [sum(record.samples[rank] for record in trial.optimizer.history) for rank in range(ranks.size)]
    assert min(shares[:2]) > max(shares[2:]) > 0, shares
    trial.check()
    return shares


@scenario(gloo=True)
def history(ranks: Ranks) -> None:
    """``history`` and ``last_round``: rounds, samples and seconds by rank, the same on all ranks but for the merge."""
    trial = Trial(ranks, options={"max_micro_batches": 2})
    assert trial.optimizer.last_round is None
    assert trial.optimizer.samples_seen == 0
    naps = Naps(ranks.rank, 0.002)
    for indices in trial.optimizer.epoch(trial.task.loader(ranks)):
        trial.task.loss(trial.model, indices).backward()
        naps()
        time.sleep(0.01 if ranks.rank == 0 else 0)
        trial.optimizer.step(samples=len(indices))
    records = trial.optimizer.history
    assert records[-1] == trial.optimizer.last_round
    assert [record.round for record in records] == list(range(len(records)))
    agreed = [(r.samples, r.micro_batches, r.compute_seconds, r.wait_seconds) for r in records]
    ranks.assert_same(agreed, "history")
    assert all(len(r.samples) == ranks.size and sum(r.samples) == r.batch for r in records)
    assert all(
        (r.compute_seconds[rank] > 0) == (r.micro_batches[rank] > 0) for r in records for rank in range(ranks.size)
    )
    assert sum(r.compute_seconds[0] for r in records) >= 0.01 * sum(r.micro_batches[0] for r in records)
    assert sum(r.wait_seconds[rank] for r in records for rank in range(1, ranks.size)) > 0, "who is fast waits here"
    assert all(r.exchange_seconds > 0 for r in records)
    merged_at = [r.merged_at for r in records]
    assert merged_at == sorted(merged_at)
    assert merged_at[0] >= 0
    assert trial.optimizer.samples_seen == sum(r.batch for r in records)


@scenario
def wrong_loaders(ranks: Ranks) -> None:
    """Refused before any rank enters an exchange."""
    task, model = Regression(), small_model()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    unordered = torch.utils.data.DataLoader(task, 4, num_workers=1, in_order=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="in_order"):
        optimizer.epoch(unordered)
    with pytest.raises(ValueError, match=r"no length.*samples_per_epoch=.*rounds="):
        optimizer.epoch(torch.arange(3) for _ in range(3))
    with pytest.raises(ValueError, match="not by both"):
        optimizer.epoch(task.loader(ranks), samples_per_epoch=10, rounds=3)
    with pytest.raises(ValueError, match="positive"):
        optimizer.epoch(task.loader(ranks), samples_per_epoch=0)
    optimizer.synchronize()


@scenario
def epoch_after_an_open_loop(ranks: Ranks) -> None:
    """A loop without ``epoch`` must be closed before an epoch begins, and the error says how."""
    task, model = Regression(), small_model()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    task.loss(model, torch.arange(3)).backward()
    optimizer.step(samples=3)
    with pytest.raises(RuntimeError, match=r"rounds are pending.*with synchronize\(\)"):
        next(iter(optimizer.epoch(task.loader(ranks))))
    optimizer.synchronize()
    for indices in optimizer.epoch(task.loader(ranks)):
        task.loss(model, indices).backward()
        optimizer.step()
    ranks.assert_same(digest(model), "parameters")


@scenario(gloo=True)
def busy_longer_than_the_timeout(ranks: Ranks) -> None:
    """A rank that evaluates inside ``authoritative()`` is waited for, beyond ``exchange_timeout``."""
    trial = Trial(ranks, options={"max_micro_batches": 2})
    trial.train(trial.task.loader(ranks))  # what is slow the first time has happened
    trial.optimizer._rounds.driver._timeout = 3.0
    trial.recorder.opened()
    for number, indices in enumerate(trial.optimizer.epoch(trial.task.loader(ranks))):
        trial.task.loss(trial.model, indices).backward()
        trial.recorder.micro_batch(indices.tolist())
        trial.optimizer.step(samples=len(indices))
        if ranks.rank == 1 and number == 1:
            with trial.optimizer.authoritative():
                time.sleep(8)
    assert max(max(record.micro_batches) for record in trial.optimizer.history) == 2, "who waits piles up no batch"
    _assert_closed(ranks, trial)
    trial.check()


@scenario
def authoritative_parameters(ranks: Ranks) -> None:
    """Inside ``authoritative()`` all ranks that stand at the same merge have the same parameters."""
    trial = Trial(ranks)
    for _ in range(2):
        trial.train(trial.task.loader(ranks))
        with trial.optimizer.authoritative():
            ranks.assert_same(digest(trial.model), "parameters")
            ranks.assert_same(float(trial.task.loss(trial.model, torch.arange(90)).detach()), "evaluation")
