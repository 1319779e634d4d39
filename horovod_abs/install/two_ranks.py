"""The smallest real run: two ranks add their numbers up. Started by the doctor through horovodrun.

horovodrun -np 2 python -m horovod_abs.install.two_ranks torch mpi
"""

from __future__ import annotations

import importlib
import sys


def main(framework: str, controller: str) -> None:
    """Initialise Horovod, allreduce once, and print a line that says so.

    Args:
        framework: "torch" or "tensorflow".
        controller: "mpi" or "gloo"; raises `RuntimeError` if Horovod runs on another one.
    """
    if controller == "mpi":
        importlib.import_module("mpi4py.MPI")  # before Horovod, which then shares its MPI
    hvd = importlib.import_module(f"horovod.{framework}")
    library = importlib.import_module(framework)
    tensor = library.tensor if framework == "torch" else library.constant
    hvd.init()
    if not (hvd.mpi_enabled() if controller == "mpi" else hvd.gloo_enabled()):
        raise RuntimeError(f"Horovod does not run on {controller}")
    total = float(hvd.allreduce(tensor([hvd.rank() + 1.0]), op=hvd.Sum)[0])
    print(f"ranks={hvd.size()} sum={total}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
