"""Conversion of messages to the frontend's requests."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np

from quire.services.frontend.grpc_edge.requests import Arrival
from quire.services.frontend.input_processor.sampling import sampling_rules
from quire.services.frontend.request.request import Pooling, Prompt, Request, Sampling, TextPrompt, TokenPrompt
from quire.services.frontend.request.scalar_parameters import NAMES
from quire.services.frontend.tokenizer.generation_config import GenerationDefaults
from quire.shared.errors import InvalidArgument, Unimplemented
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.dialects import vllm_engine_pb2 as pb

NOT_OFFERED = (
    "kv_transfer_params",
    "kv_transfer_params_json",
    "mm_inputs",
    "extra_mm_inputs",
    "media_refs",
    "data_parallel_rank",
)
# Fields without presence: 0 is either not a valid value, or the default.
UNSET_AT_ZERO = (*(NAMES.intersection(pb.SamplingParams.DESCRIPTOR.fields_by_name)), "min_tokens", "n")
OPTIONAL = ("temperature", "max_tokens", "logprobs", "prompt_logprobs", "seed")
SHARED_FIELDS = ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output")


def generate_request(message: pb.GenerateRequest, arrival: Arrival, defaults: GenerationDefaults) -> Request:
    """Converts a message to a request with one prompt for the default model; raises Unimplemented for set fields
    that are not supported."""
    given = {descriptor.name for descriptor, _ in message.ListFields()}
    for name in NOT_OFFERED:
        if name in given:
            raise Unimplemented(f"{name} is not supported by this server; leave it out", field=name)
    params = message.sampling_params
    cut = params.truncate_prompt_tokens if params.HasField("truncate_prompt_tokens") else None
    return Request(
        request_id=message.request_id or uuid.uuid4().hex,
        model="",
        prompts=(_prompt(message),),
        sampling=_sampling(params, defaults),
        arrival_s=arrival.arrival_s,
        deadline_s=arrival.deadline_s,
        tenant=arrival.tenant,
        truncate_prompt_tokens=cut,
        final_only=not message.stream,
    )


def embed_request(message: pb.EmbedRequest, arrival: Arrival) -> Request:
    """Converts a message to a pooling request for its token ids, with the model's default pooling."""
    return Request(
        request_id=message.request_id or uuid.uuid4().hex,
        model="",
        prompts=(TokenPrompt(message.tokenized.input_ids),),
        sampling=Sampling(detokenize=False),
        arrival_s=arrival.arrival_s,
        deadline_s=arrival.deadline_s,
        tenant=arrival.tenant,
        pooling=Pooling(),
        final_only=True,
    )


def _prompt(message: pb.GenerateRequest) -> Prompt:
    """Returns the prompt, a text or token ids; raises InvalidArgument if the input is not set."""
    match message.WhichOneof("input"):
        case "text":
            return TextPrompt(message.text)
        case "tokenized":
            return TokenPrompt(message.tokenized.input_ids)
        case _:
            raise InvalidArgument("input must be set", field="input")


def _sampling(params: pb.SamplingParams, defaults: GenerationDefaults) -> Sampling:
    """Converts the sampling parameters; fields that proto3 cannot leave unset count as unset at 0. Text is decoded
    only for stop strings and constraints, since the caller reads token ids."""
    given: dict[str, Any] = {name: getattr(params, name) for name in SHARED_FIELDS}
    given |= {name: _plain(getattr(params, name)) or None for name in UNSET_AT_ZERO}
    given |= {name: _plain(getattr(params, name)) for name in OPTIONAL if params.HasField(name)}
    given["stop"] = tuple(params.stop)
    given["stop_token_ids"] = tuple(params.stop_token_ids)
    given["logit_bias"] = {token_id: _plain(bias) for token_id, bias in params.logit_bias.items()} or None
    given["structured_output"] = form = _form(params)
    given["detokenize"] = bool(params.stop) or form is not None  # the text is not read
    return sampling_rules.build(given, defaults)


def _plain(value: float) -> float:
    """Returns a float with the sender's decimal digits instead of those of the 32-bit value."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _form(params: pb.SamplingParams) -> sampling_pb2.StructuredOutput | None:
    """Converts the constraint, None if there is none; field names are those of our message, except for choices."""
    kind = params.WhichOneof("constraint")
    if kind is None:
        return None
    form = sampling_pb2.StructuredOutput()
    if kind == "choice":
        form.choice.options.extend(params.choice.choices)
    else:
        setattr(form, kind, getattr(params, kind))
    return form
