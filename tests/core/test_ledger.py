"""The ledger: what a row holds, what is summed up, and what survives the exchange and a checkpoint."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horovod_abs.core.ledger import Column, Entry, Flag, Floats, Ledger

flag_sets = st.lists(st.sampled_from([*Flag]), max_size=5).map(lambda flags: Flag(sum({int(flag) for flag in flags})))


def rows(weights: list[float], drawn: list[float] | None = None, flags: list[Flag] | None = None) -> Floats:
    """The rows of ranks that contributed so many samples."""
    table = np.zeros((len(weights), len(Column)))
    table[:, Column.WEIGHT] = weights
    table[:, Column.DRAWN] = drawn or weights
    table[:, Column.FLAGS] = flags or [Flag(0)] * len(weights)
    return table


def test_the_weight_of_an_exchange_is_that_of_all_ranks() -> None:
    entry = Entry(0, rows([16, 0, 8]))
    assert entry.weight == 24
    assert entry.column(Column.WEIGHT).tolist() == [16, 0, 8]


@given(st.lists(flag_sets, min_size=1, max_size=16), st.sampled_from([*Flag]))
def test_flags_name_the_ranks_that_raised_them(flags: list[Flag], asked: Flag) -> None:
    entry = Entry(0, rows([0] * len(flags), flags=flags))
    raised = tuple(rank for rank, flag in enumerate(flags) if asked in flag)
    assert entry.ranks_with(asked) == raised
    assert entry.all_raised(asked) == (len(raised) == len(flags))


def test_every_flag_has_a_bit_of_its_own() -> None:
    assert len({int(flag) for flag in Flag.__members__.values()}) == len(Flag.__members__)
    assert len(set(Column.__members__.values())) == len(Column.__members__)


def test_several_flags_are_asked_for_at_once() -> None:
    entry = Entry(0, rows([0, 0, 0], flags=[Flag.STOP, Flag.CLOSING | Flag.LEAVING, Flag.CLOSING]))
    assert entry.ranks_with(Flag.LEAVING | Flag.STOP) == (0, 1)


@given(
    st.lists(st.tuples(st.integers(0, 2**52 - 1), flag_sets, st.integers(0, 2**40)), min_size=1, max_size=16),
    st.permutations(range(16)),
)
def test_rows_survive_summation_over_the_ranks(ranks: list[tuple[int, Flag, int]], order: list[int]) -> None:
    """A binding fills its own row of a zero table and sums the tables, in any order: nothing is rounded."""
    tables = np.zeros((len(ranks), len(ranks), len(Column)))
    for rank, (options, flags, weight) in enumerate(ranks):
        tables[rank, rank, [Column.OPTIONS, Column.FLAGS, Column.WEIGHT]] = options, flags, weight
    total = np.zeros((len(ranks), len(Column)))
    for rank in order:
        if rank < len(ranks):
            total += tables[rank]
    entry = Entry(0, total)
    assert [int(options) for options in entry.column(Column.OPTIONS)] == [options for options, _, _ in ranks]
    assert [Flag(int(flags)) for flags in entry.column(Column.FLAGS)] == [flags for _, flags, _ in ranks]
    assert entry.weight == sum(weight for _, _, weight in ranks)


def test_totals_follow_weight_and_drawn_separately() -> None:
    """A dropped batch is used up although it weighs nothing."""
    ledger = Ledger(2)
    ledger.append(Entry(0, rows([16, 0], drawn=[16, 16])))
    ledger.append(Entry(1, rows([0, 0], drawn=[0, 0])))
    ledger.append(Entry(2, rows([16, 8], drawn=[16, 8])))
    assert ledger.rounds == 3
    assert ledger.weight.tolist() == [32, 8]
    assert ledger.drawn.tolist() == [32, 24]


def test_the_last_weight_is_that_of_the_last_exchange_that_was_not_empty() -> None:
    ledger = Ledger(2)
    assert ledger.last_weight == 0
    for number, weights in enumerate(([4.0, 4.0], [16.0, 8.0], [0.0, 0.0])):
        ledger.append(Entry(number, rows(weights)))
    assert ledger.last_weight == 24


@pytest.mark.parametrize("entry", [Entry(1, rows([1, 1])), Entry(0, rows([1])), Entry(0, rows([1, 1])[:, 1:])])
def test_an_entry_out_of_order_or_of_another_cluster_is_refused(entry: Entry) -> None:
    ledger = Ledger(2)
    with pytest.raises(ValueError, match="expected exchange 0 of 2 ranks, got exchange"):
        ledger.append(entry)
    assert ledger.rounds == 0
    assert not ledger.weight.any()


def test_an_entry_is_not_counted_twice() -> None:
    ledger = Ledger(1)
    ledger.append(Entry(0, rows([1])))
    with pytest.raises(ValueError, match="expected exchange 1"):
        ledger.append(Entry(0, rows([1])))


def test_only_the_last_entries_are_kept() -> None:
    ledger = Ledger(1)
    for number in range(Ledger.KEPT + 3):
        ledger.append(Entry(number, rows([1])))
    assert [entry.round for entry in ledger.recent] == list(range(3, Ledger.KEPT + 3))
    assert ledger.weight.tolist() == [Ledger.KEPT + 3]


def test_a_checkpoint_goes_on_where_it_was_taken() -> None:
    ledger = Ledger(2)
    for number in range(3):
        ledger.append(Entry(number, rows([16, number], drawn=[32, number], flags=[Flag.CHECKPOINT, Flag(0)])))
    saved = json.loads(json.dumps(ledger.state_dict()))  # plain values
    ledger.append(Entry(3, rows([1, 1])))

    resumed = Ledger(2)
    resumed.load_state_dict(saved)
    assert resumed.rounds == 3
    assert resumed.weight.tolist() == [48, 3]
    assert resumed.drawn.tolist() == [96, 3]
    assert resumed.last_weight == 18
    resumed.append(Entry(3, rows([1, 1])))
    assert resumed.state_dict() == ledger.state_dict()
    assert resumed.recent[0].ranks_with(Flag.CHECKPOINT) == (0,)


def test_a_checkpoint_of_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"written by 2 ranks, this run has 3: resume with as many ranks"):
        Ledger(3).load_state_dict(Ledger(2).state_dict())


def test_saved_totals_do_not_change_with_the_ledger() -> None:
    ledger = Ledger(1)
    saved = ledger.state_dict()
    ledger.append(Entry(0, rows([1])))
    assert saved["weight"] == [0]
    assert saved["recent"] == []
