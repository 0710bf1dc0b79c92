"""Prompts of models that read one picture or one text at a time."""

from __future__ import annotations

from quire.services.frontend.request.media import MediaPart
from quire.services.frontend.request.request import ChatPrompt, Prompt, TextPrompt, media_of
from quire.shared.errors import InvalidArgument


def only_picture(prompt: Prompt) -> MediaPart:
    """Returns the one picture of a prompt. Raises InvalidArgument for several, and for text beside it."""
    parts = media_of(prompt)
    if len(parts) != 1 or text_of(prompt).strip():
        has = f"{len(parts)} pictures" if len(parts) != 1 else "a picture and a text"
        raise InvalidArgument(
            f"{parts[0].origin.field}: the input has {has}, and this model reads one picture or one text at a time; "
            "send each as an input of its own",
            field=parts[0].origin.field,
        )
    return parts[0]


def text_of(prompt: Prompt) -> str:
    """Returns the text of a prompt; that of a conversation, with a line feed between texts and without roles."""
    if isinstance(prompt, TextPrompt):
        return prompt.text
    if not isinstance(prompt, ChatPrompt):
        return ""
    texts: list[str] = []
    for message in prompt.messages:
        content = message.get("content") or ""
        parts = [{"text": content}] if isinstance(content, str) else content
        texts.extend(str(part["text"]) for part in parts if part.get("text"))
    return "\n".join(texts)
