"""The child process of conversations.py: runs the chat template. Introduced and asked with what pickle makes of our own
objects; answers with the lengths of sections, as JSON, and their text behind it, or with what is wrong."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Sequence

from services.frontend.request.request import ChatPrompt
from services.frontend.tokenizer.control_tokens import TextSection
from services.frontend.tokenizer.conversations.rendering import Introduction, Rendering
from shared.errors import Internal, InvalidArgument
from shared.process.child import answer_all

END = b"\n"  # of the JSON


def question(prompt: ChatPrompt) -> bytes:
    return pickle.dumps(prompt)


def begin(introduction: bytes) -> Callable[[bytes], bytes]:
    rendering = Rendering(Introduction.decode(introduction))

    def answer(message: bytes) -> bytes:
        prompt = pickle.loads(message)
        assert isinstance(prompt, ChatPrompt)
        try:
            return encode(rendering.sections(prompt))
        except InvalidArgument as error:
            return _told(message=error.message, field=error.field, reason=error.reason)
        except Exception as error:  # the next conversation is to be answered
            return _told(failed=f"{type(error).__name__}: {error}")

    return answer


def _told(**wrong: str) -> bytes:
    return json.dumps(wrong).encode() + END


def encode(sections: Sequence[TextSection]) -> bytes:
    texts = [section.text.encode() for section in sections]
    lengths = [(len(text), section.plain) for text, section in zip(texts, sections, strict=True)]
    return b"".join([json.dumps(lengths).encode(), END, *texts])


def decode(answer: bytes) -> list[TextSection]:
    """Raises InvalidArgument, Internal."""
    head, _, texts = answer.partition(END)
    found = json.loads(head)
    if isinstance(found, dict):
        if "failed" in found:
            raise Internal(f"the chat template: {found['failed']}")
        raise InvalidArgument(found["message"], field=found["field"], reason=found["reason"])
    sections, start = [], 0
    for length, plain in found:
        sections.append(TextSection(texts[start : start + length].decode(), plain))
        start += length
    return sections


if __name__ == "__main__":
    answer_all(begin)
