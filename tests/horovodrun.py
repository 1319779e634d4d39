"""``horovodrun`` without its question whether MPI and Gloo were built, for which it imports TensorFlow at every launch.

Only to save time in tests; ``horovodrun`` as users type it is tested with the installation.
"""

from __future__ import annotations

import sys

from horovod.runner import launch


def _built(verbose: bool = False) -> bool:
    return True


if __name__ == "__main__":
    launch.mpi_built = launch.gloo_built = _built
    sys.exit(launch.run_commandline())
