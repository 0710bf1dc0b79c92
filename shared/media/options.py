"""Typed access to a request's mm_processor_kwargs, with errors that name the option."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

FIELD = "mm_processor_kwargs"


def check_names(options: Mapping[str, Any], *known: str) -> None:
    """Raises InvalidArgument for the first option that is not in `known`."""
    for name in options:
        if name not in known:
            raise _refusal(name, f"this model's processor has no such option; it has {', '.join(known)}")


def read_flag(options: Mapping[str, Any], name: str, default: bool) -> bool:
    """Returns an option that is true or false; `default` if it is missing or null. Raises InvalidArgument for other
    types."""
    value = options.get(name)
    if value is not None and not isinstance(value, bool):
        raise _refusal(name, f"is {value!r}; true or false is needed")
    return default if value is None else value


def read_count(options: Mapping[str, Any], name: str, default: int, most: int) -> int:
    """Returns an option that is a whole number from 1 to `most`; `default` if it is missing or null. Raises
    InvalidArgument for other values."""
    return default if options.get(name) is None else _count(name, options[name], most)


def read_longest_edge(options: Mapping[str, Any], name: str, default: int, most: int) -> int:
    """Returns the longest_edge of an option that is an object, from 1 to `most` pixels; `default` if the option is
    missing or null. Raises InvalidArgument for other values."""
    value = options.get(name)
    if value is None:
        return default
    if not isinstance(value, dict) or set(value) != {"longest_edge"}:
        raise _refusal(name, f'is {value!r}; an object {{"longest_edge": pixels}} is needed')
    return _count(f"{name}.longest_edge", value["longest_edge"], most)


def _count(name: str, value: Any, most: int) -> int:
    """Returns `value` if it is a whole number from 1 to `most`. Raises InvalidArgument for others."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise _refusal(name, f"is {value!r}; a whole number from 1 to {most}, the model's own, is needed")
    return value


def _refusal(name: str, reason: str) -> InvalidArgument:
    return InvalidArgument(f"{FIELD}.{name}: {reason}", field=FIELD)
