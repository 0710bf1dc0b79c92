"""Runs in the GPU image, with its Python and user, without a GPU; exits with 1 if something is missing."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from os import _exit
from pathlib import Path

import torch
import triton
from triton.backends.nvidia.driver import CudaUtils

from quire.kernels.triton.precompile import precompile, processes, shapes

OF_THE_DRIVER = {"libcuda.so.1", "libnvidia-ml.so.1"}  # the container toolkit brings them
TOOLS = ("g++", "c++", "clang", "make", "cmake", "ninja", "nvcc", "pip", "git")
LDCONFIG = "/sbin/ldconfig"
USER = 10001
CAPABILITIES = (90, 100)
SHAPE = shapes.ModelShape(
    hidden_size=1024, intermediate_size=3072, num_q_heads=16, num_kv_heads=8, head_dim=128, vocab_size=151936,
    qk_norm=True, block_size=16, max_num_seqs=256, dtype="bfloat16", kv_dtype="bfloat16", single_row=True,
)  # fmt: skip


def main() -> int:
    python, cuda = sys.version.split()[0], torch.version.cuda
    print(f"Python {python}, torch {torch.__version__}, CUDA {cuda}, Triton {triton.__version__}")
    faults = [fault for check in (user, tools, libraries, launcher, kernels) for fault in check()]
    for fault in faults:
        print(f"missing or wrong: {fault}")
    return int(bool(faults))


def user() -> list[str]:
    faults = [] if os.getuid() == USER else [f"user {os.getuid()}"]
    return faults + [f"{path} can be written" for path in (sys.prefix, torch.__file__) if os.access(path, os.W_OK)]


def tools() -> list[str]:
    """Checks that build tools are absent."""
    return [f"there is {found}" for found in map(shutil.which, TOOLS) if found]


def libraries() -> list[str]:
    """Checks that every library of torch finds its dependencies."""
    found = sorted((Path(torch.__file__).parent / "lib").glob("*.so*"))
    lacking = {name for library in found for name in _not_found(library)}
    print(f"{len(found)} libraries of torch; not here: {', '.join(sorted(lacking)) or 'none'}")
    return [f"library {name}" for name in sorted(lacking - OF_THE_DRIVER)]


def _not_found(library: Path) -> list[str]:
    listed = subprocess.run(["ldd", str(library)], capture_output=True, text=True, check=False)
    return [line.split()[0] for line in listed.stdout.splitlines() if line.endswith("not found")]


def launcher() -> list[str]:
    """Checks that Triton can compile its launcher with gcc, link and load it. The driver's library, which comes with
    the GPU, is replaced by a stand-in."""
    faults = [] if Path(LDCONFIG).exists() else [f"{LDCONFIG}, which Triton asks for the driver's library"]
    process = os.fork()  # what is loaded here stays out of the rest
    if not process:
        status = 1
        try:
            with tempfile.TemporaryDirectory() as scratch:
                _start_triton(Path(scratch))
            status = 0
        except Exception:
            traceback.print_exc()
        finally:
            _exit(status)
    failed = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    print(f"Triton's launcher {'was not' if failed else 'was'} compiled, linked and loaded")
    return faults + ["Triton's launcher"] * bool(failed)


def _start_triton(scratch: Path) -> None:
    source = (Path(triton.__file__).parent / "backends" / "nvidia" / "driver.c").read_text()
    names = sorted(set(re.findall(r"\b(cu[A-Z]\w+)\(", source)))
    (scratch / "driver.c").write_text("".join(f"int {name}() {{ return 100; }}\n" for name in names))
    library = scratch / "libcuda.so.1"
    command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", str(library), str(scratch / "driver.c")]
    subprocess.run(command, check=True)
    ctypes.CDLL(str(library))
    triton.knobs.nvidia.libcuda_path = str(scratch)
    triton.knobs.cache.dir = str(scratch / "cache")
    assert callable(CudaUtils().launch)


def kernels() -> list[str]:
    """Compiles all kernels that a model of this shape needs at start-up."""
    faults = []
    for capability in CAPABILITIES:
        with tempfile.TemporaryDirectory() as cache:
            triton.knobs.cache.dir = cache
            process = os.fork()  # which compile_all is the end of
            if not process:
                missing = precompile.Missing(SHAPE, capability, 1, Path(cache) / "marker")
                _exit(0 if processes.compile_all(missing) else 1)
            failed = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            compiled = len(list(Path(cache).rglob("*.cubin")))
        print(f"{compiled} kernels compiled for {capability / 10}")
        if failed or not compiled:
            faults.append(f"kernels for {capability / 10}")
    return faults


if __name__ == "__main__":
    sys.exit(main())
