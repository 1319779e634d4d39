"""Horovod's last release, fetched, verified, and edited so that it builds and starts today.

Horovod 0.28.1 (June 2023) exists as a source package only and predates current compilers, PyTorch,
TensorFlow, Python and Open MPI. `EDITS` is the whole difference between that package and what we
build: text that is replaced by other text, each time for the reason given. An edit whose text is
not found stops the build.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from horovod_abs.install.problems import Problem, SetupError

HOROVOD_VERSION = "0.28.1"
SDIST_NAME = f"horovod-{HOROVOD_VERSION}.tar.gz"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"


@dataclass(frozen=True)
class Change:
    """In `file`, the text `old`, which occurs there exactly once, becomes `new`."""

    file: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        """Change the file under `root`.

        Raises:
            SetupError: the file lacks the text, or has it more than once.
        """
        path = root / self.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if text.count(self.old) != 1:
            raise SetupError(
                Problem(
                    f"{self.file} holds {text.count(self.old)} times instead of once: {self.old!r}",
                    f"The source is not that of Horovod {HOROVOD_VERSION} as released, "
                    "or has been edited already. Unpack a fresh copy.",
                )
            )
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


@dataclass(frozen=True)
class Edit:
    """One departure from the released source: why, and the changes that make it."""

    reason: str
    changes: tuple[Change, ...]

    def apply(self, root: Path) -> None:
        """Make every change under `root`; raises `SetupError` if one does not fit."""
        for change in self.changes:
            change.apply(root)

    def is_in(self, root: Path) -> bool:
        """Whether an *installed* Horovod has this edit, as far as its Python files show."""
        return all(
            change.new in (root / change.file).read_text(encoding="utf-8")
            for change in self.changes
            if change.file.endswith(".py") and (root / change.file).is_file()
        )


EDITS = (
    Edit(
        "PyTorch has needed C++17 since 2.1.",
        tuple(
            Change(file, "set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 17)")
            for file in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt")
        ),
    ),
    Edit(
        "Newer standard libraries no longer include <stdexcept> by way of other headers.",
        (
            Change(
                "horovod/common/common.h",
                "#include <memory>\n",
                "#include <memory>\n#include <stdexcept>\n",
            ),
        ),
    ),
    Edit(
        "The XLA operations (off by default) need a header that TensorFlow's wheels lack.",
        (
            Change(
                "horovod/tensorflow/CMakeLists.txt",
                'list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
                "",
            ),
        ),
    ),
    Edit(
        "Open MPI 5 misreads options with one dash, and by default refuses more ranks than cores.",
        (
            Change(
                "horovod/runner/mpi_run.py",
                "_NO_BINDING_ARGS = ['-bind-to none', '-map-by slot']\n",
                "_NO_BINDING_ARGS = ['-bind-to none', '-map-by slot']\n"
                "_OMPI_BINDING_ARGS = ['--bind-to none', '--map-by slot:OVERSUBSCRIBE']\n",
            ),
            Change(
                "horovod/runner/mpi_run.py",
                "return list(_OMPI_FLAGS), list(_NO_BINDING_ARGS), _OMPI_IMPL",
                "return list(_OMPI_FLAGS), list(_OMPI_BINDING_ARGS), _OMPI_IMPL",
            ),
        ),
    ),
    Edit(
        "Open MPI 5 calls the ssh options plm_ssh_args (4 and older: plm_rsh_args), or else "
        "`horovodrun -p PORT -i KEY` has no effect.",
        (
            Change(
                "horovod/runner/mpi_run.py",
                "else f'-mca plm_rsh_args \\\"{joined_ssh_args}\\\"'",
                "else (f'--mca plm_ssh_args \\\"{joined_ssh_args}\\\" '\n"
                "                                              "
                "f'--mca plm_rsh_args \\\"{joined_ssh_args}\\\"')",
            ),
        ),
    ),
    Edit(
        "Python 3.12 removed distutils.",
        (
            Change(
                "horovod/torch/CMakeLists.txt",
                "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
                "import sysconfig; print(sysconfig.get_path('include'))",
            ),
            Change(
                "horovod/runner/js_run.py",
                "from distutils.spawn import find_executable\n",
                "from shutil import which as find_executable\n",
            ),
        ),
    ),
    Edit(
        "`path/to/venv/bin/horovodrun`, or a notebook, must start the mpirun that Horovod was "
        "built with also where the environment is not activated; another MPI's mpirun would "
        "start ranks that do not see each other.",
        (
            Change(
                "horovod/runner/__init__.py",
                "import warnings\n",
                "import os\n"
                "import shutil\n"
                "import sys\n"
                "import warnings\n"
                "\n"
                "_scripts = os.path.dirname(sys.executable)\n"
                "_mpirun = os.path.join(_scripts, 'mpirun')\n"
                "if os.path.exists(_mpirun) and shutil.which('mpirun') != _mpirun:\n"
                "    os.environ['PATH'] = _scripts + os.pathsep + os.environ.get('PATH', '')\n",
            ),
        ),
    ),
    Edit(
        "horovodrun imports the frameworks in turn to learn whether MPI was built; PyTorch takes "
        "half as long as TensorFlow, and logs nothing.",
        (
            Change(
                "horovod/common/util.py",
                "EXTENSIONS = ['tensorflow', 'torch', 'mxnet']",
                "EXTENSIONS = ['torch', 'tensorflow', 'mxnet']",
            ),
        ),
    ),
)


def edits_digest() -> str:
    """A short hash of what `EDITS` change: a Horovod built with other edits is another Horovod."""
    changes = [edit.changes for edit in EDITS]
    return hashlib.sha256(repr(changes).encode()).hexdigest()[:12]


def verify(sdist: Path, expected: str = SDIST_SHA256) -> None:
    """Raise `SetupError` unless the file has the expected SHA-256."""
    found = hashlib.sha256(sdist.read_bytes()).hexdigest()
    if found != expected:
        raise SetupError(
            Problem(
                f"{sdist} is not Horovod's released source package: its SHA-256 is {found}, not {expected}.",
                f"Delete it and try again: rm {sdist}. If that does not help, "
                "look at the package index that pip uses: pip config list",
            )
        )


def fetch_sdist(directory: Path, environment: dict[str, str]) -> Path:
    """Horovod's source package in `directory`, downloaded by pip if it is not there, and verified.

    Args:
        directory: where the package is kept.
        environment: for pip, which runs the package's ``setup.py`` for its metadata and so
            must be able to import setuptools.
    """
    sdist = directory / SDIST_NAME
    if not sdist.exists():
        directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-build-isolation", "--no-binary", "horovod", "--dest", str(directory)]
        done = subprocess.run(
            [*command, f"horovod=={HOROVOD_VERSION}"],
            env=environment,
            text=True,
            capture_output=True,
        )
        if not sdist.exists():
            last = "\n".join(done.stderr.strip().splitlines()[-5:])
            raise SetupError(
                Problem(
                    f"pip could not download the source of Horovod {HOROVOD_VERSION}:\n{last}",
                    f"Check the network and `pip config list`, or put {SDIST_NAME} into {directory}.",
                )
            )
    verify(sdist)
    return sdist


def unpack(sdist: Path, directory: Path) -> Path:
    """Unpack the package and make all `EDITS`; returns the root of the source."""
    shutil.unpack_archive(sdist, directory)
    root = directory / sdist.name.removesuffix(".tar.gz")
    for edit in EDITS:
        edit.apply(root)
    return root
