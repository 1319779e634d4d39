"""Plain synchronous Horovod and ABS-SGD on the same emulated mixed cluster, side by side, in three minutes.

    python -m horovod_abs.examples.demo

It starts :mod:`horovod_abs.examples.torch_mnist` twice with ``horovodrun -np 4``, on ranks whose speeds are
1 : 1 : 0.5 : 0.25, prints both results side by side, and draws accuracy against time and each rank's batches.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from horovod_abs.bench.launch import LaunchError, run_ranks
from horovod_abs.observe import plots
from horovod_abs.observe.results import Result

SPEEDS = "1,1,0.5,0.25"
CLUSTER = ("--speeds", SPEEDS, "--base-ms", "20", "--micro-batch", "4", "--max-seconds", "60")

# Each was tuned by the same search in virtual time (batch 16 against 44 with a delay of one round, as many updates a
# second): learning rates 0.0125 · 2ⁿ up to 0.4 for momentum 0, 0.5 and 0.9, and the best of them again with five seeds,
# for the least mean time to 95 %: 38 s against 29 s. The next best were 39 s (0.1, momentum 0) and 30 s (0.1, momentum
# 0). To 90 % ABS-SGD is not faster: early on a batch 2.75 times as large gains less than the delay costs.
PLAIN = ("--algorithm", "ssgd", "--epochs", "3", "--lr", "0.0125", "--momentum", "0.9")
ADAPTIVE = ("--algorithm", "abs", "--epochs", "8", "--lr", "0.05", "--momentum", "0.5")

TARGETS = (0.90, 0.93, 0.95, 0.96)


def main() -> int:
    """Run both, print, draw. The exit status is 1 if a run has failed."""
    args = parse_arguments()
    console = Console(width=None if Console().is_terminal else 100)
    results = []
    for name, algorithm in (("horovod", PLAIN), ("abs-sgd", ADAPTIVE)):
        path = args.output / f"{name}.json"
        command = [*CLUSTER, *algorithm, "--json", str(path)]
        console.rule(f"horovodrun -np {SPEEDS.count(',') + 1} python -m horovod_abs.examples.torch_mnist")
        console.print(" ".join(command), highlight=False)
        try:
            run_ranks(SPEEDS.count(",") + 1, "horovod_abs.examples.torch_mnist", command, controller=args.controller)
        except LaunchError as error:
            print(error, file=sys.stderr)
            return 1
        results.append(Result.read(path))
    console.print(compare(*results))
    picture = args.plot or args.output / "demo.png"
    plots.save(plots.comparison(results, target=shown_target(results)), picture)
    console.print(f"picture: {picture}", highlight=False)
    return 0


def compare(plain: Result, adaptive: Result) -> Table:
    """Both runs side by side, with what the second saves."""
    table = Table(title="The same emulated cluster, speeds " + SPEEDS, min_width=72)
    for column in ("", plain.label, adaptive.label, ""):
        table.add_column(column, justify="right" if column else "left")
    for target in TARGETS:
        before, after = plain.seconds_to(target), adaptive.seconds_to(target)
        table.add_row(f"time to {target:.0%}", _seconds(before), _seconds(after), _saved(before, after))
    table.add_section()
    a, b = plain.summary, adaptive.summary
    table.add_row("best accuracy", f"{plain.best_accuracy:.1%}", f"{adaptive.best_accuracy:.1%}", "")
    table.add_row("training time", _seconds(a.seconds), _seconds(b.seconds), "")
    factor = f"{b.samples_per_second / a.samples_per_second:.2f}×"
    table.add_row("samples per second", f"{a.samples_per_second:,.0f}", f"{b.samples_per_second:,.0f}", factor)
    table.add_row("share of the ideal", f"{a.share_of_ideal:.1%}", f"{b.share_of_ideal:.1%}", "")
    table.add_row("idle time", f"{a.idle_share:.1%}", f"{b.idle_share:.1%}", "")
    return table


def shown_target(results: Sequence[Result]) -> float | None:
    """The highest of the targets that every run has reached."""
    return next(
        (target for target in reversed(TARGETS) if all(r.seconds_to(target) is not None for r in results)), None
    )


def _seconds(value: float | None) -> str:
    return "not reached" if value is None else f"{value:.1f} s"


def _saved(before: float | None, after: float | None) -> str:
    if before is None or after is None:
        return ""
    return f"{1 - after / before:.0%} less" if after <= before else f"{after / before - 1:.0%} more"


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/demo"), help="folder (default: runs/demo)")
    parser.add_argument("--plot", type=Path, help="write the picture here instead of into that folder")
    parser.add_argument("--controller", choices=("mpi", "gloo"), help="Horovod's (default: the one it chooses)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
