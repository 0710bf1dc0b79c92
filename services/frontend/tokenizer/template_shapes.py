"""The shapes of messages that the templates of a folder read, without a tokenizer."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from quire.services.frontend.tokenizer import template_files
from quire.services.frontend.tokenizer.conversations.conversations import Conversations
from quire.services.frontend.tokenizer.conversations.rendering import Introduction
from quire.services.frontend.tokenizer.message_shapes.shape import MessageShape


def of_folder(folder: Path, override: str = "") -> Mapping[str, MessageShape]:
    """Returns them by the name of the template; raises InvalidArgument where a template cannot be used."""
    template = template_files.load(folder, override)
    introduction = Introduction.of(template)
    with contextlib.closing(Conversations(introduction)) as conversations:
        return conversations.shapes()
