"""Build steps of the package: generates the protocol modules and, where a compiler exists, compiles the CPU kernels.

pyproject.toml has the rest. The kernels are for this machine's CPU; KERNELS_ARCH names another, as in -march. A wheel
that is installed on a machine whose CPU lacks something compiles them again there, at the first start.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from quire.kernels.cpu import build, built  # noqa: E402
from quire.protos import generate  # noqa: E402
from quire.shared import build_commit  # noqa: E402

ARCH = os.environ.get("KERNELS_ARCH", "native")


class BuildPy(build_py):
    """Adds generated files: to the source tree for an editable install, to the build folder for a wheel."""

    def run(self) -> None:
        root = ROOT if self.editable_mode else Path(self.build_lib)
        if not self.editable_mode:
            shutil.rmtree(root, ignore_errors=True)  # setuptools would keep deleted modules
        super().run()
        with tempfile.TemporaryDirectory() as scratch:
            generate.generate(Path(scratch))
            generate.publish(Path(scratch), root / "quire" / "shared" / "pb")
        if not self.editable_mode:
            write_commit(root / "quire" / "shared" / build_commit.FILE)
        compile_kernels(root / "quire" / "kernels" / "cpu" / "build")


def write_commit(target: Path) -> None:
    """Records the commit that the package is built from: QUIRE_COMMIT, or that of the checkout."""
    commit = os.environ.get("QUIRE_COMMIT") or build_commit.checkout_commit(ROOT)
    if commit:
        target.write_text(commit + "\n")


class BdistWheel(bdist_wheel):
    """Tags the wheel for any Python on one platform, because the library is loaded with ctypes."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class PlatformDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return build.find_compiler() is not None


def compile_kernels(target: Path) -> None:
    """Compiles in the source tree, so that the next build reuses unchanged objects."""
    compiler = build.find_compiler()
    if compiler is None:
        print("quire: no C++ compiler: the package will compute with plain torch on CPUs", file=sys.stderr)
        return
    directory = built.BUILD if ARCH == "native" else built.BUILD.parent / "build" / ARCH
    try:
        build.build(compiler, ARCH, directory)
    except subprocess.CalledProcessError as error:
        sys.exit(f"quire: the CPU kernels do not compile:\n{error.stderr}")
    if target != directory:
        target.mkdir(parents=True, exist_ok=True)
        for name in (built.LIBRARY, built.STAMP):
            shutil.copy(directory / name, target / name)


setup(cmdclass={"build_py": BuildPy, "bdist_wheel": BdistWheel}, distclass=PlatformDistribution)
