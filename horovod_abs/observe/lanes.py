"""A picture of when each rank computed, waited and exchanged: one lane a rank, and one for the network.

Drawn from a run log (:func:`blocks_of`) or from what was played through in virtual time
(:func:`horovod_abs.sim.play.play`).

>>> figure = lanes({"ABS-SGD": blocks_of(hvd.read_run_log("runs/mnist.jsonl"))}, begin=0.0, seconds=0.5)
>>> figure.savefig("lanes.png")

It is for the eye. :mod:`horovod_abs.observe.timeline` writes the same for a viewer in which one can zoom.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from horovod_abs.observe.runlog import RunLog
from horovod_abs.observe.timeline import trace
from horovod_abs.sim.play import Block

_ROUNDS = ("#0072B2", "#7CC0E8")
"""Two blues that take turns, so that one sees where a round ends."""
_WAIT, _EXCHANGE = "#F3C6B0", "#8C8C8C"
_HEIGHT = {"compute": 0.7, "wait": 0.7, "exchange": 0.35}


def blocks_of(log: RunLog) -> list[Block]:
    """What happened in a recorded run, in seconds since its beginning; a rank's micro-batches of a round are one block.

    An exchange begins when the last rank has launched it.

    Raises:
        RunLogError: no round was merged.
    """
    blocks: list[Block] = []
    exchanges: dict[int, tuple[float, float]] = {}
    for event in trace(log)["traceEvents"]:
        if event["ph"] != "X":
            continue
        number, begin, end = event["args"]["round"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        if event["name"] == "exchange":
            others = exchanges.get(number, (begin, end))
            exchanges[number] = (max(begin, others[0]), max(end, others[1]))
        else:
            blocks.append(Block(event["name"], event["pid"], number, begin, end))
    return blocks + [Block("exchange", None, number, *span) for number, span in exchanges.items()]


def draw_lanes(axes: Axes, blocks: Sequence[Block], *, begin: float, end: float, title: str = "") -> None:
    """One lane a rank, the first on top, and the network's below.

    Args:
        axes: Where to.
        blocks: What to draw.
        begin: Of the stretch of time that is shown, in seconds.
        end: Of that stretch.
        title: Above it.

    Raises:
        ValueError: nothing happened in that stretch.
    """
    shown = [block for block in blocks if block.end > begin and block.begin < end]
    if not shown:
        raise ValueError(f"nothing happened between {begin:g} and {end:g} s")
    ranks = 1 + max((block.rank for block in blocks if block.rank is not None), default=0)
    for block in shown:
        lane = ranks if block.rank is None else block.rank
        height = _HEIGHT[block.what]
        axes.broken_barh(
            [(1e3 * (block.begin - begin), 1e3 * (block.end - block.begin))],
            (lane - height / 2, height),
            facecolors=_colour(block),
            edgecolors="white",
            linewidth=0.8,
        )
    axes.set_yticks(range(ranks + 1), [*(f"rank {rank}" for rank in range(ranks)), "network"])
    axes.set_ylim(ranks + 0.5, -0.6)
    axes.set_xlim(0, 1e3 * (end - begin))
    axes.set_title(title, loc="left", fontsize="medium")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def lanes(pictures: Mapping[str, Sequence[Block]], *, seconds: float, begin: float = 0.0) -> Figure:
    """Several runs under one another, on the same scale of time.

    Args:
        pictures: By title.
        seconds: How much of each is shown.
        begin: From when on, in seconds since each one's beginning.

    Raises:
        ValueError: there is none, or nothing happened in that stretch.
    """
    if not pictures:
        raise ValueError("there is nothing to draw")
    ranks = 1 + max(block.rank for blocks in pictures.values() for block in blocks if block.rank is not None)
    figure = Figure(figsize=(9, 0.5 + len(pictures) * (0.55 + 0.24 * (ranks + 1))), layout="constrained")
    rows = figure.subplots(len(pictures), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, blocks) in zip(rows, pictures.items(), strict=True):
        draw_lanes(axes, blocks, begin=begin, end=begin + seconds, title=title)
    rows[-1].set_xlabel("milliseconds")
    key = [
        (_ROUNDS[0], "computing"),
        (_ROUNDS[1], "next round"),
        (_WAIT, "waiting"),
        (_EXCHANGE, "exchange"),
    ]
    figure.legend(
        handles=[Patch(color=colour, label=label) for colour, label in key],
        loc="outside lower center",
        ncols=len(key),
        fontsize="small",
        frameon=False,
    )
    return figure


def _colour(block: Block) -> str:
    if block.what == "compute":
        return _ROUNDS[block.round % 2]
    return _WAIT if block.what == "wait" else _EXCHANGE
