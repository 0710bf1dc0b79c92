"""Runs in an image, with its Python and user; exits with 1 if something is missing.

python inside.py ROLE
"""

from __future__ import annotations

import ctypes
import importlib
import locale
import os
import pkgutil
import pwd
import socket
import sqlite3
import ssl
import sys
import sysconfig
import tempfile
import zoneinfo
from collections.abc import Iterator
from pathlib import Path

USER = 10001
OURS = Path(sys.prefix)
FEWEST_AUTHORITIES = 100
OF_OTHER_EXTRAS = {
    "interegular",
    "lmformatenforcer",
    "outlines_core",
    "redis",
    "xgrammar",
}  # each image's bill lists its own


def main(role: str) -> int:
    faults = [*user(), *system(), *libraries(), *modules(role)]
    for fault in faults:
        print(f"missing or wrong: {fault}")
    return int(bool(faults))


def user() -> Iterator[str]:
    if os.getuid() != USER or pwd.getpwuid(USER).pw_name != "quire":
        yield f"user {os.getuid()}"
    if os.access(OURS, os.W_OK):
        yield f"{OURS} can be written"
    with tempfile.TemporaryFile():
        pass


def system() -> Iterator[str]:
    """Checks everything outside of Python: names, places, certificates, databases."""
    if locale.getpreferredencoding().lower() != "utf-8":
        yield f"encoding {locale.getpreferredencoding()}"
    zoneinfo.ZoneInfo("Europe/Berlin")
    socket.getaddrinfo("localhost", 443)
    sqlite3.connect(":memory:").execute("select 1")
    paths = ssl.get_default_verify_paths()
    found = [path for path in Path(paths.capath or "/nowhere").glob("*") if path.exists()]
    if len(found) < FEWEST_AUTHORITIES:
        yield f"certificates: {len(found)} in {paths.capath}"


def libraries() -> Iterator[str]:
    """Checks that every library finds its dependencies."""
    found = [*OURS.rglob("*.so"), *Path(sysconfig.get_path("stdlib")).rglob("*.so")]
    print(f"{len(found)} libraries")
    for library in found:
        try:
            ctypes.CDLL(str(library))
        except OSError as error:
            yield f"{library}: {error}"


def modules(role: str) -> Iterator[str]:
    """Imports all modules of the service, also those that only some option uses."""
    count = 0
    for package in ("quire.shared", f"quire.services.{role}"):
        inner = pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}.")
        for name in (module.name for module in inner):
            count += 1
            try:
                importlib.import_module(name)
            except ImportError as error:
                if (error.name or "").partition(".")[0] not in OF_OTHER_EXTRAS:
                    yield f"{name}: {error}"
    print(f"{count} modules")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
