"""The child process of conversations.py: runs the chat template under bounds of time and memory. Introduced and asked
with what pickle makes of our own objects; answers with the lengths of sections, as JSON, and their text behind it, or
with what is wrong."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from quire.services.frontend.request.request import ChatPrompt
from quire.services.frontend.tokenizer.chat_rendering import limits
from quire.services.frontend.tokenizer.chat_rendering.prompt_renderer import PromptRenderer, RendererConfig
from quire.services.frontend.tokenizer.control_tokens import TextSection
from quire.services.frontend.tokenizer.message_shapes.shape import MessageShape
from quire.shared.errors import Internal, InvalidArgument
from quire.shared.process.child import serve_requests
from quire.shared.process.resource_limits import CpuTimeExceeded, cpu_time_limit, limit_memory

END = b"\n"  # of the JSON
SHAPES = b""  # the question for the shapes of messages
PROBING_S = 5.0  # processor time for all templates of a model; real ones take 0.04 s


class RenderBudgetExceeded(Exception):
    """The time given with the question is used up."""


def question(prompt: ChatPrompt, seconds: float) -> bytes:
    """`seconds`: of processor time."""
    return pickle.dumps((prompt, seconds))


def begin(renderer_config: bytes) -> Callable[[bytes], bytes]:
    rendering = PromptRenderer(RendererConfig.decode(renderer_config))
    limit_memory(limits.MEMORY_BYTES)

    def answer(message: bytes) -> bytes:
        try:
            return _answer(rendering, message)
        except InvalidArgument as error:
            return _told(message=error.message, field=error.field, reason=error.reason)
        except CpuTimeExceeded:
            return _told(late="")
        except MemoryError:
            refusal = limits.memory_error(rendering.template.label)
            return _told(message=refusal.message, field=refusal.field, reason=refusal.reason)
        except Exception as error:  # the next conversation is to be answered
            return _told(failed=f"{type(error).__name__}: {error}")

    return answer


def _answer(rendering: PromptRenderer, message: bytes) -> bytes:
    if message == SHAPES or not rendering.has_shapes:
        with cpu_time_limit(PROBING_S):
            shapes = rendering.shapes()
    if message == SHAPES:
        return json.dumps({name: asdict(shape) for name, shape in shapes.items()}).encode() + END
    prompt, seconds = pickle.loads(message)
    assert isinstance(prompt, ChatPrompt)
    with cpu_time_limit(seconds):
        sections = rendering.sections(prompt)
    if sum(len(section.text) for section in sections) > limits.TEXT_CHARACTERS:
        raise MemoryError
    return encode(sections)


def _told(**wrong: str) -> bytes:
    return json.dumps(wrong).encode() + END


def encode(sections: Sequence[TextSection]) -> bytes:
    texts = [section.text.encode() for section in sections]
    lengths = [(len(text), section.plain) for text, section in zip(texts, sections, strict=True)]
    return b"".join([json.dumps(lengths).encode(), END, *texts])


def decode(answer: bytes) -> list[TextSection]:
    """Raises InvalidArgument, Internal, RenderBudgetExceeded."""
    head, _, texts = answer.partition(END)
    found = _without_fault(json.loads(head))
    sections, start = [], 0
    for length, plain in found:
        sections.append(TextSection(texts[start : start + length].decode(), plain))
        start += length
    return sections


def decode_shapes(answer: bytes) -> Mapping[str, MessageShape]:
    """Raises InvalidArgument, Internal, RenderBudgetExceeded."""
    found = _without_fault(json.loads(answer))
    return {name: MessageShape(**values) for name, values in found.items()}


def _without_fault(found: Any) -> Any:
    if isinstance(found, dict):
        if "failed" in found:
            raise Internal(f"the chat template: {found['failed']}")
        if "late" in found:
            raise RenderBudgetExceeded
        if "message" in found:
            raise InvalidArgument(found["message"], field=found["field"], reason=found["reason"])
    return found


if __name__ == "__main__":
    serve_requests(begin)
