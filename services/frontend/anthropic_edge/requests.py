"""Conversion of bodies to the frontend's request."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

from quire.services.frontend.anthropic_edge import tools
from quire.services.frontend.anthropic_edge.bodies import CountBody, MessagesBody
from quire.services.frontend.anthropic_edge.messages import to_messages
from quire.services.frontend.http.fields import scalar_fields
from quire.services.frontend.input_processor.sampling import sampling_rules
from quire.services.frontend.request import conversation, reasoning
from quire.services.frontend.request.call_headers import CallHeaders
from quire.services.frontend.request.request import ChatPrompt, Request
from quire.services.frontend.request.tool_offer import ToolOffer
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import sampling_pb2


def messages_request(body: MessagesBody, headers: CallHeaders, tokenizer: Tokenizer) -> Request:
    """Returns the request; a max_tokens that exceeds the context is reduced, since these clients always send a large
    one."""
    offer = tools.read(body.tools, body.tool_choice)
    given = {
        "temperature": body.temperature,
        **scalar_fields.given(body),
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "thinking_token_budget": _budget(body, tokenizer),
        "structured_output": _form(body),
    }
    return Request(
        request_id=headers.request_id or uuid.uuid4().hex,
        model=body.model,
        prompts=(prompt(body, offer),),
        sampling=sampling_rules.build(given, tokenizer.defaults),
        arrival_s=headers.arrival_s,
        deadline_s=headers.deadline_s,
        tenant=headers.tenant,
        final_only=not body.stream,
        parse_answer=True,
        tool_use=offer.tool_use,
        include_reasoning=body.thinking is None or body.thinking.display != "omitted",
    )


def count_prompt(body: CountBody) -> ChatPrompt:
    return prompt(body, tools.read(body.tools, body.tool_choice))


def prompt(body: CountBody, offer: ToolOffer) -> ChatPrompt:
    """Returns the prompt; a last message of the assistant is the beginning of the answer."""
    written = to_messages(body.system, body.messages)
    continues = bool(written) and written[-1]["role"] == "assistant" and not written[-1].get("tool_calls")
    return conversation.chat_prompt(
        written,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        template_variables={**_variables(body), **(body.chat_template_kwargs or {})},
        tools=offer.template_tools,
    )


def _variables(body: CountBody) -> Mapping[str, Any]:
    """Returns the template variables for the effort and for thinking, which is on unless its type is disabled."""
    effort = body.output_config.effort if body.output_config is not None else None
    variables = dict(reasoning.template_variables(effort))
    if body.thinking is not None:
        thinks = body.thinking.type != "disabled"
        variables |= {"enable_thinking": thinks, "thinking": thinks}
    return variables


def _budget(body: MessagesBody, tokenizer: Tokenizer) -> int | None:
    """Returns the thinking budget; none for models that cannot reason, which the clients do not know."""
    if body.thinking is None or body.thinking.type != "enabled" or tokenizer.thinking_token_ids is None:
        return None
    return body.thinking.budget_tokens


def _form(body: MessagesBody) -> sampling_pb2.StructuredOutput | None:
    """Returns the constraint of output_config.format, else of output_format, None without either. Raises
    InvalidArgument unless it is a json_schema with a schema."""
    output_format = None if body.output_config is None else body.output_config.format
    form = body.output_format if output_format is None else output_format
    if form is None:
        return None
    schema = form.get("schema")
    if form.get("type") != "json_schema" or not isinstance(schema, dict):
        raise InvalidArgument("output_config.format must have type json_schema and a schema", field="output_config")
    return sampling_pb2.StructuredOutput(json_schema=json.dumps(schema))
