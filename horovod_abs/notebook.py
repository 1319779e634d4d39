"""Starts ranks from a notebook, with a progress bar that is redrawn in place.

::

    run("horovodrun -np 4 python -m horovod_abs.examples.torch_mnist --epochs 3 --json runs/mnist.json")

What the ranks find out comes back in files.
"""

from __future__ import annotations

import re
import shlex
from collections import deque
from collections.abc import Callable
from typing import Any

from horovod_abs.bench.launch import is_bar, run_ranks

_FORM = "horovodrun -np N python -m MODULE …"
_COMMAND = re.compile(r"horovodrun\s+-np\s+([1-9]\d*)\s+python\s+-m\s+(\S+)(.*)", re.DOTALL)

_NOISE = re.compile(r"absl::InitializeLog\(\)|^[IW]\d{4} .*\bport\.cc:")
"""What TensorFlow prints before its log level counts."""

Show = Callable[[str], Callable[[str], None]]
"""Shows a text, and returns what shows another in its place."""


def run(command: str) -> None:
    """Run a horovodrun command on this machine until it has ended, and show below the cell what its ranks print.

    Stopping the cell stops the ranks.

    Args:
        command: ``horovodrun -np N python -m MODULE …``; it may go on in further lines.

    Raises:
        ValueError: the command has another form.
        LaunchError: a rank has failed; with the last lines that it printed.
    """
    ranks, module, arguments = parse(command)
    run_ranks(ranks, module, arguments, show=Screen(f"starting {ranks} ranks …"))


def parse(command: str) -> tuple[int, str, list[str]]:
    """Number of ranks, module, and the module's arguments.

    >>> parse("horovodrun -np 4 python -m horovod_abs.examples.torch_mnist --epochs 3")
    (4, 'horovod_abs.examples.torch_mnist', ['--epochs', '3'])

    Raises:
        ValueError: the command has another form than :func:`run` takes.
    """
    found = _COMMAND.fullmatch(command.strip())
    if found is None:
        raise ValueError(f"a notebook starts ranks with {_FORM}, not with {command!r}")
    return int(found[1]), found[2], shlex.split(found[3])


class Screen:
    """Shows lines below a cell; a progress bar takes the place of its last drawing, on top.

    Args:
        waiting: Shown until the first line comes.
        show: How; by default as a notebook does.
        head: A line that stays on top of all.
        most: How many lines to keep; all by default.
    """

    def __init__(
        self, waiting: str, show: Show | None = None, *, head: str | None = None, most: int | None = None
    ) -> None:
        self._head = [] if head is None else [head]
        self._bar: list[str] = []
        self._lines: deque[str] = deque(maxlen=most)
        self._update = (_below_the_cell if show is None else show)("\n".join([*self._head, waiting]))

    def __call__(self, line: str) -> None:
        """Show one more line."""
        if _NOISE.search(line):
            return
        if is_bar(line):
            self._bar = [line]
        else:
            self._lines.append(line)
        self._update(self.text)

    @property
    def text(self) -> str:
        """What is shown."""
        return "\n".join([*self._head, *self._bar, *self._lines])


def _below_the_cell(text: str) -> Callable[[str], None]:
    from IPython.display import display  # the notebooks' requirement, and not the package's

    handle: Any = display({"text/plain": text}, raw=True, display_id=True)
    return lambda new: handle.update({"text/plain": new}, raw=True)
