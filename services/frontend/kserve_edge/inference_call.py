"""Converts an inference call, over gRPC or HTTP, to a request by way of the body of a completion."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from quire.services.frontend.bounds.bodies import json_body, json_scan
from quire.services.frontend.bounds.prompts import PromptLimit
from quire.services.frontend.http.fields.unknown_fields import STRICT
from quire.services.frontend.http.fields.validation_errors import as_invalid_argument
from quire.services.frontend.kserve_edge import tensors
from quire.services.frontend.openai_edge.body.bodies import CompletionBody
from quire.services.frontend.openai_edge.body.requests import completion_request
from quire.services.frontend.request.call_headers import CallHeaders
from quire.services.frontend.request.media import MediaPart, PartOrigin
from quire.services.frontend.request.request import Request, TextPrompt
from quire.services.frontend.tokenizer.generation_config import GenerationDefaults
from quire.shared.errors import InvalidArgument, NotFound
from quire.shared.settings.request_limits import RequestLimits

MAX_SAMPLING_BYTES = 1 << 18  # parsed on the event loop; this many bytes of token ids take 30 ms
ADAPTER = "lora_name"
URL_SCHEMES = ("data:", "http:", "https:", "file:")
IMAGES = PartOrigin(tensors.IMAGE, "", tensors.IMAGE)
PRIORITY, TIMEOUT = "priority", "timeout"
# Request parameters of Triton's clients about sequences and the form of the answer; without effect here.
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
    """One inference request as received, by gRPC or as JSON."""

    model: str
    version: str
    id: str
    inputs: Mapping[str, Any]  # tensor name -> its single element; a list for image
    parameters: Mapping[str, Any]
    requested_outputs: Iterable[str]  # empty: all


@dataclass(frozen=True, slots=True)
class OpenInferenceCall:
    """A validated inference call, ready to become a request by to_request()."""

    id: str
    model: str  # the adapter's name, if the parameters name one
    text: str
    images: tuple[str, ...]  # URLs, for the placeholders in the text
    parameters: Mapping[str, Any]  # sampling parameters, named as in completions
    stream: bool
    with_prompt: bool  # the output text begins with the prompt
    outputs: frozenset[str]  # output tensors of the answer
    priority: int
    timeout_s: float | None


def check_version(version: str) -> None:
    """Raises NotFound unless the model version is empty, which means any, or the only one."""
    if version not in ("", tensors.VERSION_OF_MODELS):
        text = f"the version {version!r:.64} does not exist; available: {tensors.VERSION_OF_MODELS}"
        raise NotFound(text, field="version")


def parse_inference(call: ReceivedInference, limits: RequestLimits, prompt_limit: PromptLimit) -> OpenInferenceCall:
    """Validates a received inference; its sampling parameters are taken from the SAMPLING tensor, if sent, else from
    the call's parameters. `prompt_limit`: limit on the prompt's length. Raises InvalidArgument, NotFound."""
    inputs = call.inputs
    check_version(call.version)
    if tensors.TEXT_INPUT not in inputs:
        raise InvalidArgument(f"{tensors.TEXT_INPUT} is required", field="inputs")
    text = inputs[tensors.TEXT_INPUT]
    if not isinstance(text, str):
        prompt_limit.check_bytes(len(text))
    stream = bool(inputs.get(tensors.STREAM))
    with_prompt = not inputs.get(tensors.WITHOUT_PROMPT, stream)
    if stream and with_prompt:
        raise InvalidArgument(f"{tensors.WITHOUT_PROMPT} cannot be false in a stream", field=tensors.WITHOUT_PROMPT)
    parameters = {name: value for name, value in call.parameters.items() if name not in IGNORED}
    priority, timeout_us = _number(parameters, PRIORITY), _number(parameters, TIMEOUT)
    if tensors.SAMPLING in inputs:
        parameters = _read(inputs[tensors.SAMPLING], limits)
    return OpenInferenceCall(
        id=call.id,
        model=str(parameters.pop(ADAPTER, None) or call.model),
        text=_text(tensors.TEXT_INPUT, text),
        images=tuple(_url(_text(tensors.IMAGE, one)) for one in inputs.get(tensors.IMAGE, ())),
        parameters=parameters,
        stream=stream,
        with_prompt=with_prompt,
        outputs=_requested_outputs(inputs, call.requested_outputs),
        priority=priority,
        timeout_s=timeout_us / 1e6 if timeout_us else None,
    )


def _requested_outputs(inputs: Mapping[str, Any], listed: Iterable[str]) -> frozenset[str]:
    """Returns the output tensors that inputs enable, limited to the list of requested outputs if there is one. Raises
    InvalidArgument for an unknown one."""
    enabled = {name for name in tensors.OUTPUTS_ON_REQUEST if inputs.get(tensors.RETURN + name)} | {tensors.TEXT_OUTPUT}
    names = set(listed)
    unknown = names - {kind.name for kind in tensors.OUTPUTS}
    if unknown:
        raise InvalidArgument(f"the output {min(unknown)!r} does not exist", field="outputs")
    return frozenset(enabled & names if names else enabled)


def _number(parameters: dict[str, Any], name: str) -> int:
    """Removes a parameter and returns it; 0 if it is missing. Raises InvalidArgument unless it is a non-negative
    integer."""
    value = parameters.pop(name, 0)
    if not isinstance(value, int) or value < 0:
        raise InvalidArgument(f"{name} must be a non-negative integer, got {value!r}", field=name)
    return value


def _text(name: str, value: bytes | memoryview | str) -> str:
    """Returns the value of the tensor `name` as text. Raises InvalidArgument for bytes that are not UTF-8."""
    try:
        return value if isinstance(value, str) else str(value, "utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{name} is not UTF-8: {error.reason} at byte {error.start}", field=name) from None


def _url(image: str) -> str:
    """Returns a picture's URL: as it is, or a data: URL of base64."""
    return image if image.startswith(URL_SCHEMES) else f"data:;base64,{image}"


def _read(value: bytes | memoryview | str, limits: RequestLimits) -> dict[str, Any]:
    """Parses the sampling parameters, a JSON object of at most MAX_SAMPLING_BYTES, checked against the limits before
    parsing. Raises InvalidArgument for a longer text, for anything but a JSON object, and beyond the limits."""
    if len(value) > MAX_SAMPLING_BYTES:
        message = f"{tensors.SAMPLING} has at most {MAX_SAMPLING_BYTES} bytes, got {len(value)}"
        raise InvalidArgument(message, field=tensors.SAMPLING)
    text = _text(tensors.SAMPLING, value).encode(errors="replace")
    for _ in json_scan.check(text, limits):
        pass
    try:
        document = json_body.parse(text)
    except ValueError as error:
        raise InvalidArgument(f"{tensors.SAMPLING} is not JSON: {error}", field=tensors.SAMPLING) from None
    if not isinstance(document, dict):
        message = f"{tensors.SAMPLING} must be an object, got {type(document).__name__}"
        raise InvalidArgument(message, field=tensors.SAMPLING)
    json_body.check(document, text, limits)
    return document


def to_request(call: OpenInferenceCall, headers: CallHeaders, defaults: GenerationDefaults) -> Request:
    """Returns the request of a call, whose parameters are validated like the body of a completion. Raises
    InvalidArgument."""
    for name in ("prompt", "echo", "model", "stream", "stream_options"):
        if name in call.parameters:
            raise InvalidArgument(f"{name} is not a sampling parameter", field=name)
    body = {**call.parameters, "prompt": call.text, "model": call.model, "stream": call.stream}
    if tensors.CUMULATIVE_LOGPROB in call.outputs:
        body.setdefault("logprobs", 0)
    try:
        completion = CompletionBody.model_validate(body)
    except ValidationError as error:
        raise as_invalid_argument(RequestValidationError(_body_locations(error), body=body)) from None
    completion.refuse_unknown(STRICT)
    request = completion_request(completion, _with_timeout(headers, call.timeout_s), defaults)
    media = [MediaPart(url, origin=IMAGES) for url in call.images]
    prompts = [replace(prompt, media=media) if isinstance(prompt, TextPrompt) else prompt for prompt in request.prompts]
    return replace(
        request,
        request_id=call.id or request.request_id,
        priority=call.priority or request.priority,
        prompts=prompts if media else request.prompts,
    )


def _body_locations(error: ValidationError) -> list[dict[str, Any]]:
    """Returns the errors with locations as FastAPI reports them for a body."""
    return [{**found, "loc": ("body", *found["loc"])} for found in error.errors()]


def _with_timeout(headers: CallHeaders, timeout_s: float | None) -> CallHeaders:
    """Returns the headers with the shorter of the two timeouts, in seconds."""
    timeouts = [seconds for seconds in (headers.timeout_s, timeout_s) if seconds is not None]
    return replace(headers, timeout_s=min(timeouts, default=None))
