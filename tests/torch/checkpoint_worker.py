"""One process that writes checkpoints, and is killed while it writes the second one.

python -m tests.torch.checkpoint_worker write DIRECTORY
python -m tests.torch.checkpoint_worker restore DIRECTORY
"""

from __future__ import annotations

import io
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

import horovod_abs.torch as hvd
from tests.torch.scenario import digest, small_model, wrap


def main(what: str, directory: Path) -> None:
    """Write or restore."""
    hvd.init()
    model = small_model()
    optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
    checkpoints = hvd.Checkpointer(directory, model, optimizer)
    if what == "restore":
        assert checkpoints.restore()
        print("restored", digest(model), optimizer.samples_seen)
        return
    step(model, optimizer)
    checkpoints.save()
    print("saved", digest(model), optimizer.samples_seen, flush=True)
    step(model, optimizer)
    save = torch.save

    def save_half(state: Any, file: Any) -> None:
        whole = io.BytesIO()
        save(state, whole)
        file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = save_half  # type: ignore[assignment]
    checkpoints.save()


def step(model: torch.nn.Module, optimizer: Any) -> None:
    """Train a little."""
    model(torch.ones(4, 6, dtype=torch.float64)).mean().backward()
    optimizer.step(samples=4)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
