"""What a user is told when something is wrong: on which rank, why, and what to do. One place that words it."""

from __future__ import annotations

from collections.abc import Iterable


class RunError(RuntimeError):
    """The run cannot go on.

    Args:
        rank: The rank that says so.
        cause: What is wrong, as a clause.
        remedy: What to do about it, as a sentence without its full stop.
    """

    def __init__(self, rank: int, cause: str, remedy: str) -> None:
        self.rank = rank
        super().__init__(f"rank {rank}: {cause}. {remedy}.")


class ExchangeTimeout(RunError):
    """Some ranks have not launched an exchange that the others wait for."""


class ExchangeFailed(RunError):
    """Horovod could not carry out an exchange, as a rule because a rank has died."""


class Mismatch(RunError):
    """The ranks were given different models, options or hyper-parameters."""


def late(rank: int, what: str, timeout: float) -> ExchangeTimeout:
    """Not every rank has come to an exchange within ``timeout`` seconds."""
    return ExchangeTimeout(
        rank,
        f"not every rank has come to {what!r} within {timeout:g} s",
        "Make the same optimizers and begin the same epochs, in the same order, on every rank",
    )


def failed(rank: int, what: str, error: Exception) -> ExchangeFailed:
    """What Horovod says of an exchange that it could not carry out."""
    return ExchangeFailed(
        rank,
        f"Horovod could not carry out {what} ({' '.join(str(error).split())})",
        "As a rule another rank has raised or died: look for the first error in the other ranks' output",
    )


def name_ranks(ranks: Iterable[int]) -> str:
    """``"rank 2"``, ``"ranks 1, 3"``."""
    listed = [str(rank) for rank in ranks]
    return f"rank{'s' if len(listed) != 1 else ''} {', '.join(listed)}"
