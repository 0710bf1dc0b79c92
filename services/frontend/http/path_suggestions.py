"""The path that a client probably meant, for the error about one that is not there."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator

VERSION = "/v1"
LONGEST = 200  # characters of a path that others are compared with
LIKENESS = 0.85  # from which on one is meant: /v1/chat/completion is


def suggest_path(path: str, known: Iterable[str], is_served: Callable[[str], bool]) -> str:
    """Returns a path that is served: without the parts in front that a base URL doubles or a client adds, with the
    version that a base URL lacks, or else the one that is spelled almost the same; empty where there is none.
    `known`: paths as routes have them, `is_served`: whether a route fits."""
    if len(path) > LONGEST:
        return ""
    meant = next((candidate for candidate in _candidates(path) if is_served(candidate)), "")
    if meant:
        return meant
    plain = [route for route in known if "{" not in route]
    return next(iter(difflib.get_close_matches(path, plain, 1, LIKENESS)), "")


def _candidates(path: str) -> Iterator[str]:
    parts = path.strip("/").split("/")
    for start in range(len(parts)):
        rest = "/" + "/".join(parts[start:])
        if start:
            yield rest
        yield VERSION + rest
