"""One rank of a launch that runs many scenarios, one after the other, and writes down what became of each.

    horovodrun -np 4 python -m tests.torch.worker DIRECTORY NAME…

``DIRECTORY/rank-R.jsonl`` gets a line as each scenario starts and another as it ends, so that a scenario that hangs,
or ends the process, is named too.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import sys
import time
import traceback
import warnings
import weakref
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import horovod_abs.torch as hvd
from horovod_abs import rounds
from tests.torch.scenario import Ranks, Scenario, scenarios

PATIENCE_SECONDS = 100
"""A scenario that takes longer than this hangs: the rank prints where it stands, and ends."""


def main(directory: Path, names: list[str]) -> None:
    """Run the scenarios."""
    known = scenarios()
    torch.set_num_threads(1)
    hvd.init(process_sets="dynamic")
    ranks = Ranks(hvd.rank(), hvd.size(), "mpi" if hvd.mpi_enabled() else "gloo")
    with (directory / f"rank-{ranks.rank}.jsonl").open("w", buffering=1) as log:
        for number, name in enumerate(names):
            log.write(json.dumps({"scenario": name}) + "\n")
            here = replace(ranks, scenario=name)
            log.write(json.dumps({"scenario": name, **_run(known[name], number, here)}) + "\n")


def _run(scenario: Scenario, number: int, ranks: Ranks) -> dict[str, Any]:
    faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
    # Whatever the scenario before has left behind, tensor names are new, and the same on all ranks.
    rounds._made = defaultdict(lambda: itertools.count(10 * number))
    rounds._drivers = weakref.WeakSet()
    hvd.barrier()
    torch.manual_seed(number)
    began = time.perf_counter()
    try:
        with warnings.catch_warnings():
            value = scenario.run(ranks)
        result = {"ok": True, "value": value}
    except Exception:
        result = {"ok": False, "error": traceback.format_exc()}
    finally:
        faulthandler.cancel_dump_traceback_later()
    return {**result, "seconds": round(time.perf_counter() - began, 2)}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
