"""Child process of chat_renderer.py, which runs the chat template under limits of time and memory.

Configuration and questions are our own objects, pickled. Answers are the lengths of the sections, as JSON, followed by
their text, or an error.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from quire.services.frontend.request.request import ChatPrompt
from quire.services.frontend.tokenizer.chat_rendering import limits
from quire.services.frontend.tokenizer.chat_rendering.prompt_renderer import (
    PromptRenderer,
    RenderedChat,
    RendererConfig,
)
from quire.services.frontend.tokenizer.control_tokens import TextSection
from quire.services.frontend.tokenizer.message_shapes.shape import MessageShape
from quire.shared.errors import Internal, InvalidArgument
from quire.shared.process.child import serve_requests
from quire.shared.process.resource_limits import CpuTimeExceeded, cpu_time_limit, limit_memory

END = b"\n"  # ends the JSON
SHAPES = b""  # the question for the message shapes


class RenderBudgetExceeded(Exception):
    """Signal that the time given with the question is used up."""


def question(prompt: ChatPrompt, seconds: float) -> bytes:
    """Encodes a conversation and its limit of processor time in seconds for the child process, by pickle."""
    return pickle.dumps((replace(prompt, media=()), seconds))


def begin(renderer_config: bytes) -> Callable[[bytes], bytes]:
    """Loads the template, limits the process's memory, and returns the function that answers requests; it never
    raises."""
    renderer = PromptRenderer(RendererConfig.decode(renderer_config))
    limit_memory(limits.MEMORY_BYTES)

    def answer(message: bytes) -> bytes:
        """Answers one request with sections or shapes, or with an encoded fault: refusal, exceeded time or memory,
        or failure."""
        try:
            return _answer(renderer, message)
        except InvalidArgument as error:
            return _encode_fault(message=error.message, field=error.field, reason=error.reason)
        except CpuTimeExceeded:
            return _encode_fault(late="")
        except MemoryError:
            refusal = limits.memory_error(renderer.template.label)
            return _encode_fault(message=refusal.message, field=refusal.field, reason=refusal.reason)
        except Exception as error:  # the process must remain able to answer the next conversation
            return _encode_fault(failed=f"{type(error).__name__}: {error}")

    return answer


def _answer(renderer: PromptRenderer, message: bytes) -> bytes:
    """Renders one conversation to encoded sections, or returns the templates' shapes as JSON. Raises MemoryError if
    the text is too long; the first request probes the template within the configuration's time for it."""
    if message == SHAPES or not renderer.has_shapes:
        with cpu_time_limit(renderer.renderer_config.probing_s):
            shapes = renderer.shapes()
    if message == SHAPES:
        return json.dumps({name: asdict(shape) for name, shape in shapes.items()}).encode() + END
    prompt, seconds = pickle.loads(message)
    assert isinstance(prompt, ChatPrompt)
    with cpu_time_limit(seconds):
        rendered = renderer.render(prompt)
    if sum(len(section.text) for section in rendered.sections) > limits.TEXT_CHARACTERS:
        raise MemoryError
    return encode(rendered)


def _encode_fault(**fault: str) -> bytes:
    return json.dumps(fault).encode() + END


def encode(rendered: RenderedChat) -> bytes:
    texts = [section.text.encode() for section in rendered.sections]
    lengths = [(len(text), section.plain) for text, section in zip(texts, rendered.sections, strict=True)]
    return b"".join([json.dumps([lengths, rendered.media]).encode(), END, *texts])


def decode(answer: bytes) -> RenderedChat:
    """Decodes an answer of the child process; raises InvalidArgument, Internal or RenderBudgetExceeded if it is a
    fault."""
    head, _, texts = answer.partition(END)
    lengths, media = _raise_fault(json.loads(head))
    sections, start = [], 0
    for length, plain in lengths:
        sections.append(TextSection(texts[start : start + length].decode(), plain))
        start += length
    return RenderedChat(sections, media)


def decode_shapes(answer: bytes) -> Mapping[str, MessageShape]:
    """Decodes the message shapes; raises InvalidArgument, Internal or RenderBudgetExceeded."""
    shapes = _raise_fault(json.loads(answer))
    return {name: MessageShape(**values) for name, values in shapes.items()}


def _raise_fault(result: Any) -> Any:
    """Returns a decoded answer unless it is a fault, which it raises: Internal, RenderBudgetExceeded or
    InvalidArgument."""
    if isinstance(result, dict):
        if "failed" in result:
            raise Internal(f"the chat template: {result['failed']}")
        if "late" in result:
            raise RenderBudgetExceeded
        if "message" in result:
            raise InvalidArgument(result["message"], field=result["field"], reason=result["reason"])
    return result


if __name__ == "__main__":
    serve_requests(begin)
