"""One rank of a launch that runs examples, one after the other, and writes down what became of each.

    horovodrun -np 2 python -m tests.documentation.worker DIRECTORY torch EXAMPLE…

``DIRECTORY/rank-R.jsonl`` gets a line as each example starts and another as it ends; see ``tests.launched``.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import sys
import traceback
from pathlib import Path

from tests.documentation.examples import folder, run

PATIENCE_SECONDS = 60
"""An example that takes longer than this hangs: the rank prints where it stands, and ends."""


def main(directory: Path, framework: str, names: list[str]) -> None:
    """Run the examples."""
    stage = importlib.import_module(f"tests.documentation.{framework}_stage")
    stage.hvd.init()
    rank = stage.hvd.rank()
    stage.record(directory / "run.jsonl")
    with (directory / f"rank-{rank}.jsonl").open("w", buffering=1) as log:
        for number, name in enumerate(names):
            log.write(json.dumps({"scenario": name}) + "\n")
            faulthandler.dump_traceback_later(PATIENCE_SECONDS, exit=True)
            stage.hvd.average(0.0)  # all ranks have come here
            result: dict[str, object] = {"ok": True}
            try:
                with folder(directory / f"{number}-{rank}", log=directory / "run.jsonl"):
                    run(name, stage.Stage())
            except Exception:
                result = {"ok": False, "error": traceback.format_exc()}
            faulthandler.cancel_dump_traceback_later()
            log.write(json.dumps({"scenario": name, **result}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
