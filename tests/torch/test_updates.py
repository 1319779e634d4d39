"""Model updates in virtual time: the production payload, driver and engine on many ranks of one process.

The lemmas are those of [NoDelay], as restated in the project's notes: 3.1, 3.2 and 3.3.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import horovod_abs.torch as hvd
from horovod_abs.bench.storages import LiveStorages
from horovod_abs.bench.virtual import VirtualRank, VirtualTraining
from horovod_abs.core.clocks import Clock, CountClock, IntervalClock, SyncClock, TargetBatchClock
from horovod_abs.core.ledger import Column, Entry, Flag, Floats, Ledger
from horovod_abs.core.scaling import Scaling
from horovod_abs.observe.schedule import RecordedRound
from horovod_abs.torch.exchanges import ModelUpdates
from horovod_abs.torch.formulas import UpdateRules, compute
from horovod_abs.torch.payloads import Options
from horovod_abs.torch.updates import UpdatePayload

MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Many small tensors: on a busy machine several threads wait for each other most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-3)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def small_model(seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).to(dtype)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


BAD = 1_000_000
"""A sample of this index or above has a loss that is not a number."""


class Task:
    """Samples known by their index, in unlimited number; each is made from its index when it is needed."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.dtype = dtype
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(512, 3, generator=generator, dtype=torch.float64).to(dtype)
        self.y = torch.sin(3 * self.x.sum(1, keepdim=True))

    def loss(self, model: torch.nn.Module, indices: list[int]) -> torch.Tensor:
        rows = torch.tensor(indices) % len(self.x)
        loss = ((model(self.x[rows]) - self.y[rows]) ** 2).mean()
        return loss * float("nan") if max(indices) >= BAD else loss


class Watched(UpdatePayload):
    """Writes down what it hands over, and what becomes of it.

    Attributes:
        before, after: The rank's model just before and after each launch.
        weights: This rank's weight in each exchange.
        central: The central model after each merge.
    """

    def __init__(self, *arguments: Any) -> None:
        self.before: list[torch.Tensor] = []
        self.after: list[torch.Tensor] = []
        self.weights: list[float] = []
        self.central: list[torch.Tensor] = []
        super().__init__(*arguments)

    def model(self) -> torch.Tensor:
        return torch.cat([p.detach().double().flatten() for p in self.parameters])

    def launch(self, row: Floats, ledger: Ledger) -> None:
        self.before.append(self.model())
        super().launch(row, ledger)
        self.after.append(self.model())
        weight = float(self._mine[Column.WEIGHT])
        self.weights.append(weight if self._exchange.weighting == "samples" else float(weight > 0))

    def apply(self, entry: Entry, samples_before: float) -> bool:
        finite = super().apply(entry, samples_before)
        self.central.append(torch.cat([view.detach().double().flatten() for view in self._central.views]))
        return finite


@dataclass
class Setting:
    """What a virtual run is made of; all that is random in it follows from ``seed``."""

    size: int = 3
    exchange: ModelUpdates = field(default_factory=ModelUpdates)
    clock: Clock = field(default_factory=SyncClock)
    options: Options = field(default_factory=lambda: Options(Scaling()))
    make: MakeOptimizer = sgd
    spread: int = 3
    jitter: float = 0.3
    exchange_seconds: float = 3.0
    micro_batches: int = 20
    sessions: int = 2
    skipping: float = 0.0
    min_micro_batches: int = 1
    seed: int = 0
    dtype: torch.dtype = torch.float64
    bad: tuple[tuple[int, int], ...] = ()
    same_data: bool = False


class Run:
    """A virtual run, and the record of which samples went into which round."""

    def __init__(self, setting: Setting, payload: type[UpdatePayload] = Watched) -> None:
        self.setting = setting
        self.task = Task(setting.dtype)
        self.model = small_model(setting.seed, setting.dtype)
        self.micro_batches: list[list[tuple[int, list[int]]]] = [[] for _ in range(setting.size)]
        self.drained: set[int] = set()
        self.staleness = 0
        self.training = VirtualTraining(
            [self._rank(number) for number in range(setting.size)],
            setting.exchange,
            setting.clock,
            lambda k: setting.exchange_seconds * Random(f"{setting.seed} exchange {k}").choice((0.2, 1.0, 1.0, 2.0)),
            options=setting.options,
            min_micro_batches=setting.min_micro_batches,
            update_payload=payload,
        )
        for session in range(1, setting.sessions + 1):
            self.drained.add(self.training.ranks[0].driver.engine.launches)
            ends = session * setting.micro_batches
            self.training.run(lambda rank: rank.micro_batches < ends)  # noqa: B023  (called within the iteration)

    @property
    def payloads(self) -> list[Any]:
        return [rank.payload for rank in self.training.ranks]

    @property
    def entries(self) -> list[Entry]:
        return list(self.training.ranks[0].driver.engine.ledger.recent)

    def _rank(self, number: int) -> VirtualRank:
        setting, random = self.setting, Random(f"{self.setting.seed} {number}")
        speed = random.randint(1, setting.spread)
        model = copy.deepcopy(self.model)

        def gradients() -> float:
            done = len(self.micro_batches[number])
            drawn = done if setting.same_data else random.randrange(10_000)
            indices = list(range(drawn, drawn + (4 if setting.same_data else random.choice((1, 2, 5, 8)))))
            if random.random() < setting.skipping:
                indices = []
            if (number, done) in setting.bad:
                indices.append(BAD)
            engine = self.training.ranks[number].driver.engine
            self.staleness = max(self.staleness, engine.staleness + 1)
            self.micro_batches[number].append((engine.launches, indices))
            model.zero_grad()
            if indices:
                self.loss(model, indices).backward()
            return float(len(indices))

        def seconds() -> float:
            return speed * (1 + setting.jitter * random.expovariate(1))

        return VirtualRank(model, setting.make(model), gradients, seconds)

    def loss(self, model: torch.nn.Module, indices: list[int]) -> torch.Tensor:
        loss = self.task.loss(model, indices)
        return loss * len(indices) if self.setting.options.loss_reduction == "sum" else loss

    def rounds(self) -> list[RecordedRound]:
        launches = self.training.ranks[0].driver.engine.launches
        micro_batches: list[list[list[list[int]]]] = [[[] for _ in self.micro_batches] for _ in range(launches)]
        for rank, record in enumerate(self.micro_batches):
            for round, indices in record:
                micro_batches[round][rank].append(indices)
        return [RecordedRound(each, number in self.drained) for number, each in enumerate(micro_batches)]

    def replayed(self) -> tuple[torch.nn.Module, list[torch.Tensor]]:
        """The same run by the formulas: the central model at the end, and after each round."""
        setting, exchange, options = self.setting, self.setting.exchange, self.setting.options
        rules = UpdateRules(
            max_staleness=exchange.max_staleness,
            weighting=exchange.weighting,
            average_state=exchange.average_state,
            outer=exchange.outer,
            min_micro_batches=setting.min_micro_batches,
            clip_grad_norm=options.clip_grad_norm,
            loss_reduction=options.loss_reduction,
            scaling=options.scaling,
        )
        model = copy.deepcopy(self.model)
        history = compute(self.rounds(), model, setting.make(model), self.loss, rules)
        return model, [torch.from_numpy(np.concatenate([x.ravel() for x in each])) for each in history]

    def check_replay(self, tolerance: float = 1e-10, rounds: int | None = None) -> None:
        """The central model after every round (or the first few) is that of the replay."""
        _, history = self.replayed()
        assert len(history) == len(self.entries) > 2
        for number, (mine, expected) in enumerate(zip(self.payloads[0].central, history, strict=True)):
            if rounds is None or number < rounds:
                assert (mine - expected).abs().max() <= tolerance, f"round {number}"

    def check_same(self) -> None:
        """All ranks end with the same central model, bit by bit, and saw the same ones before."""
        for rank, payload in zip(self.training.ranks, self.payloads, strict=True):
            assert torch.equal(flat(rank.model), flat(self.training.ranks[0].model))
            assert torch.equal(flat(rank.model), payload.central[-1])
            assert all(map(torch.equal, payload.central, self.payloads[0].central))


@st.composite
def random_settings(draw: st.DrawFn, **fixed: Any) -> Setting:
    """Clusters of 1 to 6 ranks, quick and slow, under every clock."""
    staleness = draw(st.sampled_from((1, 2, 3, 4, 8, 16)))
    count = draw(st.integers(1, min(staleness, 6)))
    clocks = (SyncClock(), SyncClock(), CountClock(count), IntervalClock(5.0), TargetBatchClock(80))
    values = {
        "size": draw(st.sampled_from((1, 2, 3, 4, 6))),
        "exchange": ModelUpdates(staleness, draw(st.sampled_from(("samples", "workers")))),
        "clock": draw(st.sampled_from(clocks)),
        "make": draw(st.sampled_from((sgd, momentum, adam))),
        "spread": draw(st.sampled_from((1, 2, 6))),
        "jitter": draw(st.sampled_from((0.0, 0.1, 2.0))),
        "exchange_seconds": draw(st.sampled_from((0.0, 0.5, 3.0, 20.0))),
        "micro_batches": draw(st.sampled_from((9, 15))),
        "skipping": draw(st.sampled_from((0.0, 0.0, 0.2))),
        "min_micro_batches": draw(st.sampled_from((1, 1, 1, min(2, staleness)))),
        "seed": draw(st.integers(0, 2**32)),
    }
    return Setting(**{**values, **fixed})


few = settings(max_examples=25)


# -- the lemmas ------------------------------------------------------------------------------------------------------


def mean(run: Run, models: list[torch.Tensor], round: int, weights_of: int | None = None) -> torch.Tensor:
    """The mean of the ranks' models, with their weights in a round."""
    weights = [payload.weights[round if weights_of is None else weights_of] for payload in run.payloads]
    return sum((w * m for w, m in zip(weights, models, strict=True)), torch.zeros(())) / sum(weights)


@few
@given(random_settings())
def test_lemma_3_1(setting: Setting) -> None:
    """The central model that exchange k makes is the mean, with its weights, of the models just after its launch."""
    run = Run(setting)
    run.check_same()
    for round, entry in enumerate(run.entries):
        if entry.weight:
            models = [payload.after[round] for payload in run.payloads]
            torch.testing.assert_close(run.payloads[0].central[round], mean(run, models, round), rtol=0, atol=1e-13)


def in_mid_run(run: Run) -> list[int]:
    """Rounds that began with all ranks' last updates on their way and in which all ranks took part."""
    full = [all(payload.weights[k] for payload in run.payloads) for k in range(len(run.entries))]
    return [k for k in range(1, len(full)) if full[k] and full[k - 1] and k not in run.drained]


@few
@given(random_settings(exchange=ModelUpdates(16, "workers"), skipping=0.0))
def test_lemma_3_2(setting: Setting) -> None:
    """With equal weights, going on from the central model leaves the mean of the ranks' models where it is."""
    run = Run(setting)
    for round in in_mid_run(run):
        before, after = ([getattr(p, when)[round] for p in run.payloads] for when in ("before", "after"))
        torch.testing.assert_close(mean(run, before, round), mean(run, after, round), rtol=0, atol=1e-13)


@pytest.mark.parametrize("weighting", ["samples", "workers"])
def test_lemma_3_2_fails_by_the_change_of_weights(weighting: Any) -> None:
    """With weights that change from round to round the mean moves, by exactly Σ (w_i^{k−1} − w_i^k) u_i^{k−1}."""
    run = Run(Setting(4, ModelUpdates(16, weighting), micro_batches=40, sessions=1, seed=3))
    moved = []
    for round in in_mid_run(run):
        before, after = ([getattr(p, when)[round] for p in run.payloads] for when in ("before", "after"))
        shares = [np.array([p.weights[k] for p in run.payloads]) for k in (round - 1, round)]
        last, now = (weights / weights.sum() for weights in shares)
        central = run.payloads[0].central[round - 2] if round > 1 else flat(run.model)
        updates = [payload.after[round - 1] - central for payload in run.payloads]
        expected = sum((w - v) * u for w, v, u in zip(last, now, updates, strict=True))
        move = mean(run, after, round) - mean(run, before, round)
        torch.testing.assert_close(move, expected, rtol=0, atol=1e-13)
        moved.append(float(move.norm() / torch.stack(updates).norm(dim=1).mean()))
    assert len(moved) > 10
    if weighting == "samples":
        assert 0.02 < np.mean(moved) < 0.5, "a share of what a rank's model moves in a round"
    else:
        assert max(moved) < 1e-12


@few
@given(random_settings(options=Options(Scaling(), clip_grad_norm=0.5), make=sgd))
def test_lemma_3_3(setting: Setting) -> None:
    """After the reset two ranks differ by at most 2 L τ η, with gradients bounded by L (clipping sees to that)."""
    run = Run(setting)
    bound = 2 * 0.5 * setting.exchange.max_staleness * 0.1
    for round in range(len(run.entries)):
        models = torch.stack([payload.after[round] for payload in run.payloads])
        assert torch.cdist(models, models).max() <= bound * (1 + 1e-9)


def test_lemma_3_3_can_be_reached() -> None:
    """Ranks that pull apart differ by 2 L τ η / 2: each hands over half of its τ steps at once (algorithm 2)."""
    staleness, rate, limit = 8, 0.1, 0.5

    def rank(number: int) -> VirtualRank:
        weight = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)

        def gradients() -> float:
            weight.weight.grad = torch.full_like(weight.weight, limit if number else -limit)
            return 1.0

        torch.nn.init.zeros_(weight.weight)
        return VirtualRank(weight, torch.optim.SGD(weight.parameters(), rate), gradients, lambda: 1.0)

    ranks = [rank(number) for number in range(2)]
    training = VirtualTraining(
        ranks, ModelUpdates(staleness), CountClock(staleness // 2), lambda k: 2.0, update_payload=Watched
    )
    training.run(lambda rank: rank.micro_batches < 40)
    payloads: list[Any] = [rank.payload for rank in ranks]
    apart = [float((one - other).abs()) for one, other in zip(payloads[0].after, payloads[1].after, strict=True)]
    assert max(apart) == pytest.approx(2 * limit * staleness * rate / 2)
    assert ranks[0].model.weight.item() == pytest.approx(0, abs=1e-12)


# -- the formulas ----------------------------------------------------------------------------------------------------


@few
@given(random_settings(), st.sampled_from(("mean", "sum")))
def test_equals_the_formulas(setting: Setting, reduction: str) -> None:
    setting.options = Options(Scaling("linear", 1.0, 7), clip_grad_norm=0.8, loss_reduction=reduction)
    run = Run(setting)
    run.check_replay()
    assert run.staleness <= setting.exchange.max_staleness


@pytest.mark.parametrize(("staleness", "least"), [(1, 1), (3, 2), (5, 3)])
@pytest.mark.parametrize("average_state", [False, True])
def test_a_round_that_goes_on_after_a_merge_equals_the_formulas(
    staleness: int, least: int, average_state: bool
) -> None:
    """At its greatest staleness with too little to hand over, a rank waits, and goes on from the new central model."""
    exchange = ModelUpdates(staleness, average_state=average_state)
    run = Run(Setting(3, exchange, make=momentum, min_micro_batches=least, exchange_seconds=20))
    run.check_same()
    run.check_replay()
    counts = np.array([entry.column(Column.MICRO_BATCHES) for entry in run.entries])
    assert ((staleness - least < counts) & (counts <= staleness)).any(), "so many in flight leave too few for a round"


@pytest.mark.parametrize("make", [sgd, momentum, adam])
def test_equals_the_formulas_in_single_precision(make: MakeOptimizer) -> None:
    """To 1e-6 over 10 rounds; the order of summation differs, so later rounds drift apart."""
    Run(Setting(4, make=make, dtype=torch.float32)).check_replay(1e-6, rounds=10)


@few
@given(random_settings(make=adam, bad=((0, 3), (1, 0), (1, 7)), skipping=0.0))
def test_updates_that_are_not_finite_are_dropped(setting: Setting) -> None:
    """They weigh nothing, the rank goes on from the central model, and its optimizer begins anew."""
    setting.size = max(setting.size, 2)
    run = Run(setting)
    dropped = [(rank, entry.round) for entry in run.entries for rank in entry.ranks_with(Flag.NONFINITE)]
    bad = {(rank, run.micro_batches[rank][number][0]) for rank, number in setting.bad}
    assert set(dropped) == bad
    for rank, round in dropped:
        assert run.entries[round].rows[rank, Column.WEIGHT] == 0
        payload = run.payloads[rank]
        assert bool(torch.isfinite(payload.after[round]).all())
    for rank in run.training.ranks:
        for state in rank.optimizer.state.values():
            assert all(bool(torch.isfinite(value).all()) for value in state.values())
    run.check_same()
    run.check_replay()


@pytest.mark.parametrize("make", [momentum, adam])
@pytest.mark.parametrize("clock", [SyncClock(), CountClock(2)])
def test_average_state(make: MakeOptimizer, clock: Clock) -> None:
    """What the optimizer keeps is replaced by its mean, a round old, and goes on from there."""
    exchange = ModelUpdates(4, average_state=True)
    run = Run(Setting(3, exchange, clock, make=make, bad=((2, 5),)))
    run.check_same()
    run.check_replay()
    states = [
        [value for state in rank.optimizer.state.values() for value in state.values() if value.dim()]
        for rank in run.training.ranks
    ]
    assert states[0]
    for other in states[1:]:
        assert all(map(torch.equal, states[0], other)), "closed, all ranks keep the same"
    plain = Run(Setting(3, ModelUpdates(4), clock, make=make, bad=((2, 5),)))
    assert not torch.allclose(flat(plain.training.ranks[0].model), flat(run.training.ranks[0].model))


def test_updates_that_overflow_together_are_dropped_by_all() -> None:
    """Finite on each rank, infinite in sum: nobody is to blame, and everybody forgets that round's steps."""

    def rank() -> VirtualRank:
        layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(layer.weight)
        values = iter((-1.0, -3e38, -2.0))

        def gradients() -> float:
            layer.weight.grad = torch.full_like(layer.weight, next(values))
            return 1.0

        return VirtualRank(layer, torch.optim.SGD(layer.parameters(), 1.0), gradients, lambda: 1.0)

    ranks = [rank() for _ in range(3)]
    VirtualTraining(ranks, ModelUpdates(1), CountClock(1), lambda exchange: 1.0).run(lambda r: r.micro_batches < 3)
    for each in ranks:
        assert each.model.weight.item() == 3.0
        assert (each.driver.overflows, each.driver.nonfinite) == (1, [0, 0, 0])


# -- what it reduces to ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [sgd, momentum, adam])
@pytest.mark.parametrize("clock", [SyncClock(), CountClock(1)])
@pytest.mark.parametrize("weighting", ["samples", "workers"])
def test_one_worker_is_plain_sgd_whose_central_model_is_late(make: MakeOptimizer, clock: Clock, weighting: Any) -> None:
    """A single rank takes its optimizer's steps, whatever is exchanged; the central model has them a round late."""
    setting = Setting(1, ModelUpdates(2, weighting), clock, make=make, sessions=1, same_data=True)
    run = Run(setting)
    model = copy.deepcopy(run.model)
    optimizer = make(model)
    path = [flat(model)]
    for _, indices in run.micro_batches[0]:
        optimizer.zero_grad()
        run.task.loss(model, indices).backward()
        optimizer.step()
        path.append(flat(model))
    assert (flat(run.training.ranks[0].model) - path[-1]).abs().max() < 1e-12
    steps = np.cumsum([0, *(int(entry.rows[0, Column.MICRO_BATCHES]) for entry in run.entries)])
    payload = run.payloads[0]
    for round in range(len(run.entries)):
        assert (payload.after[round] - path[steps[round + 1]]).abs().max() < 1e-12, "the rank's own model"
        if round:
            assert (payload.central[round - 1] - path[steps[round]]).abs().max() < 1e-12, "the model of a round ago"


@pytest.mark.parametrize("staleness", [2, 16])
def test_equal_data_is_plain_sgd_on_every_worker(staleness: int) -> None:
    """Ranks that see the same samples at the same speed walk the same path: averaging changes nothing."""
    setting = Setting(
        4, ModelUpdates(staleness), CountClock(staleness // 2), make=momentum, spread=1, same_data=True, sessions=1
    )
    run = Run(setting)
    model = copy.deepcopy(run.model)
    optimizer = momentum(model)
    for _, indices in run.micro_batches[0]:
        optimizer.zero_grad()
        run.task.loss(model, indices).backward()
        optimizer.step()
    assert (flat(run.training.ranks[0].model) - flat(model)).abs().max() < 1e-12


def outer_sgd(**options: Any) -> Any:
    return functools.partial(torch.optim.SGD, **options)


def test_an_outer_rate_of_1_without_momentum_is_the_papers_rule() -> None:
    paper = Run(Setting(3, ModelUpdates(8), make=momentum))
    outer = Run(Setting(3, ModelUpdates(8, outer=outer_sgd(lr=1.0)), make=momentum))
    for mine, theirs in zip(outer.payloads[0].central, paper.payloads[0].central, strict=True):
        assert (mine - theirs).abs().max() < 1e-14


@pytest.mark.parametrize("outer", [outer_sgd(lr=0.7, momentum=0.9, nesterov=True), outer_sgd(lr=0.3)])
@pytest.mark.parametrize("weighting", ["samples", "workers"])
def test_an_outer_optimizer(outer: Any, weighting: Any) -> None:
    run = Run(Setting(3, ModelUpdates(8, weighting, outer=outer), make=momentum))
    run.check_same()
    run.check_replay()
    without = Run(Setting(3, ModelUpdates(8, weighting), make=momentum))
    assert not torch.allclose(run.payloads[0].central[2], without.payloads[0].central[2])


# -- waiting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [1, 2, 5])
def test_algorithm_2_is_beta_steps_a_round(beta: int) -> None:
    """With CountClock(β) and τ = 2β every round has β steps on every rank, and staleness reaches τ and not more."""
    run = Run(Setting(3, ModelUpdates(2 * beta), CountClock(beta), sessions=1, micro_batches=10 * beta))
    counts = np.array([entry.column(Column.MICRO_BATCHES) for entry in run.entries])
    assert (counts[counts.sum(1) > 0] == beta).all()
    assert len(counts) == 11, "ten of β steps and one to close with"
    assert run.staleness == 2 * beta
    assert not any(entry.ranks_with(Flag.BOUNDED) for entry in run.entries), "the clock ends the rounds"


def test_a_staleness_of_1_is_synchronous() -> None:
    """τ = 1: a rank never steps while its last step is on its way."""
    run = Run(Setting(3, ModelUpdates(1), make=momentum))
    assert run.staleness == 1
    assert all((entry.column(Column.MICRO_BATCHES) <= 1).all() for entry in run.entries)
    run.check_replay()


def test_a_count_beyond_the_staleness_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_micro_batches=9 or more \(and max_staleness, of ModelUpdates\)"):
        Run(Setting(1, ModelUpdates(8), CountClock(9)))
    Run(Setting(1, ModelUpdates(8), CountClock(8)))


def test_more_least_micro_batches_than_staleness_are_refused() -> None:
    with pytest.raises(ValueError, match="min_micro_batches <= max_staleness, got 3 and 2"):
        Run(Setting(1, ModelUpdates(2), min_micro_batches=3))


# -- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("staleness", [1, 8])
def test_half_precision_models_have_a_central_model_in_single(dtype: torch.dtype, staleness: int) -> None:
    """What three ranks' steps of one unit in the last place sum up to is not rounded away from round to round."""
    unit = torch.finfo(dtype).eps

    def rank(number: int) -> VirtualRank:
        layer = torch.nn.Linear(1, 1, bias=False, dtype=dtype)
        torch.nn.init.ones_(layer.weight)

        def gradients() -> float:
            layer.weight.grad = torch.full_like(layer.weight, -unit if number == 0 else 0.0)
            return 1.0

        return VirtualRank(layer, torch.optim.SGD(layer.parameters(), 1.0), gradients, lambda: 1.0)

    ranks = [rank(number) for number in range(3)]
    training = VirtualTraining(ranks, ModelUpdates(staleness), CountClock(1), lambda k: 1.0, update_payload=Watched)
    training.run(lambda rank: rank.micro_batches < 30)
    payload: Any = ranks[0].payload
    assert payload._central.views[0].dtype is torch.float32
    assert payload.central[-1].item() == pytest.approx(1 + 10 * unit, rel=1e-5)
    assert ranks[0].model.weight.item() == 1 + 10 * unit


@pytest.mark.parametrize("size", [1e-7, 1e-3, 30.0])
def test_compressed_updates_small_and_large(size: float) -> None:
    """Updates far below float16's smallest normal number arrive to its relative precision, and large ones too."""
    from horovod.torch.compression import Compression

    def rank(number: int) -> VirtualRank:
        layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(layer.weight)

        def gradients() -> float:
            layer.weight.grad = torch.full_like(layer.weight, -1.0)
            return 100.0 if number else 1.0

        return VirtualRank(layer, torch.optim.SGD(layer.parameters(), size), gradients, lambda: 1.0)

    for weighting in ("samples", "workers"):
        ranks = [rank(number) for number in range(3)]
        exchange, options = ModelUpdates(2, weighting), Options(Scaling(), compression=Compression.fp16)  # type: ignore[arg-type]
        training = VirtualTraining(ranks, exchange, CountClock(1), lambda k: 1.0, options=options)
        training.run(lambda rank: rank.micro_batches < 5)
        assert [rank.driver.overflows for rank in ranks] == [0, 0, 0]
        assert ranks[0].model.weight.item() == pytest.approx(5 * size, rel=2e-3)


def test_averaged_state_is_not_compressed() -> None:
    from horovod.torch.compression import Compression

    options = Options(Scaling(), compression=Compression.fp16)
    with pytest.raises(ValueError, match="average_state=True with compression"):
        Run(Setting(1, ModelUpdates(average_state=True), options=options))


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("single_rank")
@pytest.mark.parametrize(
    ("make", "exchange", "copies"),
    [
        (momentum, ModelUpdates(4), 3),
        (adam, ModelUpdates(4), 3),
        (adam, ModelUpdates(4, average_state=True), 5),
        (momentum, ModelUpdates(4, outer=outer_sgd(lr=0.7, momentum=0.9, nesterov=True)), 4),
    ],
)
def test_three_copies_of_the_model(make: MakeOptimizer, exchange: ModelUpdates, copies: int) -> None:
    """Central model, start and update; the outer optimizer's momentum comes on top, and so do averaged moments."""
    model = torch.nn.Linear(500, 500)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    x = torch.ones(2, 500)

    def train(optimizer: Any, steps: int = 9) -> None:
        for number in range(steps):
            optimizer.zero_grad()
            (model(x) ** 2).mean().backward()
            optimizer.step(**({"samples": 2} if isinstance(optimizer, hvd.DistributedOptimizerMixin) else {}))
            if number == 4 and isinstance(optimizer, hvd.DistributedOptimizerMixin):
                optimizer.synchronize()

    plain = make(model)
    with LiveStorages() as storages:
        train(plain)
        plain.zero_grad()
        kept, peak = storages.live, storages.peak
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), exchange=exchange, clock=CountClock(2))
        storages.mark()
        train(optimizer)
        optimizer.synchronize()
        kept, peak = storages.live - kept, storages.peak - peak
    assert kept / size == pytest.approx(copies, abs=0.01)
    assert peak / size < copies + 0.01, "nor more for a moment"
