"""How much to reason, in the words of several makers' chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from quire.services.frontend.request import reasoning

if TYPE_CHECKING:
    from quire.services.frontend.openai_edge.body.bodies import ChatOptions

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ThinkingBody(BaseModel):
    """The object of Anthropic, DeepSeek, GLM and Kimi."""

    model_config = ConfigDict(extra="allow")

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: int | None = Field(None, description="of models that reason, without effect on others")
    clear_thinking: bool | None = Field(None, description="the chat template's variable")


class ReasoningOptions(BaseModel):
    """The object of OpenRouter."""

    model_config = ConfigDict(extra="allow")

    effort: ReasoningEffort | None = None
    max_tokens: int | None = Field(default=None, description="a budget, of models that reason")
    enabled: bool | None = None
    exclude: bool = Field(default=False, description="the answer comes without its reasoning")
    summary: str | None = Field(default=None, description="accepted: the reasoning itself comes")


def _thinking(value: Any) -> Any:
    """Returns the object for a client that says only whether."""
    if isinstance(value, bool):
        return {"type": "enabled" if value else "disabled"}
    return {"type": value} if isinstance(value, str) else value


def _reasoning(value: Any) -> Any:
    if isinstance(value, bool):
        return {"enabled": value}
    return {"effort": value} if isinstance(value, str) else value


ThinkingField = Annotated[ThinkingBody, BeforeValidator(_thinking)]
ReasoningField = Annotated[ReasoningOptions, BeforeValidator(_reasoning)]


def switch(is_on: bool | None) -> dict[str, Any]:
    """Returns the variables by which chat templates are told whether to reason."""
    return {} if is_on is None else {"enable_thinking": is_on, "thinking": is_on}


def of_thinking(thinking: ThinkingBody | None) -> dict[str, Any]:
    """Returns the variables of a chat template that a `thinking` object sets."""
    if thinking is None:
        return {}
    cleared = {} if thinking.clear_thinking is None else {"clear_thinking": thinking.clear_thinking}
    return {**switch(None if thinking.type == "auto" else thinking.type != "disabled"), **cleared}


def variables(body: ChatOptions) -> Mapping[str, Any]:
    """Returns the variables of the chat template. Where several fields disagree, the later one counts of
    reasoning_effort, reasoning, think, thinking, enable_thinking, chat_template_args."""
    asked = body.reasoning or ReasoningOptions()
    return {
        **reasoning.template_variables(body.reasoning_effort or asked.effort),
        **switch(asked.enabled),
        **(reasoning.template_variables(body.think) if isinstance(body.think, str) else switch(body.think)),
        **of_thinking(body.thinking),
        **switch(body.enable_thinking),
        **(body.chat_template_args or {}),
    }


def budget(body: ChatOptions, *, has_marks: bool) -> int | None:
    """Returns how many tokens of reasoning were asked for. `has_marks`: the model marks its reasoning, so that it can
    be counted; clients that name a budget in the words of others do not know, and are answered without one."""
    if body.thinking_token_budget is not None or not has_marks:
        return body.thinking_token_budget
    if body.thinking is not None and body.thinking.type == "disabled":
        return None
    given = (
        None if body.thinking is None else body.thinking.budget_tokens,
        body.thinking_budget,
        None if body.reasoning is None else body.reasoning.max_tokens,
    )
    return next((tokens for tokens in given if tokens is not None), None)
