"""Checks of a request's logits processors: all workers must have them; they check their arguments themselves."""

from __future__ import annotations

from quire.services.frontend.request.request import Sampling
from quire.shared import strict_json
from quire.shared.errors import InvalidArgument

FIELD = "logits_processors"
MAX_CHARACTERS = 65536  # of names and arguments together


def check(sampling: Sampling) -> None:
    """Raises InvalidArgument if names and arguments exceed MAX_CHARACTERS together, or any arguments are not a JSON
    object."""
    arguments_by_name = sampling.logits_processors
    count = sum(len(name) + len(arguments) for name, arguments in arguments_by_name.items())
    if count > MAX_CHARACTERS:
        text = f"{FIELD}: names and arguments have {count} characters; at most {MAX_CHARACTERS} are accepted."
        raise InvalidArgument(text, field=FIELD)
    for name, arguments in arguments_by_name.items():
        try:
            is_object = isinstance(strict_json.read(arguments or "{}"), dict)
        except ValueError as error:
            raise InvalidArgument(f"{FIELD}: arguments of {name!r} are not JSON: {error}", field=FIELD) from None
        if not is_object:
            raise InvalidArgument(f"{FIELD}: arguments of {name!r} must be a JSON object.", field=FIELD)


def check_known(sampling: Sampling, known: frozenset[str]) -> None:
    """Raises InvalidArgument, with the names that exist, for a logits processor that not all workers have."""
    unknown = sorted(sampling.logits_processors.keys() - known)
    if unknown:
        names = ", ".join(sorted(known)) or "none"
        raise InvalidArgument(f"{FIELD}: {unknown[0]!r} does not exist; available: {names}.", field=FIELD)
