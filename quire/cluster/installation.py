"""Checks whether the running copy of the package is the installed one."""

from __future__ import annotations

import functools
import json
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

PACKAGE = Path(__file__).resolve().parents[1]


@functools.cache
def is_installed() -> bool:
    """Whether a new interpreter would import the same files, from a wheel or an editable install."""
    try:
        distribution = metadata.distribution("quire")
        checkout = _checkout(distribution)
        package = Path(str(distribution.locate_file("quire"))) if checkout is None else checkout / "quire"
        return package.resolve() == PACKAGE
    except (metadata.PackageNotFoundError, ValueError):
        return False


def _checkout(distribution: metadata.Distribution) -> Path | None:
    """Returns the folder that an editable install (PEP 610) refers to; None for any other install."""
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlsplit(origin["url"]).path))
