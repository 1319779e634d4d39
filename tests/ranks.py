"""Starts several ranks through horovodrun, and always comes back: nothing that it started outlives :func:`launch`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from horovod_abs.bench.hosts import Hosts

Controller = Literal["mpi", "gloo"]
ROOT = Path(__file__).parents[1]
_TAG = "HOROVOD_ABS_TEST_LAUNCH"


@dataclass(frozen=True)
class Outcome:
    """How a launch ended.

    Attributes:
        status: Exit status of horovodrun; ``None`` if it did not end by itself in time.
        output: What all ranks and horovodrun printed.
        seconds: How long it took.
        ended_at: When it ended, as ``time.time()``.
    """

    status: int | None
    output: str
    seconds: float
    ended_at: float

    @property
    def tail(self) -> str:
        """The end of the output, for a message."""
        return f"horovodrun: status {self.status} after {self.seconds:.0f} s\n{self.output[-6000:]}"


def launch(
    ranks: int,
    module: str,
    *arguments: str,
    controller: Controller = "mpi",
    timeout: float,
    environment: Mapping[str, str] | None = None,
    hosts: Hosts | None = None,
    during: Callable[[Path], None] = lambda output: None,
) -> Outcome:
    """Run ``python -m module *arguments`` on so many ranks of this machine, or one on each of some hosts.

    Args:
        ranks: How many.
        module: Module below the repository's root, e.g. ``"tests.torch.worker"``.
        arguments: Its command line.
        controller: What Horovod runs over.
        timeout: Seconds after which everything that was started is killed.
        environment: Variables to set besides this process's own.
        hosts: Where to run; as many as ranks.
        during: Called once it has started, with the file that everything is printed to.
    """
    tag = uuid.uuid4().hex
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environment or {}), _TAG: tag}
    command = [sys.executable, "-m", "tests.horovodrun", "-np", str(ranks), f"--{controller}"]
    command += ["-H", hosts.slots, "--disable-cache"] if hosts else []
    command += [sys.executable, "-u", "-m", module, *arguments]
    began = time.monotonic()
    with tempfile.NamedTemporaryFile() as output:
        if hosts:
            process = hosts.start(command, environment=own, output=output.fileno(), directory=ROOT)
        else:
            process = subprocess.Popen(
                command, cwd=ROOT, env={**os.environ, **own}, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            during(Path(output.name))
            status: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            for started in _tagged(tag):
                started.kill()
            process.wait()
        seconds, ended_at = time.monotonic() - began, time.time()
        output.seek(0)
        return Outcome(status, output.read().decode(errors="replace"), seconds, ended_at)


def _tagged(tag: str) -> Iterator[psutil.Process]:
    """The living processes of one launch. A process group won't do: ranks are put into sessions of their own."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(_TAG) == tag:
                yield process
        except (psutil.Error, OSError):
            continue
