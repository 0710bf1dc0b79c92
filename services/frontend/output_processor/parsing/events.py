"""What a format finds in a text, in order."""

from __future__ import annotations

from typing import NamedTuple


class Content(NamedTuple):
    """Text for the user."""

    text: str


class Reasoning(NamedTuple):
    """Text that the model wrote for itself."""

    text: str


class CallStart(NamedTuple):
    """A call of the function `name` begins."""

    name: str
    id: str = ""  # as the model wrote it; empty in formats without ids


class CallArguments(NamedTuple):
    """More of the arguments of the call that began last: a piece of a JSON text."""

    text: str


Event = Content | Reasoning | CallStart | CallArguments
