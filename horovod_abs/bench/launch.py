"""Starts ranks with horovodrun from a Python program, and passes on what they print."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from horovod_abs.bench.hosts import Hosts

Controller = Literal["mpi", "gloo"]

_PREFIX = re.compile(r"^\[(?:\d+,)?(?P<rank>\d+)\]<(?:stdout|stderr)>: ?")
_BAR = re.compile(r"\d+%\|.*\|")
_KEPT_LINES = 40
_PATIENCE_SECONDS = 5.0


class LaunchError(RuntimeError):
    """The ranks could not be started, or one of them has failed."""


def environment(ranks: int, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """What to start horovodrun with, so that it finds its MPI and is quiet.

    Args:
        ranks: How many will run on this machine.
        base: What to add to; by default this program's own environment.
    """
    result = dict(os.environ if base is None else base)
    scripts = str(Path(sys.executable).parent)
    if scripts not in result.get("PATH", "").split(os.pathsep):
        result["PATH"] = os.pathsep.join(filter(None, [scripts, result.get("PATH")]))
    result.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    result.setdefault("PYTHONUNBUFFERED", "1")
    if ranks > (os.cpu_count() or 1):
        result.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")  # ranks that wait would take the processors from others
    return result


def find_horovodrun() -> str:
    """The path of horovodrun, by preference the one beside this Python.

    Raises:
        LaunchError: there is none.
    """
    found = shutil.which("horovodrun", path=environment(1)["PATH"])
    if found is None:
        raise LaunchError("horovodrun was not found: install Horovod with `horovod-abs install-horovod`")
    return found


def command_line(
    ranks: int, module: str, arguments: Sequence[str], controller: Controller | None, hosts: Hosts | None = None
) -> list[str]:
    """The horovodrun command that starts ``python -m module`` on so many ranks, on this machine or on hosts.

    Raises:
        LaunchError: there is no horovodrun.
    """
    choice = [] if controller is None else [f"--{controller}"]
    where = [] if hosts is None else ["-H", hosts.slots, "--disable-cache"]
    return [find_horovodrun(), "-np", str(ranks), *choice, *where, sys.executable, "-m", module, *arguments]


def run_ranks(
    ranks: int,
    module: str,
    arguments: Sequence[str] = (),
    *,
    controller: Controller | None = None,
    show: Callable[[str], None] | None = None,
    hosts: Hosts | None = None,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run ``python -m module`` on so many ranks of this machine, until all have ended.

    Args:
        ranks: How many.
        module: What to run.
        arguments: Of the module.
        controller: Horovod's; by default the one that horovodrun chooses.
        show: Gets each line that a rank prints, without its prefix; :class:`Screen` by default. What horovodrun itself
            has to say is shown only if it fails.
        hosts: Emulated hosts to run on, one rank on each, in place of this machine.
        variables: Of the environment, besides this program's own.

    Raises:
        LaunchError: horovodrun is missing, or has failed; with the last lines that it printed.
    """
    command = command_line(ranks, module, arguments, controller, hosts)
    own = environment(ranks, {**os.environ, **(variables or {})})
    last: deque[str] = deque(maxlen=_KEPT_LINES)
    show = Screen() if show is None else show
    with subprocess.Popen(
        command if hosts is None else hosts.command(command),
        env=own if hosts is None else hosts.environment(own),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            for raw in process.stdout:
                line, from_rank = _PREFIX.subn("", raw.rstrip("\n"))
                last.append(line)
                if from_rank:
                    show(line)
        except BaseException:
            _end(process)
            raise
    if process.returncode:
        raise LaunchError(
            f"{' '.join(command)}\nended with exit status {process.returncode}. The last that it printed:\n"
            + "\n".join(f"  {line}" for line in last)
        )


def _end(process: subprocess.Popen[str]) -> None:
    """End horovodrun with the shell and the mpirun that it has become; mpirun then ends the ranks."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_SECONDS)
            return


def is_bar(line: str) -> bool:
    """Whether a line that a rank has printed is a drawing of a progress bar."""
    return _BAR.search(line) is not None


class Screen:
    """Prints what ranks print; on a terminal a progress bar redraws itself in place."""

    def __init__(self) -> None:
        self._in_place = sys.stdout.isatty()
        self._bar_shown = False

    def __call__(self, line: str) -> None:
        """Print one line."""
        redrawn = is_bar(line)
        before = "\r\x1b[K" if self._in_place and self._bar_shown and redrawn else "\n" if self._bar_shown else ""
        after = "" if self._in_place and redrawn else "\n"
        self._bar_shown = self._in_place and redrawn
        sys.stdout.write(before + line + after)
        sys.stdout.flush()
