"""Rich bodies of every API: conversations with tools, parts and structured outputs."""

from __future__ import annotations

from typing import Any

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "now", "parameters": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
PART = {"type": "text", "text": "hi"}
CHAT: list[Any] = [
    {"role": "system", "content": "Be brief.", "name": "boss"},
    {"role": "user", "content": [PART, {"type": "input_text", "text": "there"}, "plain"]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "so",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "M"}'}}],
    },
    {"role": "tool", "content": "sunny", "tool_call_id": "a", "name": "weather"},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "reasoning": "why"},
    {"role": "user", "content": "and now?"},
]
CHOICE = {"type": "function", "function": {"name": "weather"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [TOOL]}}
FORM = {"type": "json_schema", "json_schema": {"name": "f", "schema": SCHEMA, "strict": True, "description": "d"}}
FEW = {"max_tokens": 2, "temperature": 0}
ITEMS: list[Any] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "so"}], "content": None},
    {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "so"}]},
    {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}", "status": "completed"},
    {"type": "function_call_output", "call_id": "a", "output": [{"type": "output_text", "text": "sunny"}]},
    {"role": "developer", "content": "Be brief."},
    {"role": "assistant", "content": [{"type": "output_text", "text": "ok", "annotations": []}]},
    {"role": "user", "content": "and now?"},
]
BLOCKS: list[Any] = [
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "so", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "M"}},
        ],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "a", "content": [PART], "is_error": False}, PART],
    },
]
USED = {"name": "weather", "description": "now", "input_schema": SCHEMA, "type": "custom"}
OLLAMA: list[Any] = [
    {"role": "user", "content": "hi", "images": []},
    {
        "role": "assistant",
        "content": "",
        "thinking": "so",
        "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "M"}}}],
    },
    {"role": "tool", "content": "sunny", "tool_name": "weather"},
    {"role": "user", "content": "and now?"},
]
OPTIONS = {"num_predict": 2, "stop": ["x"], "seed": 1, "temperature": 0, "top_k": 3}
TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"], "parameters": {}}
FLAG = {"name": "stream", "datatype": "BOOL", "shape": [1], "data": [False]}

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**FEW, "messages": CHAT, "tools": [TOOL], "tool_choice": CHOICE}),
    ("/v1/chat/completions", {**FEW, "messages": CHAT[1:2], "tools": [TOOL], "tool_choice": ALLOWED}),
    (
        "/v1/chat/completions",
        {
            **FEW,
            "messages": CHAT[-1:],
            "response_format": FORM,
            "logit_bias": {"5": 1},
            "logits_processors": {},
            "chat_template_kwargs": {"enable_thinking": False},
            "stream": True,
            "stream_options": {"include_usage": True},
            "repetition_detection": {"max_pattern_size": 2, "min_pattern_size": 1, "min_count": 2},
        },
    ),
    ("/v1/chat/completions/batch", {**FEW, "messages": [CHAT, CHAT[-1:]]}),
    ("/v1/completions", {**FEW, "prompt": ["hi", [1, 2]], "stop": ["x"], "structured_outputs": {"choice": ["a", "b"]}}),
    ("/v1/completions", {**FEW, "prompt": "hi", "structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}}),
    (
        "/v1/responses",
        {
            "input": ITEMS,
            "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "weather"}],
            },
            "reasoning": {"effort": "low", "summary": "auto"},
            "max_output_tokens": 2,
        },
    ),
    (
        "/v1/responses",
        {
            "input": ITEMS[-1:],
            "text": {"format": {"type": "json_schema", "name": "f", "schema": SCHEMA, "strict": True}},
            "metadata": {"a": "b"},
            "include": ["message.output_text.logprobs"],
            "max_output_tokens": 2,
        },
    ),
    ("/v1/responses/input_tokens", {"input": ITEMS}),
    (
        "/v1/messages",
        {
            "messages": BLOCKS,
            "system": [PART],
            "tools": [USED],
            "tool_choice": {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 1},
            "max_tokens": 2,
        },
    ),
    (
        "/v1/messages",
        {
            "messages": BLOCKS[:1],
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
            "max_tokens": 2,
        },
    ),
    ("/v1/messages/count_tokens", {"messages": BLOCKS, "system": [PART], "tools": [USED]}),
    ("/api/chat", {"messages": OLLAMA, "tools": [TOOL], "options": OPTIONS, "stream": False}),
    ("/api/chat", {"messages": OLLAMA[-1:], "format": SCHEMA, "options": OPTIONS, "stream": False}),
    ("/api/generate", {"prompt": "hi", "system": "Be brief.", "options": OPTIONS, "format": "json", "stream": False}),
    ("/api/show", {"model": "talking", "options": OPTIONS}),
    (
        "/generate",
        {
            "text": ["hi", "there"],
            "sampling_params": {"max_new_tokens": 2, "stop": ["x"], "json_schema": "{}"},
            "return_logprob": True,
            "top_logprobs_num": 1,
            "token_ids_logprob": [1],
            "logprob_start_len": 0,
        },
    ),
    ("/tokenize", {"messages": CHAT, "tools": [TOOL]}),
    ("/detokenize", {"tokens": [1, 2]}),
    ("/v2/models/talking/infer", {"inputs": [TENSOR, FLAG], "outputs": [{"name": "text_output", "parameters": {}}]}),
    ("/v2/models/talking/generate", {"text_input": "hi", "stream": False, "parameters": {"max_tokens": 2}}),
    ("/v1/embeddings", {"input": ["hi", [1, 2]], "dimensions": 4}),
    ("/pooling", {"input": ["hi", [1, 2]], "pooler": "mean"}),
    ("/v2/embed", {"texts": ["hi"], "input_type": "search_query", "embedding_types": ["float"]}),
    ("/score", {"queries": ["a"], "documents": ["b", "c"]}),
    ("/rerank", {"query": "a", "documents": ["b", "c"], "top_n": 1}),
    ("/invocations", {**FEW, "messages": CHAT[-1:]}),
]
