"""Suggests the path that a client probably meant, or a replacement, for errors about unknown paths."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator

VERSION = "/v1"
LONGEST = 200  # characters; longer paths get no suggestion
LIKENESS = 0.85  # minimum similarity; /v1/chat/completion qualifies
STARTED_MODEL = "a cluster serves the model that it was started with (quire up MODEL)"
TEXT_ONLY = "models answer with text only"
# Paths of other servers that this one does not have -> remedy; those below them have the same.
REMEDIES = {
    "/api/copy": STARTED_MODEL,
    "/api/create": STARTED_MODEL,
    "/api/delete": STARTED_MODEL,
    "/api/pull": STARTED_MODEL,
    "/api/push": STARTED_MODEL,
    "/generate_stream": "TGI's API is not offered; use /v1/completions or /v1/chat/completions with stream: true",
    "/info": "TGI's API is not offered; use /v1/models and /version",
    "/v1/assistants": "use /v1/responses",
    "/v1/audio/speech": TEXT_ONLY,
    "/v1/conversations": "send previous_response_id, or the whole conversation as input, to /v1/responses",
    "/v1/fine_tuning": "a cluster does not train; it loads adapters (--lora NAME=FOLDER)",
    "/v1/images": TEXT_ONLY,
    "/v1/messages/batches": "use /v1/batches with /v1/chat/completions",
    "/v1/moderations": "serve a guard model and use /v1/chat/completions or /classify",
    "/v1/realtime": "use /v1/chat/completions with stream: true",
    "/v1/threads": "use /v1/responses",
    "/v1/vector_stores": "use /v1/embeddings with a vector database",
}


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


def remedy(path: str) -> str:
    """Returns what a client of another server's path can do instead; empty for other paths."""
    plain = path.rstrip("/")
    return next((text for other, text in REMEDIES.items() if f"{plain}/".startswith(f"{other}/")), "")


def _candidates(path: str) -> Iterator[str]:
    """Yields variants of a path: without each number of leading parts, and with the version in front."""
    parts = path.strip("/").split("/")
    for start in range(len(parts)):
        rest = "/" + "/".join(parts[start:])
        if start:
            yield rest
        yield VERSION + rest
