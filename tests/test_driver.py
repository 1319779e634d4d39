"""The driver: several of them in threads, over an exchange in memory."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from horovod_abs import shutdown
from horovod_abs.core.clocks import CountClock, IntervalClock, SyncClock
from horovod_abs.core.engine import Engine
from horovod_abs.core.ledger import Column, Entry, Flag, Floats, Ledger
from horovod_abs.driver import Driver
from horovod_abs.errors import ExchangeTimeout, Mismatch, RunError

PATIENCE_SECONDS = 20


class Network:
    """Exchanges of all ranks: complete when all have launched."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rows: list[dict[int, Floats]] = []
        self.known: dict[int, tuple[int, bool]] = {}
        self.lock = threading.Lock()

    def launch(self, number: int, rank: int, row: Floats) -> None:
        with self.lock:
            if number == len(self.rows):
                self.rows.append({})
            assert rank not in self.rows[number]
            self.rows[number][rank] = row

    def complete(self, number: int) -> bool:
        return len(self.rows[number]) == self.size

    def result(self, number: int) -> Floats:
        return np.stack([self.rows[number][rank] for rank in range(self.size)])


class MemoryPayload:
    """Moves nothing but the ledger, and writes down what the driver asks for."""

    launches_first = True

    def __init__(self, network: Network, rank: int) -> None:
        self.network = network
        self.rank = rank
        self.log: list[str] = []
        self.fingerprint = 7
        self.nonfinite_rounds: set[int] = set()
        self.overflowing_rounds: set[int] = set()
        self._launches = 0

    def launch(self, row: Floats, ledger: Ledger) -> None:
        if self._launches in self.nonfinite_rounds:
            row[Column.WEIGHT] = 0
            row[Column.FLAGS] += Flag.NONFINITE
        self.log.append(f"launch {self._launches}")
        self.network.launch(self._launches, self.rank, row)
        self._launches += 1

    def poll(self) -> bool:
        return self.network.complete(self._launches - 1)

    def read(self) -> Floats:
        return self.network.result(self._launches - 1)

    def apply(self, entry: Entry, samples_before: float) -> bool:
        self.log.append(f"apply {entry.round}")
        return entry.round not in self.overflowing_rounds

    def settle(self, closed: bool) -> None:
        pass

    def agree(self) -> None:
        self.log.append("agree")

    def options(self) -> int:
        return self.fingerprint


class MemoryAnnouncer:
    """Satisfies Announcer for one rank of a network."""

    def __init__(self, network: Network, rank: int) -> None:
        self.network = network
        self.rank = rank
        self.announced: list[tuple[int, bool]] = []

    def announce(self, launches: int, *, busy: bool = False) -> None:
        self.announced.append((launches, busy))
        self.network.known[self.rank] = (launches, busy)

    def behind(self, launches: int) -> tuple[list[int], list[int]]:
        known = self.network.known
        others = [rank for rank in range(self.network.size) if rank != self.rank]
        missing = [rank for rank in others if known.get(rank, (0, False))[0] < launches]
        return missing, [rank for rank in missing if known.get(rank, (0, False))[1]]


def make(network: Network, rank: int, *, engine: dict[str, Any] | None = None, **options: Any) -> Driver:
    """A driver of one rank; ``payload`` and ``announcer`` hang off it."""
    rounds = Engine(network.size, **{"clock": SyncClock(), **(engine or {})})
    options = {"announcer": MemoryAnnouncer(network, rank), "exchange_timeout": float(PATIENCE_SECONDS), **options}
    return Driver(rounds, MemoryPayload(network, rank), rank=rank, **options)


def together(size: int, program: Callable[[Driver], Any], **options: Any) -> list[Any]:
    """What ``program`` returns, or raises, on each rank."""
    network = Network(size)
    return in_threads(program, [make(network, rank, **options) for rank in range(size)])


def in_threads(program: Callable[[Any], Any], drivers: list[Any]) -> list[Any]:
    """The same, of drivers that are there already."""
    size = len(drivers)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = program(drivers[rank])
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive(), "a rank hangs"
    return results


def train(driver: Driver, batches: Iterator[int], nap: float = 0.0, **end: Any) -> list[tuple[int, tuple[float, ...]]]:
    """An epoch over batches that are their own sizes; the rounds."""
    for batch in driver.epoch(batches, lambda batch: batch, **end):
        time.sleep(nap)
        driver.micro_batch_done(batch, nap)
    return [(record.round, record.samples) for record in driver.history]


def endless(batch: int = 4) -> Iterator[int]:
    """Batches without end."""
    while True:
        yield batch


@pytest.fixture(autouse=True)
def _no_consequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges that fail here say nothing about how the test run ends."""
    monkeypatch.setattr(shutdown, "expect_no_answer", lambda: None)


def payload_of(driver: Driver) -> MemoryPayload:
    """The payload, as what it is."""
    assert isinstance(driver.payload, MemoryPayload)
    return driver.payload


# -- epochs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("end", [{"drawn": 300}, {"rounds": 9}])
def test_an_epoch_ends_at_the_same_exchange_on_all_ranks(delay: int, end: dict[str, float]) -> None:
    def program(driver: Driver) -> Any:
        rounds = train(driver, endless(), 0.001 * driver.rank, **end)
        assert driver.engine.closed
        return rounds, driver.engine.ledger.drawn.tolist()

    (rounds, drawn), *others = together(3, program, engine={"delay": delay})
    assert others == [(rounds, drawn)] * 2
    assert sum(drawn) >= 300 if "drawn" in end else 9 <= len(rounds) <= 11
    assert sum(sum(samples) for _, samples in rounds) == sum(drawn)


def test_a_rank_without_batches_takes_part() -> None:
    rounds, *others = together(3, lambda driver: train(driver, iter([]) if driver.rank == 1 else endless(), drawn=100))
    assert others == [rounds] * 2
    assert sum(samples[1] for _, samples in rounds) == 0
    assert sum(sum(samples) for _, samples in rounds) >= 100


def test_an_epoch_ends_when_no_rank_has_batches_left() -> None:
    rounds, *others = together(3, lambda driver: train(driver, iter([5] * driver.rank), drawn=1e9))
    assert others == [rounds] * 2
    assert [sum(samples[rank] for _, samples in rounds) for rank in range(3)] == [0, 5, 10]


def test_break_on_one_rank_ends_the_epoch_on_all() -> None:
    def program(driver: Driver) -> list[int]:
        for number, batch in enumerate(driver.epoch(endless(), lambda batch: batch)):
            driver.micro_batch_done(batch, 0.0)
            if driver.rank == 1 and number == 5:
                break
        return [record.round for record in driver.history]

    rounds, *others = together(3, program)
    assert others == [rounds] * 2


def test_an_exception_on_one_rank_ends_the_epoch_on_all_and_is_raised_there() -> None:
    def program(driver: Driver) -> list[int]:
        for number, batch in enumerate(driver.epoch(endless(), lambda batch: batch)):
            if driver.rank == 1 and number == 5:
                raise KeyError("a fault")
            driver.micro_batch_done(batch, 0.0)
        return [record.round for record in driver.history]

    first, raised, third = together(3, program)
    assert isinstance(raised, KeyError)
    assert first == third


def test_a_batch_that_is_not_stepped_on_is_drawn_and_weighs_nothing() -> None:
    def program(driver: Driver) -> tuple[float, float]:
        for number, batch in enumerate(driver.epoch(iter([4, 5, 6, 7]), lambda batch: batch, drawn=22)):
            if number != 2:
                driver.micro_batch_done(batch, 0.0)
        return float(driver.engine.ledger.weight.sum()), float(driver.engine.ledger.drawn.sum())

    assert together(1, program) == [(16.0, 22.0)]


def test_an_epoch_may_not_begin_while_rounds_are_pending() -> None:
    driver = make(Network(1), 0)
    driver.micro_batch_done(4, 0.0)
    with pytest.raises(RunError, match=r"rank 0: an epoch begins while rounds are pending. End .* synchronize\(\)"):
        next(driver.epoch(endless(), lambda batch: batch))
    driver.close()
    assert train(driver, endless(), rounds=3)


def test_a_checkpoint_is_taken_by_all_with_nothing_pending_and_the_epoch_goes_on() -> None:
    def program(driver: Driver) -> Any:
        seen: list[tuple[int, bool]] = []
        driver.on_checkpoint.append(lambda: seen.append((driver.engine.ledger.rounds, driver.engine.closed)))
        for number, batch in enumerate(driver.epoch(endless(), lambda batch: batch, drawn=20_000)):
            driver.micro_batch_done(batch, 0.0)
            if driver.rank == 1 and number == 3:
                driver.command(Flag.CHECKPOINT)
        return seen, float(driver.engine.ledger.drawn.sum()) >= 20_000

    first, *others = together(3, program)
    assert others == [first] * 2
    assert [closed for _, closed in first[0]] == [True]
    assert first[1]


def test_a_checkpoint_asked_for_in_the_exchange_that_ends_the_epoch_is_taken_at_its_end() -> None:
    def program(driver: Driver) -> Any:
        saved: list[tuple[bool, int]] = []
        driver.on_checkpoint.append(lambda: saved.append((driver.engine.closed, driver.engine.ledger.rounds)))
        batches = driver.epoch(endless(), lambda batch: batch, rounds=1)
        for _ in batches:
            driver.command(Flag.CHECKPOINT)
            driver.micro_batch_done(4, 0.0)
        return saved, driver.engine.ledger.rounds

    for saved, rounds in together(3, program):
        assert saved == [(True, rounds)]


def test_stop_ends_this_epoch_and_those_to_come_after_a_checkpoint() -> None:
    def program(driver: Driver) -> Any:
        saved: list[bool] = []
        driver.on_checkpoint.append(lambda: saved.append(driver.engine.closed))
        for number, batch in enumerate(driver.epoch(endless(), lambda batch: batch)):
            driver.micro_batch_done(batch, 0.0)
            if driver.rank == 2 and number == 3:
                driver.command(Flag.STOP)
        assert list(driver.epoch(endless(), lambda batch: batch)) == []
        return saved, [record.round for record in driver.history]

    first, *others = together(3, program)
    assert others == [first] * 2
    assert first[0] == [True]


# -- merges ----------------------------------------------------------------------------------------------------------


def test_the_next_exchange_is_launched_before_the_last_one_is_applied() -> None:
    driver = make(Network(1), 0)
    for _ in range(3):
        driver.micro_batch_done(4, 0.0)
    assert payload_of(driver).log == ["launch 0", "launch 1", "apply 0", "launch 2", "apply 1"]


def test_a_payload_may_want_it_applied_first() -> None:
    driver = make(Network(1), 0)
    payload_of(driver).launches_first = False
    for _ in range(3):
        driver.micro_batch_done(4, 0.0)
    assert payload_of(driver).log == ["launch 0", "apply 0", "launch 1", "apply 1", "launch 2"]


def test_on_merge_follows_each_update_and_no_empty_round_or_overflow() -> None:
    driver = make(Network(1), 0, engine={"delay": 0})
    payload_of(driver).overflowing_rounds = {1}
    merged: list[int] = []
    entries: list[int] = []
    driver.on_merge.append(lambda: merged.append(driver.history[-1].round))
    driver.on_entry.append(lambda entry: entries.append(entry.round))
    for weight in (4, 4, 0, 4):
        assert driver.micro_batch_done(weight, 0.0)
    driver.close()
    assert merged == [0, 3]
    assert entries == [0, 1, 2, 3, 4]
    assert driver.overflows == 1


def test_rounds_that_were_not_finite_are_counted_by_rank_and_told_by_the_rank_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def program(driver: Driver) -> list[int]:
        if driver.rank == 1:
            payload_of(driver).nonfinite_rounds = {1, 3}
        train(driver, endless(), rounds=6)
        return driver.nonfinite

    with caplog.at_level(logging.WARNING, "horovod_abs"):
        assert together(3, program) == [[0, 2, 0]] * 3
    assert [record.getMessage() for record in caplog.records] == [
        f"rank 1: its gradients of round {round} are not finite and were dropped" for round in (1, 3)
    ]


def test_ranks_whose_parameters_differ_agree_at_the_same_merge() -> None:
    def program(driver: Driver) -> tuple[list[str], int]:
        payload = payload_of(driver)
        launch = payload.launch

        def drifted(row: Floats, ledger: Ledger) -> None:
            row[Column.DIGEST] = 1 if driver.rank == 2 and ledger.rounds == 3 else 2
            launch(row, ledger)

        payload.launch = drifted  # type: ignore[method-assign]
        train(driver, endless(), rounds=6)
        return payload.log, driver.corrections

    for log, corrections in together(3, program):
        assert corrections == log.count("agree") == 1


def test_different_hyper_parameters_are_found_at_the_merge_by_every_rank() -> None:
    def program(driver: Driver) -> None:
        for number, batch in enumerate(driver.epoch(endless(), lambda batch: batch)):
            if driver.rank == 1 and number == 4:
                payload_of(driver).fingerprint = 8
            driver.micro_batch_done(batch, 0.0)

    errors = together(3, program, engine={"clock": CountClock(1), "max_micro_batches": 1})
    for rank, error in enumerate(errors):
        assert isinstance(error, Mismatch)
        assert f"rank {rank}: the optimizer's hyper-parameters" in str(error)
        assert "on rank 1 differ from those on rank 0 in round 4" in str(error)


def test_a_callback_that_raises_leaves_the_driver_failed() -> None:
    driver = make(Network(1), 0, engine={"delay": 0})
    driver.on_merge.append(lambda: [][0])
    with pytest.raises(IndexError):
        train(driver, endless())
    assert driver.failed


def test_history_measures_computing_waiting_and_exchanging() -> None:
    now = 100.0

    def seconds() -> float:
        return now

    network = Network(2)
    driver = make(network, 0, seconds=seconds)
    driver.boundary()
    now = 103.0
    driver.micro_batch_done(8, 2.5)  # launches
    other = network.rows[0][0].copy()
    other[[Column.WEIGHT, Column.MICRO_BATCHES, Column.COMPUTE_SECONDS]] = 4, 2, 1.25
    network.launch(0, 1, other)
    now = 107.0
    driver.micro_batch_done(8, 3.5)  # merges
    (record,) = driver.history
    assert record.samples == (8.0, 4.0)
    assert record.batch == 12.0
    assert record.micro_batches == (1, 2)
    assert record.compute_seconds == (2.5, 1.25)
    assert record.wait_seconds == (0.0, 0.0)
    assert record.exchange_seconds == 4.0
    assert record.merged_at == 7.0


def test_waiting_is_measured() -> None:
    def program(driver: Driver) -> tuple[float, float]:
        train(driver, endless(), 0.1 if driver.rank == 1 else 0.0, rounds=4)
        waited = [sum(record.wait_seconds[rank] for record in driver.history) for rank in (0, 1)]
        return waited[0], waited[1]

    (fast, slow), _ = together(2, program, engine={"max_micro_batches": 1, "delay": 0})
    assert fast > 0.2
    assert fast > slow


# -- two optimizers --------------------------------------------------------------------------------------------------


def two_of_each_rank(size: int, *engines: dict[str, Any]) -> list[list[Driver]]:
    """Two drivers in each process, that know of one another."""
    networks = Network(size), Network(size)
    ranks: list[list[Driver]] = []
    for rank in range(size):
        ranks.append([])
        for network, engine in zip(networks, engines, strict=True):
            ranks[-1].append(make(network, rank, engine=engine, peers=ranks[-1]))
    return ranks


@pytest.mark.parametrize("delays", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_rank_without_work_takes_part_in_the_exchanges_of_its_other_optimizers(delays: tuple[int, int]) -> None:
    """It is at the end of one, while another rank waits for it in the other one."""

    def program(drivers: list[Driver]) -> list[float]:
        for _ in range(2):
            for _ in range(5 if drivers[0].rank == 0 else 90):
                for driver in drivers:
                    driver.micro_batch_done(1, 0.0)
            for driver in drivers:
                driver.close()
        return [float(driver.engine.ledger.weight.sum()) for driver in drivers]

    done = in_threads(program, two_of_each_rank(2, *({"delay": delay} for delay in delays)))
    assert done == [[190.0, 190.0]] * 2


@pytest.mark.parametrize("delays", [(0, 1), (1, 0), (1, 1)])
def test_a_rank_that_has_run_out_of_data_takes_part_in_them_too(delays: tuple[int, int]) -> None:
    """Both optimizers go on, although the second is never closed."""

    def program(drivers: list[Driver]) -> list[float]:
        for _ in range(2):
            batches = [1] * (3 if drivers[0].rank == 0 else 40)
            for batch in drivers[0].epoch(iter(batches), lambda batch: batch):
                for driver in drivers:
                    driver.micro_batch_done(batch, 0.0)
        drivers[1].close()
        return [float(driver.engine.ledger.weight.sum()) for driver in drivers]

    done = in_threads(program, two_of_each_rank(2, *({"delay": delay} for delay in delays)))
    assert done == [[86.0, 86.0]] * 2


def test_two_optimizers_that_would_wait_for_one_another_are_refused() -> None:
    interval = {"delay": 0, "clock": IntervalClock(0.01)}
    for engines in ((interval, {"delay": 0}), ({"max_staleness": 4}, interval)):
        ((first, second),) = two_of_each_rank(1, *engines)
        first.micro_batch_done(1, 0.0)
        with pytest.raises(RunError, match=r"two optimizers are in use.*IntervalClock\(seconds=0\.01\).*Use SyncClock"):
            second.micro_batch_done(1, 0.0)
        first.close()
        second.micro_batch_done(1, 0.0)
    ((first, second),) = two_of_each_rank(1, {"delay": 0}, {"delay": 0})
    for batch in first.epoch(iter([1]), lambda batch: batch, sampler={}):
        first.micro_batch_done(batch, 0.0)
        with pytest.raises(RunError, match=r"two optimizers with Gradients\(delay=0\).*adaptive"):
            second.micro_batch_done(1, 0.0)
    ((first, second),) = two_of_each_rank(1, interval, {})
    first.micro_batch_done(1, 0.0)
    second.micro_batch_done(1, 0.0)


# -- ranks that do not answer ----------------------------------------------------------------------------------------


def test_a_missing_rank_is_named() -> None:
    def program(driver: Driver) -> None:
        if driver.rank != 1:
            train(driver, endless(), rounds=3)

    first, _, third = together(3, program, exchange_timeout=0.5)
    for rank, error in ((0, first), (2, third)):
        assert isinstance(error, ExchangeTimeout)
        assert f"rank {rank}: exchange 0 did not complete within 0.5 s: rank 1 has not launched it" in str(error)
        assert "optimizer.authoritative() or raise exchange_timeout" in str(error)


def test_a_rank_that_launched_late_is_not_taken_for_missing() -> None:
    def program(driver: Driver) -> None:
        if driver.rank == 1:
            return
        batches = driver.epoch(endless(), lambda batch: batch)
        next(batches)
        driver.boundary()
        time.sleep(0.8 if driver.rank == 2 else 0)
        driver.micro_batch_done(4, 0.0)
        driver.close()

    first, _, _ = together(3, program, exchange_timeout=1.0)
    assert isinstance(first, ExchangeTimeout)
    assert "rank 1 has not launched it" in str(first)


def test_a_busy_rank_is_waited_for() -> None:
    def program(driver: Driver) -> int:
        for number, batch in enumerate(driver.epoch(endless(), lambda batch: batch, rounds=6)):
            driver.micro_batch_done(batch, 0.0)
            if driver.rank == 1 and number == 2:
                announcer = driver._announcer
                assert announcer is not None
                announcer.announce(driver.engine.launches, busy=True)
                time.sleep(1.2)
                announcer.announce(driver.engine.launches, busy=False)
        return len(driver.history)

    rounds = together(3, program, exchange_timeout=0.3, engine={"max_micro_batches": 4})
    assert rounds == [rounds[0]] * 3


def test_a_rank_that_was_busy_gets_its_time_afterwards() -> None:
    def program(driver: Driver) -> int:
        for number, batch in enumerate(driver.epoch(endless(), lambda batch: batch, rounds=6)):
            driver.micro_batch_done(batch, 0.0)
            if driver.rank == 1 and number == 2:
                announcer = driver._announcer
                assert announcer is not None
                announcer.announce(driver.engine.launches, busy=True)
                time.sleep(0.9)
                announcer.announce(driver.engine.launches, busy=False)
                time.sleep(0.5)
        return len(driver.history)

    rounds = together(3, program, exchange_timeout=0.8, engine={"max_micro_batches": 4})
    assert rounds == [rounds[0]] * 3


def test_an_exchange_that_all_have_launched_gets_time_to_complete_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Network, "complete", lambda network, number: False)

    def program(driver: Driver) -> float:
        driver._announcer.announce(1)  # type: ignore[union-attr]
        began = time.monotonic()
        with pytest.raises(ExchangeTimeout, match="every rank has launched it, so it is the network or Horovod"):
            train(driver, endless(), rounds=3)
        return time.monotonic() - began

    waited = together(2, program, exchange_timeout=0.5, engine={"max_micro_batches": 1})
    assert min(waited) >= 1.0


def test_announcements_cost_nothing_while_all_is_well() -> None:
    def program(driver: Driver) -> list[tuple[int, bool]]:
        train(driver, endless(), 0.001, rounds=8)
        assert isinstance(driver._announcer, MemoryAnnouncer)
        return driver._announcer.announced

    assert together(2, program) == [[], []]


def test_after_a_failure_leaving_does_not_wait_again(caplog: pytest.LogCaptureFixture) -> None:
    def program(driver: Driver) -> float:
        if driver.rank == 1:
            return 0.0
        began = time.monotonic()
        with pytest.raises(ExchangeTimeout):
            train(driver, endless(), rounds=3)
        assert driver.failed
        return time.monotonic() - began

    waited, _ = together(2, program, exchange_timeout=0.5)
    assert waited < 5
    assert not caplog.records


def test_leaving_in_vain_is_logged_and_the_users_exception_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    def program(driver: Driver) -> None:
        if driver.rank == 0:
            for batch in driver.epoch(endless(), lambda batch: batch):
                raise KeyError(batch)

    raised, _ = together(2, program, exchange_timeout=0.5)
    assert isinstance(raised, KeyError)
    assert ["rank 1 has not launched it" in record.getMessage() for record in caplog.records] == [True]


def test_exchange_timeout_must_be_positive() -> None:
    with pytest.raises(ValueError, match="exchange_timeout must be positive, got 0"):
        make(Network(1), 0, exchange_timeout=0)
