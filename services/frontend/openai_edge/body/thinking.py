"""Amount of reasoning, in the fields of several vendors' chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from quire.services.frontend.request import reasoning

if TYPE_CHECKING:
    from quire.services.frontend.openai_edge.body.bodies import ChatOptions

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ThinkingBody(BaseModel):
    """Object `thinking` of Anthropic, DeepSeek, GLM and Kimi."""

    model_config = ConfigDict(extra="allow")

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: int | None = Field(None, description="of models that reason, without effect on others")
    clear_thinking: bool | None = Field(None, description="the chat template's variable")


class ReasoningOptions(BaseModel):
    """Object `reasoning` of OpenRouter's API."""

    model_config = ConfigDict(extra="allow")

    effort: ReasoningEffort | None = None
    max_tokens: int | None = Field(default=None, description="a budget, of models that reason")
    enabled: bool | None = None
    exclude: bool = Field(default=False, description="omit the reasoning from the answer")
    summary: str | None = Field(default=None, description="accepted; the reasoning itself is returned")


def _thinking(value: Any) -> Any:
    """Returns the object for a client that sends only a boolean or a type."""
    if isinstance(value, bool):
        return {"type": "enabled" if value else "disabled"}
    return {"type": value} if isinstance(value, str) else value


def _reasoning(value: Any) -> Any:
    if isinstance(value, bool):
        return {"enabled": value}
    return {"effort": value} if isinstance(value, str) else value


ThinkingField = Annotated[ThinkingBody, BeforeValidator(_thinking)]
ReasoningField = Annotated[ReasoningOptions, BeforeValidator(_reasoning)]


def thinking_switch(is_on: bool | None) -> dict[str, Any]:
    """Returns the chat template's variables that switch reasoning on or off."""
    return {} if is_on is None else {"enable_thinking": is_on, "thinking": is_on}


def thinking_variables(thinking: ThinkingBody | None) -> dict[str, Any]:
    """Returns the chat template's variables that a `thinking` object sets; type auto leaves thinking to the model,
    None sets none."""
    if thinking is None:
        return {}
    cleared = {} if thinking.clear_thinking is None else {"clear_thinking": thinking.clear_thinking}
    return {**thinking_switch(None if thinking.type == "auto" else thinking.type != "disabled"), **cleared}


def variables(body: ChatOptions) -> Mapping[str, Any]:
    """Returns the variables of the chat template.

    If several fields disagree, the last one counts of reasoning_effort, reasoning, think, thinking, enable_thinking,
    chat_template_args.
    """
    options = body.reasoning or ReasoningOptions()
    return {
        **reasoning.template_variables(body.reasoning_effort or options.effort),
        **thinking_switch(options.enabled),
        **(reasoning.template_variables(body.think) if isinstance(body.think, str) else thinking_switch(body.think)),
        **thinking_variables(body.thinking),
        **thinking_switch(body.enable_thinking),
        **(body.chat_template_args or {}),
    }


def budget(body: ChatOptions, *, counts_reasoning: bool) -> int | None:
    """Returns the requested budget of reasoning tokens.

    `counts_reasoning`: the model marks its reasoning, so that its tokens can be counted. A budget in another vendor's
    field is ignored for other models, since its client does not know the model.
    """
    if body.thinking_token_budget is not None or not counts_reasoning:
        return body.thinking_token_budget
    if body.thinking is not None and body.thinking.type == "disabled":
        return None
    given = (
        None if body.thinking is None else body.thinking.budget_tokens,
        body.thinking_budget,
        None if body.reasoning is None else body.reasoning.max_tokens,
    )
    return next((tokens for tokens in given if tokens is not None), None)
