"""Conversion of bodies to the frontend's request."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from quire.services.frontend.http.fields import scalar_fields
from quire.services.frontend.input_processor import prompt_limits
from quire.services.frontend.input_processor.sampling import sampling_rules
from quire.services.frontend.openai_edge.body import thinking
from quire.services.frontend.openai_edge.body.logit_bias import logit_bias
from quire.services.frontend.openai_edge.body.logits_processors import logits_processors
from quire.services.frontend.openai_edge.body.structured_outputs import (
    FormatFieldNames,
    JsonSchemaFormat,
    ResponseFormat,
    constraint,
)
from quire.services.frontend.openai_edge.body.token_limit import token_limit
from quire.services.frontend.openai_edge.responses import tools
from quire.services.frontend.openai_edge.responses.body import ResponsesBody
from quire.services.frontend.openai_edge.responses.messages import Item, to_messages
from quire.services.frontend.request import conversation, reasoning
from quire.services.frontend.request.call_headers import CallHeaders
from quire.services.frontend.request.media_options import media_options
from quire.services.frontend.request.request import Request
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.errors import InvalidArgument

FORMAT_FIELD_NAMES = FormatFieldNames("text.format", "schema")
SAMPLING_FIELDS = (
    "temperature",
    "seed",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "include_stop_str_in_output",
    "skip_special_tokens",
)


def responses_request(
    body: ResponsesBody, items: Sequence[Item], headers: CallHeaders, tokenizer: Tokenizer
) -> Request:
    """Converts a body to a request. `items` is the whole conversation, of previous responses and this body, and may
    add tools; truncation `auto` cuts the prompt to the context."""
    listed = [*(body.tools or ()), *tools.added_tools(items)]
    offer = tools.read(listed, body.tool_choice, parallel=body.parallel_tool_calls is not False)
    prompt = conversation.chat_prompt(
        to_messages(body.instructions, items),
        template_variables={**_variables(body), **(body.chat_template_kwargs or {})},
        tools=offer.template_tools,
    )
    return Request(
        request_id=body.request_id or headers.request_id or uuid.uuid4().hex,
        model=body.model,
        prompts=(prompt,),
        sampling=sampling_rules.build(_given(body, has_content=not offer.must_call), tokenizer.defaults),
        arrival_s=headers.arrival_s,
        deadline_s=headers.deadline_s,
        priority=body.priority or 0,
        tenant=body.tenant or headers.tenant,
        cache_salt=body.cache_salt or "",
        kv_priority=body.kv_priority,
        truncate_prompt_tokens=prompt_limits.FIT_TO_CONTEXT if body.truncation == "auto" else None,
        final_only=not (body.stream or body.background),
        parse_answer=True,
        tool_use=offer.tool_use,
        media_options=media_options(body.mm_processor_kwargs, body.media_io_kwargs),
        structured_output_field="text.format" if body.structured_outputs is None else "structured_outputs",
        strict_length=True,
    )


def _variables(body: ResponsesBody) -> Mapping[str, Any]:
    """Returns the template variables that switch thinking: effort, then `thinking`, then `enable_thinking`; later
    ones override."""
    return {
        **reasoning.template_variables(body.reasoning.effort if body.reasoning is not None else None),
        **thinking.thinking_variables(body.thinking),
        **thinking.thinking_switch(body.enable_thinking),
    }


def _given(body: ResponsesBody, *, has_content: bool) -> dict[str, Any]:
    """Returns the sampling fields; `has_content`: the answer may be text, to which alone a format applies."""
    form = constraint(_form(body), body.structured_outputs, FORMAT_FIELD_NAMES)
    return {
        **{name: getattr(body, name) for name in SAMPLING_FIELDS},
        "stop": [body.stop] if isinstance(body.stop, str) else body.stop,
        "logit_bias": logit_bias(body.logit_bias) if body.logit_bias else None,
        "logits_processors": logits_processors(body.logits_processors),
        **scalar_fields.given(body),
        "max_tokens": token_limit(max_output_tokens=body.max_output_tokens),
        "logprobs": (body.top_logprobs or 0) if body.wants_logprobs else None,
        "structured_output": form if has_content or body.structured_outputs is not None else None,
    }


def _form(body: ResponsesBody) -> ResponseFormat | None:
    """Converts text.format, which lacks the inner object of chat completions; None without one. Raises
    InvalidArgument for an invalid format."""
    given = body.text.format if body.text is not None else None
    if given is None:
        return None
    inner = {name: value for name, value in given.items() if name != "type"}
    try:
        if given.get("type") == "json_schema" and "json_schema" not in given:
            return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(**inner))
        return ResponseFormat(**given)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in ("text", "format", *first["loc"]))
        raise InvalidArgument(f"{place}: {first['msg']}", field="text") from None
