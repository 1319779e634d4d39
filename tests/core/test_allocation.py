"""Who works on which samples: exactly once, nobody idle, all ending together, under random schedules in virtual time.

The programs below draw as PyTorch's ``DataLoader`` does: with workers it pulls the indices of many batches before it
hands out the first, and the indices of another before each further one.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_abs.core.allocation import Allocation, Loading, pour
from horovod_abs.core.clocks import Clock, CountClock, IntervalClock, SyncClock
from horovod_abs.core.engine import Engine
from horovod_abs.core.ledger import Column, Entry
from horovod_abs.sim.cluster import Compute, Open, Program, Starve, Synchronize, VirtualCluster


@dataclass
class Epoch:
    """One epoch on a virtual cluster, with a loader that draws ahead on each rank."""

    length: int
    loading: list[Loading]
    seconds: list[float]
    clock: Clock = field(default_factory=SyncClock)
    delay: int = 1
    exchange: float = 0.02
    jitter: float = 0.1
    slower: tuple[int, float, float] | None = None  # rank, from when, by what
    seed: int = 0

    def __post_init__(self) -> None:
        ranks = range(len(self.seconds))
        self.engines = [Engine(len(ranks), self.clock, rank=rank, delay=self.delay) for rank in ranks]
        self.allocations = [Allocation(self.length, self.loading) for _ in ranks]
        self.drawn: list[list[int]] = [[] for _ in ranks]
        self.cluster = VirtualCluster(
            self.engines,
            [self.program(rank) for rank in ranks],
            lambda _: self.exchange,
            on_merge=lambda rank, entry: self.allocations[rank].merge(entry),
        )

    def program(self, rank: int) -> Program:
        engine, allocation, loading = self.engines[rank], self.allocations[rank], self.loading[rank]
        noise = random.Random(f"{self.seed} {rank}")
        ahead: deque[list[int]] = deque()
        pulled = 0
        yield Open(self.length, exact=True)
        while True:
            while len(ahead) < loading.ahead // loading.batch + 1:
                queue = [position for start, stop in allocation.queues[rank] for position in range(start, stop)]
                batch = queue[pulled : pulled + loading.batch]
                if len(batch) == loading.batch or (batch and allocation.exhausted):
                    ahead.append(batch)
                    pulled += len(batch)
                elif allocation.exhausted or not engine.epoch_open:
                    break
                else:
                    yield Starve()
            if not ahead:
                break
            batch = ahead.popleft()
            seconds = self.seconds[rank] * max(0.1, noise.gauss(1, self.jitter))
            if self.slower and self.slower[0] == rank and self.cluster.now > self.slower[1]:
                seconds *= self.slower[2]
            self.drawn[rank] += batch
            if (
                allocation.exhausted and not ahead
            ):  # the rank's last: its gradient and its indices are launched together
                yield Compute(len(batch), seconds)
            else:
                yield Compute(len(batch), seconds, drawn=0)
                engine.data_drawn(len(batch))
        while engine.epoch_open:
            yield Starve()

    def run(self) -> Epoch:
        self.cluster.run()
        return self

    @property
    def share_of_ideal(self) -> float:
        """Of the speed that the ranks would have if none of them ever waited."""
        return self.length / self._speed / max(rank.ended or 0.0 for rank in self.cluster.ranks)

    @property
    def _speed(self) -> float:
        """Samples per second of all ranks together."""
        return sum(rank.batch / seconds for rank, seconds in zip(self.loading, self.seconds, strict=True))


@dataclass
class FlowingEpochs(Epoch):
    """Epochs that flow into one another, as with ``drain=False``, and a close at the end of the last.

    Attributes:
        ends: When each rank merged the last sample of each epoch, in seconds.
        waited: How long it had waited until then.
    """

    number: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ends: list[list[float]] = [[] for _ in self.seconds]
        self.waited: list[list[float]] = [[] for _ in self.seconds]
        self.allocations = [Allocation(self.length, self.loading, endless=True) for _ in self.loading]
        self.cluster._on_merge = self._merge

    def _merge(self, rank: int, entry: Entry) -> None:
        self.allocations[rank].merge(entry)
        if self.allocations[rank].drawn.sum() >= (len(self.ends[rank]) + 1) * self.length:
            self.ends[rank].append(self.cluster.now)
            self.waited[rank].append(self.cluster.ranks[rank].waiting)

    def program(self, rank: int) -> Program:
        noise = random.Random(f"{self.seed} {rank}")
        ahead = pulled = 0
        yield Open()
        while self.allocations[rank].drawn.sum() < self.number * self.length:
            while ahead < self.loading[rank].ahead + self.loading[rank].batch:
                if self.allocations[rank].assigned[rank] - pulled < self.loading[rank].batch:
                    yield Starve()
                    continue
                pulled += self.loading[rank].batch
                ahead += self.loading[rank].batch
            ahead -= self.loading[rank].batch
            yield Compute(self.loading[rank].batch, self.seconds[rank] * max(0.1, noise.gauss(1, self.jitter)), drawn=0)
            self.engines[rank].data_drawn(self.loading[rank].batch)
        yield Synchronize()

    @property
    def share_between(self) -> float:
        """Of the ideal, from the end of the first epoch to the end of the last."""
        return (self.number - 1) * self.length / self._speed / (self.ends[0][-1] - self.ends[0][0])

    @property
    def share_of_ideal(self) -> float:
        return self.number * self.length / self._speed / max(rank.ended or 0.0 for rank in self.cluster.ranks)


@st.composite
def epochs(draw: st.DrawFn) -> Epoch:
    ranks = draw(st.integers(1, 8))
    batches = draw(st.lists(st.integers(1, 32), min_size=ranks, max_size=ranks))
    workers = draw(st.sampled_from([0, 1, 2, 4]))
    times = st.sampled_from([0.01, 0.02, 0.05, 0.1, 0.3])
    slower = draw(st.sampled_from([None, 0.3, 3.0, 10.0]))
    return Epoch(
        length=draw(st.integers(1, 3000)),
        loading=[Loading(batch, workers * 2 * batch) for batch in batches],
        seconds=draw(st.lists(times, min_size=ranks, max_size=ranks)),
        clock=draw(st.sampled_from([SyncClock(), CountClock(2), IntervalClock(0.2)])),
        delay=draw(st.sampled_from([0, 1])),
        exchange=draw(st.sampled_from([0.001, 0.05, 0.4])),
        jitter=draw(st.sampled_from([0.0, 0.1, 0.5])),
        slower=None if slower is None else (draw(st.integers(0, ranks - 1)), 0.5, slower),
        seed=draw(st.integers(0, 1000)),
    )


@given(epochs())
def test_every_sample_is_drawn_exactly_once_and_all_ranks_end_together(epoch: Epoch) -> None:
    epoch.run()
    assert sorted(position for drawn in epoch.drawn for position in drawn) == list(range(epoch.length))
    assert all(engine.closed for engine in epoch.engines)
    assert len({len(rank.merges) for rank in epoch.cluster.ranks}) == 1
    assert all(allocation.queues == epoch.allocations[0].queues for allocation in epoch.allocations)


@given(epochs())
def test_queues_are_append_only_and_hold_whole_micro_batches_but_for_the_last(epoch: Epoch) -> None:
    before: list[list[tuple[int, int]]] = [[] for _ in epoch.loading]

    def watch(rank: int, entry: Entry) -> None:
        allocation = epoch.allocations[rank]
        allocation.merge(entry)
        if rank == 0:
            for index, queue in enumerate(allocation.queues):
                flat = [position for start, stop in queue for position in range(start, stop)]
                old = [position for start, stop in before[index] for position in range(start, stop)]
                assert flat[: len(old)] == old
                assert allocation.exhausted or len(flat) % epoch.loading[index].batch == 0
                before[index] = list(queue)

    epoch.cluster._on_merge = watch
    epoch.run()


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("length", "share"), [(5_000, 0.93), (50_000, 0.99)])
def test_what_an_epochs_tail_costs(length: int, share: float, workers: int) -> None:
    loading = [Loading(16, workers * 2 * 16)] * 4
    epoch = Epoch(length, loading, [0.02, 0.02, 0.04, 0.08], jitter=0.05).run()
    assert epoch.share_of_ideal >= share


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("length", "share"), [(5_000, 0.96), (50_000, 0.99)])
def test_epochs_that_flow_into_one_another_have_no_tail(length: int, share: float, workers: int) -> None:
    """What is lost is lost once: at the start, before the speeds are known, and at the close."""
    loading = [Loading(16, workers * 2 * 16)] * 4
    run = FlowingEpochs(length, loading, [0.02, 0.02, 0.04, 0.08], jitter=0.05).run()
    assert run.share_between == pytest.approx(1.0, abs=0.01)
    assert run.share_of_ideal >= share
    assert all(waited[0] == waited[run.number - 1] for waited in run.waited), "nobody waits between them"


def test_nobody_is_idle_while_another_has_more_than_two_rounds_of_work_left() -> None:
    """A rank waits only near the end, when the others hold at most about two rounds of work (and a micro-batch)."""
    epoch = Epoch(20_000, [Loading(16)] * 4, [0.02, 0.02, 0.04, 0.08], jitter=0.1, slower=(1, 2.0, 4.0)).run()
    longest = max(entry.column(Column.COMPUTE_SECONDS).max() for entry in epoch.cluster.entries)
    end = max(rank.ended or 0.0 for rank in epoch.cluster.ranks)
    assert all(rank.waiting <= 2 * longest + 0.08 + 2 * epoch.exchange for rank in epoch.cluster.ranks)
    assert end < 60


@given(
    st.integers(1, 500),
    st.lists(st.tuples(st.integers(0, 300), st.floats(0.1, 1000), st.integers(1, 64)), min_size=1, max_size=8),
)
def test_what_is_left_is_poured_completely_and_levelly(rest: int, ranks: list[tuple[int, float, int]]) -> None:
    held, rates, batches = (np.array(column, dtype=float) for column in zip(*ranks, strict=True))
    give = pour(rest, held, rates, batches.astype(int))
    assert give.sum() == rest
    assert (give >= 0).all()
    assert sum(int(samples) % int(batch) != 0 for samples, batch in zip(give, batches, strict=True)) <= 1
    finish = (held + give) / rates
    for rank in np.flatnonzero(give):
        others = np.min((held + give + batches) / rates)
        assert finish[rank] - batches[rank] / rates[rank] <= others + 1e-9, "would have finished sooner elsewhere"


def test_an_allocation_goes_on_from_its_state() -> None:
    whole = Epoch(2_000, [Loading(16)] * 3, [0.02, 0.03, 0.09]).run()
    entries, half = whole.cluster.entries, len(whole.cluster.entries) // 2
    first = Allocation(2_000, [Loading(16)] * 3)
    for entry in entries[:half]:
        first.merge(entry)
    second = Allocation.from_state_dict(first.state_dict())
    for entry in entries[half:]:
        second.merge(entry)
    assert second.state_dict() == whole.allocations[0].state_dict()


def test_endless_positions_go_on_into_the_next_epoch() -> None:
    allocation = Allocation(10, [Loading(4), Loading(4)], endless=True)
    assert allocation.cursor == 32, "four micro-batches for each rank"
    assert not allocation.exhausted


@pytest.mark.parametrize(("length", "loading"), [(0, Loading(4)), (5, Loading(0)), (5, Loading(4, -1))])
def test_arguments_are_checked(length: int, loading: Loading) -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        Allocation(length, [loading])
