"""Client libraries' own helpers against quire-tiny; they check the responses.

`python -m tests.e2e.faces.clients http://127.0.0.1:8000` runs all that are installed; `pip install langchain-openai
instructor "pydantic-ai-slim[openai,anthropic]" litellm dspy cohere ollama openai-agents haystack-ai` for those that
development does not need."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, Field

MODEL = "quire-tiny"
ASK: Any = [{"role": "user", "content": "What is 23 + 45?"}]
ANSWER = "68"


class Town(BaseModel):
    """A town."""

    name: str = Field(max_length=12)
    people: int = Field(ge=0, le=9)


def openai_parses_chats(url: str) -> None:
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": MODEL, "messages": ASK, "max_tokens": 100, "temperature": 0}
        reply = client.chat.completions.parse(**asked, response_format=Town)
        assert isinstance(reply.choices[0].message.parsed, Town)
        with client.chat.completions.stream(**asked, response_format=Town) as stream:
            assert isinstance(stream.get_final_completion().choices[0].message.parsed, Town)
        asked |= {"tools": [openai.pydantic_function_tool(Town)], "parallel_tool_calls": False}
        with client.chat.completions.stream(**asked, tool_choice="required") as stream:
            (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
        assert isinstance(call.function.parsed_arguments, Town)
        raw = client.chat.completions.with_raw_response.create(**asked)
        assert raw.headers["x-request-id"] == raw.parse()._request_id


def openai_parses_responses(url: str) -> None:
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": MODEL, "input": ASK, "max_output_tokens": 100, "temperature": 0}
        assert isinstance(client.responses.parse(**asked, text_format=Town).output_parsed, Town)
        with client.responses.stream(**asked, text_format=Town) as stream:
            assert isinstance(stream.get_final_response().output_parsed, Town)
        first = client.responses.create(**asked)
        assert first.output_text == ANSWER
        told: Any = [*ASK, *first.output, {"role": "user", "content": "And 1 + 1?"}]
        assert client.responses.create(**{**asked, "input": told}).status == "completed"
        counted = client.responses.input_tokens.count(model=MODEL, input=ASK)
        assert first.usage is not None
        assert counted.input_tokens == first.usage.input_tokens


def anthropic_streams_counts_and_calls(url: str) -> None:
    import anthropic

    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        greedy: Any = {"extra_body": {"temperature": 0}}
        with client.messages.stream(model=MODEL, max_tokens=20, messages=ASK, **greedy) as stream:
            reply = stream.get_final_message()
        assert [block.text for block in reply.content if block.type == "text"] == [ANSWER]
        counted = client.messages.count_tokens(model=MODEL, messages=ASK)
        assert counted.input_tokens == reply.usage.input_tokens + (reply.usage.cache_read_input_tokens or 0)
        tool: Any = {"name": "town", "description": "A town.", "input_schema": Town.model_json_schema()}
        choice: Any = {"type": "any", "disable_parallel_tool_use": True}
        asked: Any = {"model": MODEL, "max_tokens": 200, "messages": ASK, **greedy}
        called = client.messages.create(**asked, tools=[tool], tool_choice=choice)
        (block,) = called.content
        assert block.type == "tool_use"
        assert Town.model_validate(block.input)


def langchain_chats(url: str) -> None:
    from langchain_openai import ChatOpenAI

    for more in ({}, {"use_responses_api": True}):
        where: Any = {"base_url": f"{url}/v1", "api_key": "none", "model": MODEL}
        model: Any = ChatOpenAI(**where, max_tokens=100, temperature=0, **more)
        reply = model.invoke("What is 23 + 45?")
        assert reply.text == ANSWER
        assert reply.usage_metadata["output_tokens"] > 0
        assert "".join(piece.text for piece in model.stream("What is 23 + 45?")) == ANSWER
        assert isinstance(model.with_structured_output(Town).invoke("x"), Town)
        bound = model.bind_tools([Town], tool_choice="any", parallel_tool_calls=False)
        assert [call["name"] for call in bound.invoke("x").tool_calls] == ["Town"]


def instructor_extracts(url: str) -> None:
    import instructor
    import openai

    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.RESPONSES_TOOLS):
        client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)
        said = client.chat.completions.create(model=MODEL, messages=ASK, response_model=Town, max_retries=1)
        assert isinstance(said, Town)


def pydantic_ai_runs(url: str) -> None:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    settings: Any = {"max_tokens": 100, "temperature": 0, "parallel_tool_calls": False}
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind(MODEL, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
        assert Agent(model, model_settings=settings).run_sync("What is 23 + 45?").output == ANSWER
        for wanted in (Town, NativeOutput(Town)):
            said: Any = Agent(model, output_type=wanted, model_settings=settings, retries=0).run_sync("x").output
            assert isinstance(said, Town)


def pydantic_ai_asks_as_anthropic_has_it(url: str) -> None:
    """Uses models that know tools: without `strict` this one's arguments are not bound to the schema."""
    import anthropic
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.usage import UsageLimits

    def new_agent() -> Any:  # each run has an event loop of its own, and so a client
        client = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
        model = AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=client))
        return Agent(model, instructions="Be brief.", model_settings={"max_tokens": 100, "temperature": 0})

    counted = UsageLimits(input_tokens_limit=1000, count_tokens_before_request=True)
    asked: Any = new_agent().run_sync("What is 23 + 45?", usage_limits=counted)
    assert asked.output == ANSWER
    assert new_agent().run_sync("And 1 + 1?", message_history=asked.all_messages()).output
    with new_agent().run_stream_sync("What is 23 + 45?") as stream:
        assert [*stream.stream_text()][-1] == ANSWER


def dspy_asks(url: str) -> None:
    """Calls the model directly: Predict writes long instructions, which this model does not follow."""
    import dspy

    for kind in ("chat", "responses"):
        asked: Any = {"api_base": f"{url}/v1", "api_key": "none", "max_tokens": 100, "temperature": 0, "cache": False}
        model: Any = dspy.LM(f"openai/{MODEL}", model_type=kind, num_retries=0, **asked)
        (said,) = model("What is 23 + 45?")
        assert (said if isinstance(said, str) else said["text"]) == ANSWER
    assert dspy.LM(f"openai/{MODEL}", n=2, **asked)("What is 23 + 45?") == [ANSWER] * 2


def litellm_completes(url: str) -> None:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the network for prices
    import litellm

    for provider, base in (("openai", f"{url}/v1"), ("hosted_vllm", f"{url}/v1"), ("anthropic", url)):
        asked: Any = {"model": f"{provider}/{MODEL}", "api_base": base, "api_key": "none"}
        asked |= {"messages": ASK, "max_tokens": 20, "temperature": 0}
        assert litellm.completion(**asked).choices[0].message.content == ANSWER
        pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)]
        assert "".join(pieces) == ANSWER


def cohere_embeds_and_ranks(url: str) -> None:
    import cohere

    client = cohere.ClientV2(api_key="none", base_url=url)
    kinds = ["float", "ubinary"]
    found = client.embed(model=MODEL, texts=["a", "b"], input_type="search_query", embedding_types=kinds).embeddings
    assert [len(one) for one in found.ubinary] == [len(one) // 8 for one in found.float_]
    assert len(client.rerank(model=MODEL, query="a", documents=["b", "a"], top_n=1).results) == 1
    before = cohere.Client(api_key="none", base_url=url)
    assert len(before.embed(model=MODEL, texts=["a", "b"], input_type="search_document").embeddings) == 2


def ollama_chats(url: str) -> None:
    import ollama

    client: Any = ollama.Client(host=url)
    greedy: Any = {"temperature": 0, "num_predict": 100}
    assert client.chat(model=MODEL, messages=ASK, options=greedy).message.content == ANSWER
    pieces = client.chat(model=MODEL, messages=ASK, options=greedy, stream=True)
    assert "".join(piece.message.content or "" for piece in pieces) == ANSWER
    formed = client.chat(model=MODEL, messages=ASK, options=greedy, format=Town.model_json_schema())
    assert Town.model_validate_json(formed.message.content)
    assert len(client.embed(model=MODEL, input=["a", "b"]).embeddings) == 2


def agents_call_tools(url: str) -> None:
    """Runs an agent with a tool; a call that `max_tokens` truncates within its arguments is reported to the model, and
    its text sent back."""
    import agents
    import openai

    @agents.function_tool
    def town(name: str) -> str:
        """A town."""
        return name

    agents.set_tracing_disabled(True)
    client: Any = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    chat = agents.OpenAIChatCompletionsModel(MODEL, client)
    cut = agents.ModelSettings(temperature=0, max_tokens=12, tool_choice="required")
    agent: Any = agents.Agent(name="a", model=chat, model_settings=cut, tools=[town])
    assert agents.Runner.run_sync(agent, "What is 23 + 45?", max_turns=3).final_output is not None
    greedy = agents.ModelSettings(temperature=0, max_tokens=20)
    for model in (chat, agents.OpenAIResponsesModel(MODEL, client)):
        agent = agents.Agent(name="a", model=model, model_settings=greedy)
        assert agents.Runner.run_sync(agent, "What is 23 + 45?").final_output == ANSWER


def haystack_chats(url: str) -> None:
    from haystack.components.embedders import OpenAITextEmbedder
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    where: Any = {"api_key": Secret.from_token("none"), "model": MODEL, "api_base_url": f"{url}/v1"}
    generator = OpenAIChatGenerator(**where, generation_kwargs={"temperature": 0, "max_tokens": 100})
    asked = [ChatMessage.from_user("What is 23 + 45?")]
    assert generator.run(asked)["replies"][0].text == ANSWER
    formed = generator.run(asked, generation_kwargs={"response_format": Town})["replies"][0].text
    assert Town.model_validate_json(formed)
    assert OpenAITextEmbedder(**where).run("a")["embedding"]


TRIALS: list[tuple[str, Callable[[str], None]]] = [
    ("openai", openai_parses_chats),
    ("openai", openai_parses_responses),
    ("anthropic", anthropic_streams_counts_and_calls),
    ("langchain_openai", langchain_chats),
    ("instructor", instructor_extracts),
    ("pydantic_ai", pydantic_ai_runs),
    ("pydantic_ai", pydantic_ai_asks_as_anthropic_has_it),
    ("dspy", dspy_asks),
    ("litellm", litellm_completes),
    ("cohere", cohere_embeds_and_ranks),
    ("ollama", ollama_chats),
    ("agents", agents_call_tools),
    ("haystack", haystack_chats),
]


def main() -> None:
    (url,) = sys.argv[1:]
    for library, trial in TRIALS:
        if importlib.util.find_spec(library) is None:
            print(f"{trial.__name__}: {library} is not installed")
            continue
        trial(url)
        print(f"{trial.__name__}: as it should be")


if __name__ == "__main__":
    main()
