"""How set-up says that something is wrong: what it is, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """Something that keeps Horovod from being built or from working.

    Attributes:
        what: one sentence for the user.
        remedy: what to type or to change, ready to be copied.
    """

    what: str
    remedy: str = ""


class SetupError(Exception):
    """Set-up cannot go on; carries every `Problem` found, so that all can be solved at once."""

    def __init__(self, *problems: Problem) -> None:
        self.problems = problems
        super().__init__("\n".join(f"{p.what}\n  {p.remedy}".rstrip() for p in problems))
