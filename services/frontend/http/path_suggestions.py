"""Suggests the path that a client probably meant, for errors about unknown paths."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator

VERSION = "/v1"
LONGEST = 200  # characters; longer paths get no suggestion
LIKENESS = 0.85  # minimum similarity; /v1/chat/completion qualifies


def suggest_path(path: str, known: Iterable[str], is_served: Callable[[str], bool]) -> str:
    """Returns a served path: without extra leading parts that a base URL duplicates, with a missing version, or else
    the most similar one; empty if there is none. `known`: route templates; `is_served`: whether a route matches."""
    if len(path) > LONGEST:
        return ""
    served = next((candidate for candidate in _candidates(path) if is_served(candidate)), "")
    if served:
        return served
    plain = [route for route in known if "{" not in route]
    return next(iter(difflib.get_close_matches(path, plain, 1, LIKENESS)), "")


def _candidates(path: str) -> Iterator[str]:
    """Yields variants of a path: without each number of leading parts, and with the version in front."""
    parts = path.strip("/").split("/")
    for start in range(len(parts)):
        rest = "/" + "/".join(parts[start:])
        if start:
            yield rest
        yield VERSION + rest
