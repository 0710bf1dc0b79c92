"""Compiles the library: `python -m quire.kernels.cpu.build [--arch ARCH] [--compiler CXX]`.

Compiles only changed files: an object's name contains a digest of its source, the headers and the flags, and with
`native` of this CPU. Without a compiler nothing is built, which is no error: kernels.load then uses the reference.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire.kernels.cpu import built, processor
from quire.kernels.cpu.built import digest

COMPILERS = ("g++", "clang++", "c++")
# -ffp-contract=off: see simd.h. maybe-uninitialized is wrong about GCC 12's own AVX-512 headers.
FLAGS = ("-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-fvisibility=hidden", "-pthread")
WARNINGS = ("-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-psabi")


def main(arguments: list[str] | None = None, directory: Path = built.BUILD) -> int:
    """Command line: compiles the library into `directory`. Returns the exit status: 1 if a file fails to compile; 0
    also without a compiler."""
    parser = argparse.ArgumentParser(prog="python -m quire.kernels.cpu.build", description="Compiles the CPU kernels.")
    parser.add_argument("--arch", default="native", help="as in -march, e.g. x86-64-v3 or x86-64-v4 for images")
    parser.add_argument("--compiler", help=f"default: the first of {', '.join(COMPILERS)}")
    options = parser.parse_args(arguments)
    compiler = find_compiler(options.compiler)
    if compiler is None:
        print(
            f"quire.kernels.cpu: no C++ compiler ({options.compiler or ', '.join(COMPILERS)}); "
            "the reference will be used"
        )
        return 0
    start = time.monotonic()
    try:
        compiled = build(compiler, options.arch, directory)
    except subprocess.CalledProcessError as error:
        print(error.stderr, file=sys.stderr)
        return 1
    print(f"quire.kernels.cpu: {compiled} files compiled for {options.arch} in {time.monotonic() - start:.1f} s")
    return 0


def find_compiler(wanted: str | None = None) -> str | None:
    """Returns the path of the compiler `wanted`, else of the first of COMPILERS that is installed; None if there is
    none."""
    return next((path for name in ((wanted,) if wanted else COMPILERS) if (path := shutil.which(name))), None)


def build(compiler: str, arch: str, directory: Path = built.BUILD, flags: tuple[str, ...] = FLAGS) -> int:
    """Brings the library in `directory` up to date for `arch` (as in -march), compiling changed files in parallel and
    removing old objects; returns how many were compiled. Raises CalledProcessError with the compiler's messages."""
    directory.mkdir(parents=True, exist_ok=True)
    flags = (*flags, *WARNINGS, target(arch))
    context = digest(
        built.read_headers(), run(compiler, "--version"), *flags, *(processor.features() if arch == "native" else ())
    )
    objects = {
        source: directory / f"{source.stem}-{digest(context, source.read_bytes())}.o" for source in built.sources()
    }
    missing = [(source, path) for source, path in objects.items() if not path.exists()]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda pair: compile_source(compiler, flags, *pair), missing))
    library, stamp = directory / built.LIBRARY, directory / built.STAMP
    linked = digest(*(path.name for path in objects.values()))
    if not library.exists() or built.read_stamp(directory).get("linked") != linked:
        link(compiler, list(objects.values()), library)
        write(
            stamp,
            {
                "linked": linked,
                "sources": built.source_digest(),
                "machine": platform.machine(),
                "needs": needs(compiler, arch),
            },
        )
    for path in set(directory.glob("*.o")) - set(objects.values()):
        path.unlink()
    return len(missing)


def remove_objects(directory: Path) -> None:
    """Removes object files where nothing will be compiled again."""
    for path in directory.glob("*.o"):
        path.unlink()


def target(arch: str) -> str:
    return f"-mcpu={arch}" if platform.machine() in {"aarch64", "arm64"} else f"-march={arch}"


def needs(compiler: str, arch: str) -> list[str]:
    """Returns the CPU features that code for `arch` may use, by their names in /proc/cpuinfo."""
    macros = run(compiler, target(arch), "-dM", "-E", "-x", "c++", os.devnull).split()
    named = sorted(feature for macro, feature in processor.FEATURE_MACROS.items() if macro in macros)
    return named if named or arch != "native" else list(processor.features())


def header_folders() -> list[str]:
    """Returns the compiler flags for the header folders."""
    return sorted({f"-I{header.parent}" for header in built.headers()})


def compile_source(compiler: str, flags: tuple[str, ...], source: Path, target: Path) -> None:
    """Compiles one source to the object file `target`, which appears complete. Raises CalledProcessError."""
    unfinished = target.with_suffix(f".{os.getpid()}")
    run(compiler, *flags, *header_folders(), "-c", str(source), "-o", str(unfinished))
    unfinished.replace(target)


def link(compiler: str, objects: list[Path], library: Path) -> None:
    """Links the objects to `library`, which appears complete. Raises CalledProcessError."""
    unfinished = library.with_suffix(f".{os.getpid()}")
    run(compiler, "-shared", "-pthread", *map(str, objects), "-o", str(unfinished))
    unfinished.replace(library)  # running processes keep the old file


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def write(path: Path, content: dict[str, object]) -> None:
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(content))
    unfinished.replace(path)


if __name__ == "__main__":
    sys.exit(main())
