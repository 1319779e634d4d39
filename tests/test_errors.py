"""How errors are worded."""

from __future__ import annotations

from horovod_abs.errors import ExchangeFailed, ExchangeTimeout, Mismatch, RunError, name_ranks


def test_an_error_says_where_what_and_what_to_do() -> None:
    error = RunError(3, "the cause", "Do this")
    assert str(error) == "rank 3: the cause. Do this."
    assert error.rank == 3
    assert isinstance(error, RuntimeError)


def test_all_errors_of_a_run_can_be_caught_as_one() -> None:
    assert all(issubclass(kind, RunError) for kind in (ExchangeFailed, ExchangeTimeout, Mismatch))


def test_ranks_are_named_in_words() -> None:
    assert name_ranks([2]) == "rank 2"
    assert name_ranks((1, 3)) == "ranks 1, 3"
