"""How a process ends when a rank does not answer: in a process of its own, with a shutdown that never returns."""

from __future__ import annotations

import subprocess
import sys
import textwrap

PROGRAM = """
import atexit, sys, time
from horovod_abs import shutdown

atexit.register(time.sleep, 60)  # Horovod's
shutdown.prepare()
shutdown.prepare()
atexit.register(print, "what the user registered")
{then}
"""


def run(then: str, timeout: float) -> subprocess.CompletedProcess[str]:
    program = textwrap.dedent(PROGRAM).format(then=then)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=timeout, check=False)


def test_a_process_that_expects_no_answer_ends_with_its_traceback() -> None:
    ended = run("shutdown.expect_no_answer(); print('printed'); raise KeyError('the cause')", timeout=30)
    assert ended.returncode == 1
    assert ended.stdout.splitlines() == ["printed", "what the user registered"]
    assert "KeyError: 'the cause'" in ended.stderr


def test_other_processes_shut_down_as_ever() -> None:
    ended = run("atexit.unregister(time.sleep); atexit.register(print, 'last')", timeout=30)
    assert ended.returncode == 0
    assert ended.stdout.splitlines() == ["last", "what the user registered"]
