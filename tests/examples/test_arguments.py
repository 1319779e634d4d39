from __future__ import annotations

import pytest

from horovod_abs.core.clocks import CountClock, SyncClock
from horovod_abs.examples.arguments import parse
from horovod_abs.exchanges import Gradients


def test_arguments() -> None:
    args = parse(None, ["--speeds", "1,0.5", "--clock", "count:3", "--exchange", "waiting"])
    assert args.speeds == (1.0, 0.5)
    assert args.clock == CountClock(3)
    assert args.exchange == Gradients(delay=0)
    assert parse(None, []).clock == SyncClock()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--speeds", "1,x"], "not a list of numbers"),
        (["--speeds", "1,0"], "must be positive"),
        (["--clock", "tick"], "not a clock"),
        (["--epochs", "0"], "whole number of at least 1"),
        (["--exchange", "mail"], "not an exchange"),
        (["--algorithm", "adam"], "invalid choice"),
        (["--algorithm", "ssgd", "--record", "log.jsonl"], "are for --algorithm abs"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(None, arguments)
    assert message in capsys.readouterr().err
