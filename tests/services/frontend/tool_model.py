"""Model folder whose chat template shows tools and reasoning, and a frontend that serves it with a scripted model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
from tokenizers import AddedToken

from tests.services.frontend.running import NO_TLS, Running, running
from tests.services.frontend.scripted_replies import Said, replying
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, scheduler
from tests.services.frontend.tiny_folder import byte_level_tokenizer, write_folder

MARKUP = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TEMPLATE = """
{%- if tools %}
{{- '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking %}{{ '<think>\\n' }}{% endif %}
{%- endif %}"""

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Malmö 🙂"}}\n</tool_call>'
CALLS = f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
ASK: list[dict[str, Any]] = [{"role": "user", "content": "How is the weather?"}]


def tool_model_folder(folder: Path, template: str = TEMPLATE) -> Path:
    """Writes a folder whose markup is special tokens, as in most families."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in MARKUP])
    return write_folder(folder, tokenizer=tokenizer, chat_template=template)


@asynccontextmanager
async def tool_server(
    folder: Path, reply: Said, *, max_model_len: int = 4096, **settings: Any
) -> AsyncIterator[tuple[Running, Any, ScriptedScheduler]]:
    """Yields the frontend, an OpenAI client, and the script."""
    script = ScriptedScheduler(replying(folder, reply), max_model_len=max_model_len)
    async with (
        scheduler(script),
        running(folder, script.address, **settings) as frontend,
        openai.AsyncOpenAI(
            base_url=f"{frontend.url}/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(verify=NO_TLS),
        ) as client,
    ):
        yield frontend, client, script
