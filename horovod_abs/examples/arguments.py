"""The command line of the MNIST examples, the same for every framework."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from horovod_abs import options

PLAIN = "ssgd"
"""The algorithm that is plain Horovod."""


def parse(description: str | None, arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked.

    Args:
        description: Of the program.
        arguments: Instead of the program's own.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=["abs", PLAIN], default="abs", help="ours, or plain Horovod")
    parser.add_argument("--epochs", type=_positive_int, default=10)
    parser.add_argument("--micro-batch", type=_positive_int, default=16, help="samples (default: 16)")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument(
        "--clock",
        type=_checked(options.clock),
        default="sync",
        help="sync, count:N, interval:S, target:N, or replay:LOG",
    )
    parser.add_argument(
        "--exchange",
        type=_checked(options.exchange),
        default="gradients",
        help="gradients (as published), lookahead, taylor, waiting, or updates (default: gradients)",
    )
    parser.add_argument("--speeds", type=_checked(options.positive_numbers), default="1,1,0.5,0.25", help="by rank")
    parser.add_argument("--base-ms", type=float, default=20.0, help="a micro-batch at speed 1 (default: 20)")
    parser.add_argument("--jitter", type=float, default=0.0, help="deviation of the logarithm of a micro-batch's time")
    parser.add_argument("--no-emulation", action="store_true", help="compute as fast as the hardware does")
    parser.add_argument("--target-accuracy", type=float, help="print the training time to this test accuracy")
    parser.add_argument("--max-seconds", type=float, default=math.inf, help="stop with the epoch in which they pass")
    parser.add_argument("--eval-every", type=float, default=1.0, help="seconds of training between evaluations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--record", type=Path, help="write a run log, for horovod-abs replay, timeline and plot")
    parser.add_argument("--checkpoint-dir", type=Path, help="write checkpoints, and go on from the last one")
    args = parser.parse_args(arguments)
    if args.algorithm == PLAIN and (args.checkpoint_dir or args.record):
        parser.error("--checkpoint-dir and --record are for --algorithm abs")
    return args


def _positive_int(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _checked(parse: Callable[[str], object]) -> Callable[[str], object]:
    def checked(text: str) -> object:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked
