"""Says how many random schedules have kept the rules."""

from __future__ import annotations

from time import perf_counter

import pytest

from tests.core import schedules

_begun = perf_counter()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line, where there were any."""
    if schedules.kept:
        terminalreporter.write_line(
            f"{schedules.kept:,} random schedules in virtual time kept the rules of the design, "
            f"after {perf_counter() - _begun:.0f} s"
        )
