"""State: broadcast from one rank, saved, loaded, and kept; and process sets, each with a model of its own."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

import horovod_abs.torch as hvd
from tests.torch.replay import Regression, Trial, adam, sgd
from tests.torch.scenario import Ranks, digest, flat, scenario, small_model, wrap


@scenario(gloo=True)
def broadcast_before_training(ranks: Ranks) -> None:
    """Ranks that start from different models and hyper-parameters train one model after the two broadcasts."""
    for make in (sgd, adam):
        trial = Trial(ranks, make, model=small_model(seed=ranks.rank))
        if ranks.rank == 0:
            trial.optimizer.param_groups[0]["lr"] = 0.02
        hvd.broadcast_parameters(trial.model.state_dict(), root_rank=0)
        ranks.assert_same(digest(trial.model), "parameters")
        hvd.broadcast_optimizer_state(trial.optimizer, root_rank=0)
        ranks.assert_same(trial.optimizer.param_groups[0]["lr"], "learning rate")
        trial.record()  # the broadcast has made the optimizer's state
        trial.train(trial.task.loader(ranks))
        trial.check()
        ranks.assert_same(digest(trial.model), "parameters")


def _save(optimizer: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return file


@scenario
def state_loaded_on_one_rank(ranks: Ranks) -> None:
    """A checkpoint, Adam's state and ledger, that rank 0 alone loads and broadcasts: all go on from it alike."""
    before = Trial(ranks, adam)
    before.train(before.task.loader(ranks))
    saved = _save(before.optimizer)
    # Warm-up and compression depend on the ledger: ranks with unlike ledgers would drift apart.
    options = {"lr_scaling": "linear", "reference_batch_size": 30, "warmup_samples": 10_000}
    trial = Trial(ranks, adam, model=small_model(seed=ranks.rank), options=options)
    if ranks.rank == 0:
        trial.optimizer.load_state_dict(torch.load(saved))
        trial.model.load_state_dict(before.model.state_dict())
    hvd.broadcast_parameters(trial.model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(trial.optimizer, root_rank=0)
    assert digest(trial.model) == digest(before.model)
    ranks.assert_same(trial.optimizer.samples_seen, "samples seen")
    assert trial.optimizer.samples_seen == before.optimizer.samples_seen
    state = trial.optimizer.state[next(trial.model.parameters())]
    ranks.assert_same(state["exp_avg"].tolist(), "Adam's state")
    assert torch.equal(state["exp_avg"], before.optimizer.state[next(before.model.parameters())]["exp_avg"])
    for indices in trial.optimizer.epoch(trial.task.loader(ranks)):
        trial.task.loss(trial.model, indices).backward()
        trial.nap()
        trial.optimizer.step(samples=len(indices))
    ranks.assert_same(digest(trial.model), "parameters")
    ranks.assert_same([r.round for r in trial.optimizer.history], "rounds")


@scenario(gloo=True)
def resumed_run_equals_uninterrupted_run(ranks: Ranks) -> None:
    """Saved after an epoch and loaded into new objects, a run goes on bit by bit as if nothing had happened."""
    task = Regression()

    def begin(model: torch.nn.Module) -> Any:
        return wrap(
            model, adam(model), clock=hvd.CountClock(2), max_micro_batches=2, lr_scaling="sqrt", reference_batch_size=9
        )

    def epoch(model: torch.nn.Module, optimizer: Any, number: int) -> None:
        for indices in optimizer.epoch(task.loader(ranks, seed=number), samples_per_epoch=180):
            task.loss(model, indices).backward()
            optimizer.step()

    whole = small_model()
    uninterrupted = begin(whole)
    for number in range(3):
        epoch(whole, uninterrupted, number)

    first = small_model()
    interrupted = begin(first)
    epoch(first, interrupted, 0)
    saved, parameters = _save(interrupted), copy.deepcopy(first.state_dict())
    second = small_model(seed=1)
    second.load_state_dict(parameters)
    resumed = begin(second)
    resumed.load_state_dict(torch.load(saved))
    for number in (1, 2):
        epoch(second, resumed, number)
    assert digest(second) == digest(whole)
    assert resumed.samples_seen == uninterrupted.samples_seen
    assert resumed.last_round.round == uninterrupted.last_round.round


@scenario
def state_of_and_for_plain_optimizers(ranks: Ranks) -> None:
    """A plain optimizer loads our state, and ours a plain one's."""
    trial = Trial(ranks, adam)
    trial.train(trial.task.loader(ranks))
    plain = adam(trial.model)
    plain.load_state_dict(trial.optimizer.state_dict())
    _assert_same_state(plain, trial.optimizer)
    other = wrap(trial.model, adam(trial.model))
    other.load_state_dict(plain.state_dict())
    _assert_same_state(plain, other)
    assert other.samples_seen == 0
    other.synchronize()


def _assert_same_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> None:
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys() != set()
    for key, values in mine["state"].items():
        for name, value in values.items():
            assert torch.equal(value, theirs["state"][key][name]), (key, name)


@scenario
def state_is_refused_while_pending(ranks: Ranks) -> None:
    """With rounds pending neither saving nor loading would mean anything."""
    trial = Trial(ranks)
    state = trial.optimizer.state_dict()
    trial.task.loss(trial.model, torch.arange(4)).backward()
    trial.optimizer.step(samples=4)
    for action in (trial.optimizer.state_dict, lambda: trial.optimizer.load_state_dict(state)):
        with pytest.raises(RuntimeError, match=r"state_dict\(\) while rounds are pending: call synchronize\(\)"):
            action()
    with pytest.raises(RuntimeError, match=r"hvd\.join\(\) during training.*epoch\(loader\).*synchronize\(\)"):
        hvd.join()
    trial.optimizer.synchronize()
    trial.optimizer.load_state_dict(trial.optimizer.state_dict())


@scenario
def join_after_training(ranks: Ranks) -> None:
    """With nothing pending ``join`` is Horovod's."""
    trial = Trial(ranks)
    trial.train(trial.task.loader(ranks))
    assert hvd.join() in range(ranks.size)


@scenario
def a_checkpoint_of_more_ranks(ranks: Ranks) -> None:
    """A ledger of another number of ranks is refused, with the numbers."""
    trial = Trial(ranks)
    state = trial.optimizer.state_dict()
    ledger = state["horovod_abs"]["ledger"]
    ledger["weight"], ledger["drawn"] = [0.0] * 7, [0.0] * 7
    with pytest.raises(ValueError, match=f"written by 7 ranks, this run has {ranks.size}"):
        trial.optimizer.load_state_dict(state)
    trial.optimizer.synchronize()


@scenario
def deep_copies(ranks: Ranks) -> None:
    """A copy of the optimizer has state and options; stepping it says why it cannot and what to do."""
    trial = Trial(ranks, adam)
    trial.train(trial.task.loader(ranks))
    twin = copy.deepcopy(trial.optimizer)
    assert isinstance(twin, torch.optim.Adam)
    assert twin.param_groups[0]["lr"] == 0.01
    assert len(twin.state) == len(list(trial.model.parameters()))
    with pytest.raises(RuntimeError, match=r"copy of a distributed optimizer.*pass a plain optimizer"):
        twin.step(samples=1)
    with pytest.raises(RuntimeError, match="copy of a distributed optimizer"):
        twin.synchronize()
    trial.train(trial.task.loader(ranks))
    trial.check()


@scenario(gloo=True)
def process_sets(ranks: Ranks) -> None:
    """Ranks 0 and 1 train together; 2 and 3 too where there are four, and else rank 2 steps by itself."""
    sets = [hvd.add_process_set([0, 1])] + ([hvd.add_process_set([2, 3])] if ranks.size == 4 else [])
    mine = sets[1] if ranks.size == 4 and ranks.rank >= 2 else sets[0]
    partners = {0: [0, 1], 1: [0, 1], 2: [2, 3] if ranks.size == 4 else [2], 3: [2, 3]}[ranks.rank]
    task, model = Regression(), small_model(seed=partners[0])
    optimizer = wrap(model, sgd(model), process_set=mine)
    for _ in range(2):
        for indices in optimizer.epoch(task.loader(ranks)):
            task.loss(model, indices).backward()
            optimizer.step()
    everyone = ranks.gather((digest(model), optimizer.samples_seen, len(optimizer.history[0].samples)))
    assert {everyone[rank] for rank in partners} == {everyone[ranks.rank]}, everyone
    assert everyone[ranks.rank][2] == len(partners)
    assert len({each for each, _, _ in everyone}) == 2, "the sets have trained different models"
    assert not torch.equal(flat(model), flat(small_model(seed=partners[0])))
    for each in sets:
        hvd.remove_process_set(each)
