"""What the ranks of the utilisation benchmark do alike in every framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from horovod_abs.bench.utilisation import Setting
from horovod_abs.driver import RoundRecord
from horovod_abs.observe.progress import open_bar
from horovod_abs.observe.summary import Summary, summarise

Advance = Callable[[], object]

EQUAL_BATCHES = ("ssgd", "ssgd-fp16", "local")
"""Algorithms that give every rank as many micro-batches, and make fewer rounds."""


def in_turn(setting: Setting, rank: int, runs: Mapping[str, Callable[[Advance], Summary]]) -> dict[str, list[Summary]]:
    """Measure some algorithms in turn, as often as the setting says.

    Args:
        setting: What is measured.
        rank: This rank; the first shows a progress bar.
        runs: By name, what makes one measurement; it calls its argument after each round.
    """
    repeats: dict[str, list[Summary]] = {name: [] for name in runs}
    equal = sum(name in EQUAL_BATCHES for name in runs)
    rounds = equal * setting.synchronous_rounds + (len(runs) - equal) * setting.rounds
    total = setting.repeats * (len(runs) * setting.warmup_rounds + rounds)
    with open_bar(total, enabled=rank == 0) as bar:
        for repeat in range(1, setting.repeats + 1):
            for name, run in runs.items():
                bar.set_description_str(f"{name} {repeat}/{setting.repeats} ", refresh=False)
                repeats[name].append(run(lambda: bar.update(bar.n < total)))
    return repeats


def window(history: Sequence[RoundRecord], setting: Setting) -> Summary:
    """Sum up the rounds between the warm-up and the end."""
    first = setting.warmup_rounds
    measured = history[first : first + setting.rounds]
    return summarise(measured, measured[-1].merged_at - history[first - 1].merged_at, ideal=setting.ideal)
