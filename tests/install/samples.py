"""A build and an installed Horovod as they might be, for tests to vary."""

from __future__ import annotations

from horovod_abs.install.installed import Abilities
from horovod_abs.install.target import Target

HERE = Target(
    horovod="0.28.1",
    edits="abc",
    python="cpython-311",
    platform="linux-x86_64 glibc 2.36",
    processor="avx fma",
    torch="2.13.0 cxx11abi=1",
    tensorflow="",
    mpi_kind="pypi",
    mpi="Open MPI 5.0.11",
    gpu="none",
    options="",
    compiler="c++ 12",
)
WORKING = Abilities(mpi=True, gloo=True, mpi4py="Open MPI", mpi_libraries=("/lib/libmpi.so.40",))
