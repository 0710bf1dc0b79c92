"""What a call asks, whichever way its tensors came: to the frontend's own request, by the body of a completion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from quire.services.frontend.bounds.bodies import json_body, json_scan
from quire.services.frontend.bounds.prompt_limit import PromptLimit
from quire.services.frontend.http.fields.unknown_fields import STRICT
from quire.services.frontend.http.fields.validation_errors import as_invalid_argument
from quire.services.frontend.http.headers import CallHeaders
from quire.services.frontend.kserve_edge import tensors
from quire.services.frontend.openai_edge.body.bodies import CompletionBody
from quire.services.frontend.openai_edge.body.requests import completion_request
from quire.services.frontend.request.request import Request
from quire.services.frontend.tokenizer.generation_config import GenerationDefaults
from quire.shared.errors import InvalidArgument, NotFound
from quire.shared.settings.request_limits import RequestLimits

MAX_SAMPLING_BYTES = 1 << 18  # read by the event loop itself: 30 ms of token ids
ADAPTER = "lora_name"
PRIORITY, TIMEOUT = "priority", "timeout"
# Of a request's parameters: what Triton's clients say about sequences and about how to be answered.
IGNORED = frozenset({
    "sequence_id",
    "sequence_start",
    "sequence_end",
    "binary_data_output",
    "triton_enable_empty_final_response",
    "headers",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReceivedInference:
    """One request as it came, by gRPC or as JSON."""

    model: str
    version: str
    id: str
    inputs: Mapping[str, Any]  # the only element of each
    parameters: Mapping[str, Any]
    wanted: Iterable[str]  # outputs; none: all


@dataclass(frozen=True, slots=True)
class OpenInferenceCall:
    """What that means."""

    id: str
    model: str  # the adapter's name, where the parameters have one
    text: str
    parameters: Mapping[str, Any]  # of sampling, as completions name them
    stream: bool
    with_prompt: bool  # the text that comes back begins with the prompt
    outputs: frozenset[str]  # tensors of the answer
    priority: int
    timeout_s: float | None


def check_version(version: str) -> None:
    """Empty is any. Raises NotFound."""
    if version not in ("", tensors.VERSION_OF_MODELS):
        told = f"there is no version {version!r:.64} of models, only {tensors.VERSION_OF_MODELS}"
        raise NotFound(told, field="version")


def parse_inference(call: ReceivedInference, limits: RequestLimits, prompt_limit: PromptLimit) -> OpenInferenceCall:
    """`prompt_limit`: for the prompt. Raises InvalidArgument, NotFound."""
    inputs = call.inputs
    check_version(call.version)
    if tensors.TEXT_INPUT not in inputs:
        raise InvalidArgument(f"{tensors.TEXT_INPUT} is missing", field="inputs")
    text = inputs[tensors.TEXT_INPUT]
    if not isinstance(text, str):
        prompt_limit.check_bytes(len(text))
    stream = bool(inputs.get(tensors.STREAM))
    with_prompt = not inputs.get(tensors.WITHOUT_PROMPT, stream)
    if stream and with_prompt:
        raise InvalidArgument(f"{tensors.WITHOUT_PROMPT} cannot be false in a stream", field=tensors.WITHOUT_PROMPT)
    own = {name: value for name, value in call.parameters.items() if name not in IGNORED}
    priority, timeout_us = _number(own, PRIORITY), _number(own, TIMEOUT)
    if tensors.SAMPLING in inputs:
        own = _read(inputs[tensors.SAMPLING], limits)
    return OpenInferenceCall(
        id=call.id,
        model=str(own.pop(ADAPTER, None) or call.model),
        text=_text(tensors.TEXT_INPUT, text),
        parameters=own,
        stream=stream,
        with_prompt=with_prompt,
        outputs=_requested_outputs(inputs, call.wanted),
        priority=priority,
        timeout_s=timeout_us / 1e6 if timeout_us else None,
    )


def _requested_outputs(inputs: Mapping[str, Any], wanted: Iterable[str]) -> frozenset[str]:
    """Those that were asked for by an input, without the ones that a list of wanted outputs leaves out."""
    told = {name for name in tensors.OUTPUTS_ON_REQUEST if inputs.get(tensors.RETURN + name)} | {tensors.TEXT_OUTPUT}
    names = set(wanted)
    unknown = names - {kind.name for kind in tensors.OUTPUTS}
    if unknown:
        raise InvalidArgument(f"there is no output {min(unknown)!r}", field="outputs")
    return frozenset(told & names if names else told)


def _number(parameters: dict[str, Any], name: str) -> int:
    value = parameters.pop(name, 0)
    if not isinstance(value, int) or value < 0:
        raise InvalidArgument(f"{name} is a whole number that is not negative, got {value!r}", field=name)
    return value


def _text(name: str, value: bytes | memoryview | str) -> str:
    try:
        return value if isinstance(value, str) else str(value, "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{name} is not UTF-8: {error.reason} at byte {error.start}", field=name) from None


def _read(value: bytes | memoryview | str, limits: RequestLimits) -> dict[str, Any]:
    """An object in JSON, measured before it is parsed."""
    if len(value) > MAX_SAMPLING_BYTES:
        told = f"{tensors.SAMPLING} has at most {MAX_SAMPLING_BYTES} bytes, got {len(value)}"
        raise InvalidArgument(told, field=tensors.SAMPLING)
    text = _text(tensors.SAMPLING, value).encode(errors="replace")
    for _ in json_scan.check(text, limits):
        pass
    try:
        document = json_body.parse(text)
    except ValueError as error:
        raise InvalidArgument(f"{tensors.SAMPLING} is not JSON: {error}", field=tensors.SAMPLING) from None
    if not isinstance(document, dict):
        raise InvalidArgument(f"{tensors.SAMPLING} is an object", field=tensors.SAMPLING)
    json_body.check(document, text, limits)
    return document


def to_request(call: OpenInferenceCall, headers: CallHeaders, defaults: GenerationDefaults) -> Request:
    """Raises InvalidArgument."""
    for name in ("prompt", "echo", "model", "stream", "stream_options"):
        if name in call.parameters:
            raise InvalidArgument(f"{name} is no sampling parameter", field=name)
    body = {**call.parameters, "prompt": call.text, "model": call.model, "stream": call.stream}
    if tensors.CUMULATIVE_LOGPROB in call.outputs:
        body.setdefault("logprobs", 0)
    try:
        read = CompletionBody.model_validate(body)
    except ValidationError as error:
        raise as_invalid_argument(RequestValidationError(_in_body(error), body=body)) from None
    read.refuse_unknown(STRICT)
    request = completion_request(read, _until(headers, call.timeout_s), defaults)
    return replace(request, request_id=call.id or request.request_id, priority=call.priority or request.priority)


def _in_body(error: ValidationError) -> list[dict[str, Any]]:
    """As FastAPI places what it finds."""
    return [{**found, "loc": ("body", *found["loc"])} for found in error.errors()]


def _until(headers: CallHeaders, timeout_s: float | None) -> CallHeaders:
    given = [seconds for seconds in (headers.timeout_s, timeout_s) if seconds is not None]
    return replace(headers, timeout_s=min(given, default=None))
