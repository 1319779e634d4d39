"""Says how many random schedules have kept the rules."""

from __future__ import annotations

import pytest

from tests.core import schedules


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line, where there were any."""
    if schedules.kept:
        terminalreporter.write_line(f"{schedules.kept:,} random schedules in virtual time kept the rules of the design")
