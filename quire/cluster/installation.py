"""Whether the running copy of the package is the one that is installed in this environment."""

from __future__ import annotations

import functools
import json
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

PACKAGE = Path(__file__).resolve().parents[1]


@functools.cache
def is_installed() -> bool:
    """True if a new interpreter imports the same files as this one, from a wheel or an editable install."""
    try:
        distribution = metadata.distribution("quire")
        checkout = _checkout(distribution)
        package = Path(str(distribution.locate_file("quire"))) if checkout is None else checkout / "quire"
        return package.resolve() == PACKAGE
    except (metadata.PackageNotFoundError, ValueError):
        return False


def _checkout(distribution: metadata.Distribution) -> Path | None:
    """The folder that an editable install (PEP 610) refers to; None for any other install."""
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlsplit(origin["url"]).path))
