"""Parts of the formats of completions and chat completions."""

from __future__ import annotations

import time
from typing import Any, Protocol

from quire.services.frontend.calls.measurements import Usage
from quire.services.frontend.generation.generation import Generation
from quire.services.frontend.output_processor.delta import SampleDelta
from quire.services.frontend.request.outcome import Finish
from quire.shared.pb.common.v1 import finish_pb2
from quire.shared.pb.common.v1.finish_pb2 import FinishReason
from quire.shared.version import VERSION

SYSTEM_FINGERPRINT = f"quire-{VERSION}"

FINISH_REASONS: dict[FinishReason, str] = {
    finish_pb2.FINISH_REASON_STOP: "stop",
    finish_pb2.FINISH_REASON_LENGTH: "length",
    finish_pb2.FINISH_REASON_CANCELLED: "abort",
    finish_pb2.FINISH_REASON_REPETITION: "repetition",
}


class BodyFormat(Protocol):
    """Body format of one call's answer."""

    def chunks(self, delta: SampleDelta, generation: Generation) -> list[dict[str, Any]]:
        """Returns the stream's chunks for this delta."""

    def last_chunk(self, generation: Generation) -> dict[str, Any] | None:
        """Returns the stream's last chunk, which has no choice; None if it would be empty."""

    def whole(self, deltas: list[SampleDelta], generation: Generation) -> dict[str, Any]:
        """Returns the complete answer from one delta per sample, in order."""


class AnswerFrame:
    """Fields around the choices of an answer."""

    def __init__(self, answer_id: str, kind: str, model: str, created_unix_s: int | None = None) -> None:
        self._fields = {
            "id": answer_id,
            "object": kind,
            "created": int(time.time()) if created_unix_s is None else created_unix_s,
            "model": model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }

    def __call__(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._fields, "choices": choices, **more}


def usage_object(usage: Usage) -> dict[str, Any]:
    """Returns OpenAI's `usage` in tokens; reasoning tokens appear only if there are any, cached ones always."""
    details = {"completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens}}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        **(details if usage.reasoning_tokens else {}),
    }


def ending(finish: Finish | None) -> dict[str, Any]:
    """Returns OpenAI's finish_reason, vLLM's stop_reason, and the version of the weights that computed the last
    token."""
    if finish is None:
        return {"finish_reason": None, "stop_reason": None}
    matched = finish.stop_token_id if finish.stop_string is None else finish.stop_string
    if finish.reason == finish_pb2.FINISH_REASON_REPETITION:
        matched = "repetition_detected"
    fields = {"finish_reason": FINISH_REASONS[finish.reason], "stop_reason": matched}
    return fields | ({"weight_version": finish.weight_version} if finish.weight_version else {})
