"""What the comparison of :mod:`horovod_abs.bench.convergence` says: table, picture, and the claim that it tests.

The claim, of [ABS-SGD]: on four workers it converges 1.30 times as fast on average as the best baseline.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from rich.table import Table

from horovod_abs.bench.algorithms import ALGORITHMS

CLAIM = 1.30
BEGIN, END = "<!-- begin of what the benchmark writes: {} -->", "<!-- end of what the benchmark writes: {} -->"

Result = Mapping[str, Any]


class Gain(NamedTuple):
    """How much sooner one of ours is there than the best baseline.

    Attributes:
        cluster, exchange: Where.
        ours, baseline: Names.
        ratio: Time of the baseline by time of ours; both medians, a miss counts as the limit.
        bound: ``>=`` if the baseline missed, ``<=`` if ours did, ``?`` if both did.
    """

    cluster: str
    exchange: str
    ours: str
    baseline: str
    ratio: float
    bound: str


def gains(result: Result, ours: Sequence[str], baselines: Sequence[str]) -> list[Gain]:
    """For each cluster and exchange, the best of ours against the best of the baselines."""

    def best(cluster: str, exchange: str, names: Sequence[str]) -> tuple[float, str, bool]:
        candidates = [
            (each["medians"][exchange], each["algorithm"], each["medians"][exchange] >= each["limit"])
            for each in result["outcomes"]
            if each["cluster"] == cluster and each["algorithm"] in names
        ]
        return min(candidates)

    found = []
    for cluster in result["clusters"]:
        for exchange in result["setting"]["exchanges"]:
            own, own_name, own_missed = best(cluster, exchange, ours)
            theirs, their_name, they_missed = best(cluster, exchange, baselines)
            bound = {(False, False): "", (False, True): ">=", (True, False): "<=", (True, True): "?"}
            found.append(Gain(cluster, exchange, own_name, their_name, theirs / own, bound[own_missed, they_missed]))
    return found


def mean_gain(found: Sequence[Gain]) -> float:
    """The mean over clusters of the means over exchanges."""
    clusters = dict.fromkeys(gain.cluster for gain in found)
    return fmean(fmean(gain.ratio for gain in found if gain.cluster == cluster) for cluster in clusters)


def verdicts(result: Result) -> list[tuple[str, list[Gain]]]:
    """What is compared with what, where the result has both; without the variants."""
    names = list(dict.fromkeys(each["algorithm"] for each in result["outcomes"]))
    names = [name for name in names if not ALGORITHMS[name].variant]
    ours = [name for name in names if ALGORITHMS[name].ours]
    theirs = [name for name in names if not ALGORITHMS[name].ours]
    paper = [name for name in theirs if ALGORITHMS[name].paper]
    compared = [
        ("ABS-SGD as published, over the paper's baselines", ["abs"], paper),
        ("ABS-SGD as published, over all baselines", ["abs"], theirs),
        ("Our best, over the paper's baselines", ours, paper),
        ("Our best, over all baselines", ours, theirs),
    ]
    return [
        (title, gains(result, mine, others))
        for title, mine, others in compared
        if others and mine and set(mine) <= set(names)
    ]


def cell(outcome: Mapping[str, Any], exchange: str, ideal: float) -> str:
    """Median seconds, and that as a multiple of the ideal machine's."""
    seconds = outcome["medians"][exchange]
    if seconds >= outcome["limit"]:
        return f"> {seconds:.0f}"
    return f"{seconds:.1f} ({seconds / ideal:.2f}×)"


def rows(result: Result, cluster: str) -> Iterator[list[str]]:
    """One for each algorithm: title, a cell for each exchange, and what was chosen."""
    ideal = result["clusters"][cluster]["ideal_seconds"]
    for each in result["outcomes"]:
        if each["cluster"] == cluster:
            rate, momentum, steps = each["trial"]
            chosen = f"{rate:g}, {momentum:g}" + (f", {steps}" if ALGORITHMS[each["algorithm"]].steps else "")
            cells = [cell(each, exchange, ideal) for exchange in result["setting"]["exchanges"]]
            yield [ALGORITHMS[each["algorithm"]].title, *cells, chosen + ("" if each["settled"] else " *")]


def to_tables(result: Result) -> Iterator[Table]:
    """For people: a table for each cluster, and the verdict."""
    task, setting = result["task"], result["setting"]
    for cluster, known in result["clusters"].items():
        table = Table(
            title=f"{cluster}: virtual seconds to {task['target']:.1%} and multiple of the ideal machine's "
            f"{known['ideal_seconds']:.1f} s",
            caption=f"{task['name']}, median of {setting['seeds']}, best of {setting['trials']} trials; * not all "
            "neighbours of the best trial were tried",
        )
        for column in ("", *setting["exchanges"], "rate, momentum, steps"):
            table.add_column(column, justify="right" if column else "left", no_wrap=True)
        for row in rows(result, cluster):
            table.add_row(*row)
        yield table
    if not (compared := verdicts(result)):
        return
    table = Table(title=f"How much sooner than the best baseline (the claim: {CLAIM:.2f} times)")
    for column in ("", *result["clusters"], "mean"):
        table.add_column(column, justify="right" if column else "left")
    for title, found in compared:
        table.add_row(title, *_by_cluster(result, found), f"{mean_gain(found):.2f}")
    yield table


def to_markdown(result: Result) -> str:
    """The same for a file."""
    task, setting = result["task"], result["setting"]
    rate, momentum, steps = result["ideal"]["trial"]
    lines = [
        f"{task['name']}, to {task['target']:.1%}. Virtual seconds, median of {setting['seeds']} seeds with the best "
        f"of {setting['trials']} trials, and in brackets the multiple of the ideal machine's time. A run may take as "
        f"long as the ideal machine takes for {task['budget']:,} samples. An asterisk: not all neighbours of the best "
        f"trial were tried. The ideal machine's best: rate {rate:g}, momentum {momentum:g}, an update every {steps} "
        "micro-batches.",
        "",
    ]
    for cluster, known in result["clusters"].items():
        lines += [
            f"**{cluster}**, {known['ideal_rate']:,.0f} samples/s at most, ideal {known['ideal_seconds']:.2f} s",
            "",
        ]
        lines += markdown_table(["", *setting["exchanges"], "rate, momentum, steps"], rows(result, cluster))
    if not (compared := verdicts(result)):
        return "\n".join(lines)
    lines += [f"**How much sooner than the best baseline** (the claim: {CLAIM:.2f} times on average)", ""]
    body = [[title, *_by_cluster(result, found), f"**{mean_gain(found):.2f}**"] for title, found in compared]
    lines += markdown_table(["", *result["clusters"], "mean"], body)
    title, found = compared[-1]
    best = [[g.cluster, g.exchange, _title(g.ours), _title(g.baseline), f"{g.bound} {g.ratio:.2f}"] for g in found]
    lines += [f"{title}:", "", *markdown_table(["cluster", "exchange", "ours", "baseline", "times as fast"], best)]
    return "\n".join(lines)


def write_report(path: Path, key: str, text: str) -> None:
    """Replace one section of a report; what people have written around it stays.

    Args:
        path: Of the report; made if it does not exist.
        key: Of the section.
        text: Its new contents.
    """
    begin, end = BEGIN.format(key), END.format(key)
    old = path.read_text(encoding="utf-8") if path.exists() else "# Results\n"
    if begin not in old:
        old += f"\n{begin}\n{end}\n"
    before, _, rest = old.partition(begin)
    _, _, after = rest.partition(end)
    path.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}", encoding="utf-8")


def draw(result: Result) -> Figure:
    """For each cluster and exchange, each algorithm's time as a multiple of the ideal machine's, with a dot a seed."""
    clusters, exchanges = list(result["clusters"]), result["setting"]["exchanges"]
    names = list(dict.fromkeys(each["algorithm"] for each in result["outcomes"]))
    figure = Figure(figsize=(3.4 * len(exchanges) + 2, (0.24 * len(names) + 0.9) * len(clusters)), layout="constrained")
    grid = figure.subplots(len(clusters), len(exchanges), squeeze=False, sharey=True, sharex="row")
    for line, cluster in zip(grid, clusters, strict=True):
        ideal = result["clusters"][cluster]["ideal_seconds"]
        outcomes = [each for each in result["outcomes"] if each["cluster"] == cluster]
        for axes, exchange in zip(line, exchanges, strict=True):
            for place, each in enumerate(outcomes):
                missed = each["medians"][exchange] >= each["limit"]
                colour = "#0072B2" if ALGORITHMS[each["algorithm"]].ours else "#999999"
                multiple = each["medians"][exchange] / ideal
                axes.barh(place, multiple, color=colour, alpha=0.35 if missed else 1.0)
                dots = [seconds / ideal for seconds in each["seconds"][exchange] if seconds is not None]
                axes.plot(dots, [place] * len(dots), linestyle="", marker=".", color="black", markersize=3)
                text = "missed" if missed else f"{multiple:.1f}"
                axes.annotate(text, (multiple, place), (3, 0), textcoords="offset points", va="center", fontsize=6)
            axes.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
            axes.set_yticks(range(len(outcomes)), [_title(each["algorithm"]) for each in outcomes], fontsize=7)
            axes.set_title(f"{cluster}, {exchange} exchange", fontsize=9)
            axes.margins(x=0.15)
            axes.set_xlim(0, None)
            axes.grid(alpha=0.3, axis="x")
    for axes in grid[-1]:
        axes.set_xlabel("times the ideal machine's time", fontsize=8)
    grid[0][0].invert_yaxis()
    return figure


def draw_curves(result: Result, cluster: str, exchange: str) -> Figure:
    """Accuracy against virtual time of the run in the middle, for each algorithm, over one exchange of one cluster."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    target, ideal = result["task"]["target"], result["clusters"][cluster]["ideal_seconds"]
    for each in (each for each in result["outcomes"] if each["cluster"] == cluster):
        times, _, accuracies = np.array([(0.0, 0.0, 0.0), *each["curves"][exchange]]).T
        width = 2.2 if ALGORITHMS[each["algorithm"]].ours else 1.2
        axes.plot(times, accuracies, linewidth=width, label=_title(each["algorithm"]))
    axes.axhline(target, color="gray", linestyle=":", linewidth=1)
    axes.axvline(ideal, color="gray", linestyle="--", linewidth=1, label="the ideal machine is there")
    axes.set(xlabel="virtual seconds", ylabel="accuracy", ylim=(max(target - 0.3, 0), min(target + 0.05, 1)))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    return figure


def _by_cluster(result: Result, found: Sequence[Gain]) -> list[str]:
    cells = []
    for cluster in result["clusters"]:
        here = [gain for gain in found if gain.cluster == cluster]
        bounds = {gain.bound for gain in here}
        cells.append(f"{'≈' if bounds - {''} else ''}{fmean(gain.ratio for gain in here):.2f}")
    return cells


def markdown_table(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in body), ""]


def _title(name: str) -> str:
    return ALGORITHMS[name].title
