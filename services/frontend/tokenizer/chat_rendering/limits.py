"""Limits of memory and processor time for a chat template, in the process that runs it."""

from __future__ import annotations

from quire.shared.errors import InvalidArgument

MEMORY_BYTES = 512 << 20  # beyond what the process uses when it starts
TEXT_CHARACTERS = 1 << 26  # maximum size of a rendered conversation


def cpu_time_error(label: str, seconds: float) -> InvalidArgument:
    """Returns the error for a template that exceeds its processor time in seconds, with the remedies."""
    return InvalidArgument(
        f"messages: the chat template {label} takes more than {seconds:g} s; send a shorter conversation, or start the"
        " server with another --chat-template",
        field="messages",
    )


def memory_error(label: str) -> InvalidArgument:
    """Returns the error for a template that exceeds its memory, with the remedies."""
    return InvalidArgument(
        f"messages: the chat template {label} needs more than {MEMORY_BYTES >> 20} MiB; send a shorter conversation, or"
        " start the server with another --chat-template",
        field="messages",
    )
