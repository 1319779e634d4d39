"""How a process ends when some rank does not answer any more.

Horovod's shutdown, which runs at exit, needs every rank's answer. Where one is frozen the others would hang there,
their tracebacks printed, and nobody would be told: a launcher ends the job once a process has ended, and not before.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys

_unanswered = False


def prepare() -> None:
    """Call after Horovod was initialised on several ranks, so that this runs at exit, right before its shutdown."""
    atexit.unregister(_end_if_unanswered)
    atexit.register(_end_if_unanswered)


def expect_no_answer() -> None:
    """A rank has not answered in time: this process, at exit, does not wait for it again, and its status is 1."""
    global _unanswered
    _unanswered = True


def _end_if_unanswered() -> None:
    if not _unanswered:
        return
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
