"""Conversion of bodies to the frontend's request."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.services.frontend.http.fields import scalar_fields
from quire.services.frontend.input_processor.sampling import sampling_rules
from quire.services.frontend.openai_edge.body import thinking, tools
from quire.services.frontend.openai_edge.body.bodies import (
    ChatBatchBody,
    ChatBody,
    ChatOptions,
    CompletionBody,
    GenerationBody,
    StreamOptions,
)
from quire.services.frontend.openai_edge.body.legacy_names import GUIDED, guided_constraint
from quire.services.frontend.openai_edge.body.logit_bias import logit_bias
from quire.services.frontend.openai_edge.body.logits_processors import logits_processors
from quire.services.frontend.openai_edge.body.prompts import chat_prompt, completion_prompts
from quire.services.frontend.openai_edge.body.structured_outputs import constraint
from quire.services.frontend.openai_edge.body.token_limit import token_limit
from quire.services.frontend.request.call_headers import CallHeaders
from quire.services.frontend.request.media_options import media_options
from quire.services.frontend.request.request import BeamSearch, Prompt, RepetitionDetection, Request
from quire.services.frontend.tokenizer.generation_config import GenerationDefaults
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.errors import InvalidArgument, Unimplemented

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for completions

SAMPLING_FIELDS = (
    "n",
    "temperature",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "allowed_token_ids",
    "bad_words",
    "logprob_token_ids",
    "prompt_logprobs",
    "prompt_logprob_start",
    "prompt_logprob_token_ids",
    "thinking_token_budget",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "skip_reading_prefix_cache",
)


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """Options of an answer that do not influence the generation."""

    stream: bool
    include_usage: bool
    continuous_usage: bool
    token_ids: bool  # include token ids
    tokens_as_ids: bool  # write tokens in logprobs as token_id:N
    prompt_text: bool  # include the prompt as the model got it
    prompt_logprobs: bool  # include the log-probabilities of the prompt
    echoed_logprobs: bool  # put them before those of the output
    metrics: bool = False  # include the times of this request
    no_output: bool = False  # return only the prompt
    created_unix_s: int | None = None  # when a resumed stream began; None: now
    prefix: Sequence[str] = ()  # by prompt: text to repeat before the answer (echo)


def completion_request(body: CompletionBody, headers: CallHeaders, defaults: GenerationDefaults) -> Request:
    """Converts a body of /v1/completions. A body without max_tokens gets OpenAI's default of 16; an explicit null
    generates up to the context length. Raises InvalidArgument for a best_of other than n."""
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InvalidArgument(f"best_of must be n={body.n or 1} or left out, got {body.best_of}.", field="best_of")
    prompts = completion_prompts(body.prompt, add_special_tokens=body.add_special_tokens)
    given = _given(body, body.logprobs) | _echoed_logprobs(body)
    default = None if "max_tokens" in body.model_fields_set else COMPLETION_MAX_TOKENS
    return _request(body, prompts, given, defaults, headers=headers, default_max_tokens=default)


def chat_request(body: ChatBody, headers: CallHeaders, tokenizer: Tokenizer) -> Request:
    return _chat_request(body, [body.messages], headers, tokenizer)


NOT_IN_BATCHES = ("stream", "resumable", "tools", "use_beam_search", "prompt_logprobs", "prompt_logprob_token_ids")


def batch_request(body: ChatBatchBody, headers: CallHeaders, tokenizer: Tokenizer) -> Request:
    """Converts a body of /v1/chat/completions/batch to one request with a prompt per conversation. Raises
    Unimplemented for the options that batches do not offer, InvalidArgument for no conversations."""
    for name in NOT_IN_BATCHES:
        if getattr(body, name):
            raise Unimplemented(f"{name} is not supported for a batch of conversations", field=name)
    if body.n not in (None, 1):
        raise Unimplemented(
            f"n={body.n} is not supported for a batch of conversations, which have one answer each", field="n"
        )
    if not body.messages:
        raise InvalidArgument("messages must contain at least one conversation", field="messages")
    return _chat_request(body, body.messages, headers, tokenizer)


def _chat_request(
    body: ChatOptions,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    headers: CallHeaders,
    tokenizer: Tokenizer,
) -> Request:
    """Converts conversations that share their options to one request: tools, thinking, limits and constraints. A
    response format is dropped if a tool must be called, since there will be no content."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidArgument("when using `top_logprobs`, `logprobs` must be set to true.", field="top_logprobs")
    documents = {} if body.documents is None else {"documents": body.documents}
    offer = tools.read(body.tools, body.tool_choice, parallel=body.parallel_tool_calls is not False)
    variables = {**documents, **thinking.variables(body)}
    prompts = [chat_prompt(body, messages, variables, offer.template_tools) for messages in conversations]
    given = _given(body, (body.top_logprobs or 0) if body.logprobs else None) | {
        "max_tokens": token_limit(max_tokens=body.max_tokens, max_completion_tokens=body.max_completion_tokens),
        "thinking_token_budget": thinking.budget(body, counts_reasoning=tokenizer.thinking_token_ids is not None),
    }
    if body.response_format is not None and offer.must_call:
        given["structured_output"] = None  # the format applies to content, and there will be none
    request = _request(body, prompts, given, tokenizer.defaults, headers=headers, default_max_tokens=None)
    is_shown = body.include_reasoning and not (body.reasoning is not None and body.reasoning.exclude)
    options = media_options(body.mm_processor_kwargs, body.media_io_kwargs)
    return replace(
        request, parse_answer=True, tool_use=offer.tool_use, include_reasoning=is_shown, media_options=options
    )


def answer_options(body: GenerationBody, prefix: Sequence[str]) -> AnswerOptions:
    """Collects the options that only affect the form of the answer. `prefix` holds the echoed text of each prompt.
    Raises InvalidArgument for stream_options without stream and retention_s without resumable."""
    if body.stream_options is not None and not body.stream:
        raise InvalidArgument("Stream options can only be defined when `stream=True`.", field="stream_options")
    if body.retention_s is not None and not body.resumable:
        raise InvalidArgument(f"retention_s={body.retention_s:g} requires `resumable=True`.", field="retention_s")
    options = body.stream_options or StreamOptions()
    return AnswerOptions(
        stream=bool(body.stream),
        include_usage=options.include_usage,
        continuous_usage=options.include_usage and options.continuous_usage_stats,
        token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        prompt_text=bool(body.return_prompt_text),
        prompt_logprobs=body.prompt_logprobs is not None or bool(body.prompt_logprob_token_ids),
        metrics=bool(body.return_metrics),
        echoed_logprobs=isinstance(body, CompletionBody) and bool(body.echo) and body.logprobs is not None,
        prefix=prefix,
    )


def _check_prompt_logprobs(body: GenerationBody) -> None:
    if body.stream and (body.prompt_logprobs is not None or body.prompt_logprob_token_ids):
        raise InvalidArgument("`prompt_logprobs` are not available when `stream=True`.", field="prompt_logprobs")


def _echoed_logprobs(body: CompletionBody) -> dict[str, Any]:
    """Returns the prompt logprobs that echo with logprobs requests: as many as for the output."""
    if not body.echo or body.logprobs is None:
        return {}
    if body.prompt_logprob_start or body.prompt_logprob_token_ids:
        raise InvalidArgument("echo with logprobs needs the whole prompt.", field="prompt_logprob_start")
    if body.stream and (body.n or 1) > 1:
        raise InvalidArgument("n must be 1 when streaming an echo with logprobs.", field="n")
    return {"prompt_logprobs": body.logprobs if body.prompt_logprobs is None else body.prompt_logprobs}


def _given(body: GenerationBody, logprobs: int | None) -> dict[str, Any]:
    """Collects the sampling parameters that the body sets, None for unset ones. `logprobs` is the number of top
    candidates per token, None for no logprobs."""
    if body.logprob_token_ids and logprobs is None:
        raise InvalidArgument("when using `logprob_token_ids`, `logprobs` must be set.", field="logprob_token_ids")
    given: dict[str, Any] = {name: getattr(body, name) for name in SAMPLING_FIELDS} | scalar_fields.given(body)
    _check_prompt_logprobs(body)
    token_limit(max_tokens=body.max_tokens)
    given["logprobs"] = logprobs
    given["stop"] = [body.stop] if isinstance(body.stop, str) else body.stop
    given["logit_bias"] = logit_bias(body.logit_bias) if body.logit_bias else None
    given["logits_processors"] = logits_processors(body.logits_processors)
    given["structured_output"] = constraint(body.response_format, guided_constraint(body))
    if (rule := body.repetition_detection) is not None:
        given["repetition_detection"] = RepetitionDetection(**rule.model_dump())
    given["beam_search"] = _beam_search(body)
    return given


def _beam_search(body: GenerationBody) -> BeamSearch | None:
    """Returns the parameters of beam search with a width of `n`, None if it is not requested. Raises InvalidArgument
    for its options without use_beam_search."""
    if body.use_beam_search:
        penalty = 1.0 if body.length_penalty is None else body.length_penalty
        return BeamSearch(body.n or 1, penalty, bool(body.early_stopping))
    if body.length_penalty not in (None, 1.0) or body.early_stopping:
        field = "early_stopping" if body.early_stopping else "length_penalty"
        raise InvalidArgument(f"{field} requires use_beam_search=true.", field=field)
    return None


def _structured_output_field(body: GenerationBody) -> str:
    """Returns the name of the field that gave the constraint, for error texts."""
    if body.response_format is not None:
        return "response_format"
    guided = (f"guided_{name}" for name in GUIDED if getattr(body, f"guided_{name}") is not None)
    return next(guided, "structured_outputs")


def _request(
    body: GenerationBody,
    prompts: Sequence[Prompt],
    given: Mapping[str, Any],
    defaults: GenerationDefaults,
    *,
    headers: CallHeaders,
    default_max_tokens: int | None,
) -> Request:
    """Builds the request; `given` are the sampling parameters that the body sets, `defaults` fill the others. The
    body's request id and tenant take precedence over the headers'; without an id a random one is made."""
    return Request(
        request_id=body.request_id or headers.request_id or uuid.uuid4().hex,
        model=body.model,
        prompts=prompts,
        sampling=sampling_rules.build(given, defaults),
        arrival_s=headers.arrival_s,
        deadline_s=headers.deadline_s,
        priority=body.priority or 0,
        tenant=body.tenant or headers.tenant,
        cache_salt=body.cache_salt or "",
        kv_priority=body.kv_priority,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side or "left",
        default_max_tokens=default_max_tokens,
        final_only=not body.stream,
        stream_interval=body.stream_interval or 1,
        structured_output_field=_structured_output_field(body),
        strict_length=True,
    )
