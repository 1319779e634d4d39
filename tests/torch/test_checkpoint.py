"""Checkpoints of one rank. Those of several: ``scenarios_recording``."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import horovod_abs.torch as hvd
from tests.ranks import ROOT
from tests.torch.replay import sgd
from tests.torch.scenario import small_model, wrap


def run(what: str, directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.torch.checkpoint_worker", what, str(directory)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_a_run_killed_while_it_writes_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    written = run("write", tmp_path)
    assert written.returncode == -signal.SIGKILL, written.stderr
    assert [file.suffix for file in sorted(tmp_path.iterdir())] == [".pt", ".tmp"], "it was to be killed in mid-write"
    restored = run("restore", tmp_path)
    assert restored.returncode == 0, restored.stderr
    assert restored.stdout.split()[1:] == written.stdout.split()[1:]


@pytest.mark.usefixtures("single_rank")
def test_at_least_one_checkpoint_is_kept(tmp_path: Path) -> None:
    model = small_model()
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        hvd.Checkpointer(tmp_path, model, wrap(model, sgd(model)), keep=0, signals=False)
