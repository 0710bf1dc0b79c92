"""Events that a format finds in a text, in order."""

from __future__ import annotations

from typing import NamedTuple


class Content(NamedTuple):
    """Text for the user."""

    text: str


class Reasoning(NamedTuple):
    """Text of the model's reasoning."""

    text: str


class CallStart(NamedTuple):
    """Beginning of a call of the function `name`."""

    name: str
    id: str = ""  # as the model wrote it; empty in formats without ids


class CallArguments(NamedTuple):
    """More JSON text of the arguments of the last call."""

    text: str


Event = Content | Reasoning | CallStart | CallArguments
