"""Message shapes that the templates of a folder read, without a tokenizer."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from quire.services.frontend.tokenizer import template_files
from quire.services.frontend.tokenizer.chat_rendering.chat_renderer import ChatRenderer
from quire.services.frontend.tokenizer.chat_rendering.prompt_renderer import RendererConfig
from quire.services.frontend.tokenizer.message_shapes.shape import MessageShape


def shapes_of_folder(folder: Path, override: str = "") -> Mapping[str, MessageShape]:
    """Returns the shapes by the template's name; raises InvalidArgument where a template is unusable."""
    template = template_files.load(folder, override)
    renderer_config = RendererConfig.of(template)
    with contextlib.closing(ChatRenderer(renderer_config)) as conversations:
        return conversations.shapes()
