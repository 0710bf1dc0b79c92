"""Paths and headers that clients of other servers look for."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.services.frontend.tool_model import TEMPLATE, tool_model_folder
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATIENCE_S = 60.0
SAID = [{"role": "user", "content": "hi"}]
CHAT: dict[str, Any] = {"messages": SAID, "max_tokens": 3, "seed": 5}
COMPLETION: dict[str, Any] = {"prompt": "hi", "max_tokens": 3, "seed": 5}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def frontend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder = tool_model_folder(tmp_path_factory.mktemp("models") / "talking")
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_max_length": int(1e30)}))
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address) as started:
        yield started


async def post(frontend: Running, path: str, body: Any) -> tuple[int, Any]:
    answer = await frontend.http.post(path, content=json.dumps(body))
    return answer.status_code, answer.json()


async def test_tokenizer_info_has_what_the_folder_says_and_the_template_in_use(frontend: Running) -> None:
    info = (await frontend.http.get("/tokenizer_info")).json()
    assert info["eos_token"] == "<|im_end|>"
    assert info["chat_template"] == TEMPLATE
    assert isinstance(info["tokenizer_class"], str)
    assert info["model_max_length"] == int(1e30), "what Hugging HttpApplication writes for: no limit"


async def test_probes_tell_alive_from_ready(tmp_path: Path) -> None:
    """Without a scheduler it is alive all the same, and needs no key to say so."""
    folder = tool_model_folder(tmp_path / "talking")
    async with running(folder, until_health=(503,), api_key="secret") as lonely:
        statuses = [(await lonely.http.get(path)).status_code for path in ("/live", "/ready", "/health")]
        assert statuses == [200, 503, 503]


async def test_it_is_ready_once_a_worker_has_told_its_adapters(tmp_path: Path) -> None:
    """Where that is asked for: who waits for /health and lists the models finds them all."""
    script = ScriptedScheduler(count_up, num_workers=0)
    folder = tool_model_folder(tmp_path / "talking")
    settings: dict[str, Any] = {"until_health": (503,), "health_awaits_worker": True}
    async with scheduler(script), running(folder, script.address, **settings) as waiting:
        await waiting.until_open(True)
        assert (await waiting.http.get("/health")).status_code == 503
        script.view.adapters.append("pirate")
        script.set_view(num_workers=1)
        await eventually(lambda: waiting.http.get("/health"), lambda found: found.status_code == 200)
        listed = (await waiting.http.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["talking", "pirate"]
        script.set_view(num_workers=0)
        await waiting.until_view(lambda view: view.num_workers == 0)
        assert (await waiting.http.get("/health")).status_code == 200, "workers that are away are waited for"


@pytest.mark.parametrize("path", ["/health", "/ready", "/live", "/ping"])
async def test_probes_may_ask_for_the_head_alone(frontend: Running, path: str) -> None:
    assert (await frontend.http.head(path)).status_code == 200


async def test_a_slash_at_the_end_is_none(tmp_path: Path) -> None:
    """Nobody is sent elsewhere: behind a proxy that would be a wrong address."""
    folder = tool_model_folder(tmp_path / "talking")
    script = ScriptedScheduler(count_up)
    settings: Any = {"root_path": "/llm", "max_inflight_requests": 1}
    async with scheduler(script), running(folder, script.address, **settings) as frontend:
        for path in ("/v1/completions/", "/llm/v1/completions/?a=b"):
            assert (await frontend.http.post(path, json=COMPLETION)).status_code == 200
        assert (await frontend.http.get("/v1/models/")).json()["object"] == "list"
        assert (await frontend.http.get("/")).status_code == 200
        long = {**COMPLETION, "max_tokens": 400, "stream": True}
        async with frontend.http.stream("POST", "/v1/completions/", json=long):
            assert (await frontend.http.post("/v1/completions/?a", content=b"no JSON")).status_code == 429


async def test_a_body_that_is_none_is_told(frontend: Running) -> None:
    for path in ("/v1/completions", "/v1/chat/completions/batch", "/v1/messages", "/invocations"):
        message = (await post_raw(frontend, path, b""))["error"]["message"]
        assert message == "the body is empty; it must be a JSON object"
        message = (await post_raw(frontend, path, b"[]"))["error"]["message"]
        assert message.startswith("the body: Input should be a valid dictionary")


async def test_null_is_no_body(frontend: Running) -> None:
    """Nor one without fields, which asks of Ollama that the model be loaded."""
    told = "the body: Input should be a valid dictionary"
    for path in ("/api/chat", "/api/generate", "/api/show"):
        assert (await post_raw(frontend, path, b"null"))["error"].startswith(told)
        assert (await post(frontend, path, {}))[0] == 200
    for path in ("/v1/completions", "/v1/messages"):
        assert (await post_raw(frontend, path, b" null "))["error"]["message"].startswith(told)


async def post_raw(frontend: Running, path: str, body: bytes) -> Any:
    answer = await frontend.http.post(path, content=body)
    assert answer.status_code == 400
    return answer.json()


async def test_readiness_follows_sessions(frontend: Running) -> None:
    assert [(await frontend.http.get(path)).status_code for path in ("/live", "/ready")] == [200, 200]


async def test_invocations_are_chats_or_completions(frontend: Running) -> None:
    """As SageMaker calls a container: one path, and the body says what it is."""
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        status, answer = await post(frontend, "/invocations", body)
        _, same = await post(frontend, path, body)
        assert status == 200
        assert (answer["object"], answer["choices"]) == (same["object"], same["choices"])
    streamed = await frontend.http.post("/invocations", json={**CHAT, "stream": True})
    assert streamed.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["hi", "you"]}),
        ("/score", {"queries": "hi", "documents": ["you", "me"]}),
        ("/score", {"text_1": "hi", "text_2": ["you", "me"]}),
        ("/score", {"data_1": "hi", "data_2": ["you", "me"]}),
        ("/score", {"queries": "hi", "items": ["you", "me"]}),
        ("/rerank", {"query": "hi", "documents": ["you", "me"], "top_n": 1}),
    ],
)
async def test_invocations_read_texts_as_well(frontend: Running, path: str, body: Any) -> None:
    status, answer = await post(frontend, "/invocations", body)
    _, same = await post(frontend, path, body)
    assert status == 200
    told = "results" if path == "/rerank" else "data"
    assert answer[told] == same[told]
    assert answer.keys() == same.keys()


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": 5}, "input"),
        ({"input": "hi", "modle": 1}, "modle"),
        ({"query": "hi"}, "documents"),
        ({"queries": "hi"}, "documents"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({**COMPLETION, "n": 0}, "n"),
        ({"max_tokens": 3}, "prompt"),
        ({"requestType": "NEW_SESSION"}, "requestType"),
        ({**COMPLETION, "modle": 1}, "modle"),
    ],
)
async def test_invocations_are_refused_in_the_words_of_the_call(frontend: Running, body: Any, field: str) -> None:
    status, answer = await post(frontend, "/invocations", body)
    assert (status, answer["error"]["param"]) == (400, field)


async def test_invocations_are_work(tmp_path: Path) -> None:
    """They take places, and are refused where there are none."""
    folder = tool_model_folder(tmp_path / "talking")
    script = ScriptedScheduler(count_up)
    long = {**COMPLETION, "max_tokens": 400, "stream": True}
    async with (
        scheduler(script),
        running(folder, script.address, max_inflight_requests=1) as small,
        small.http.stream("POST", "/v1/completions", json=long),
    ):
        status, _ = await post(small, "/invocations", CHAT)
    assert status == 429


async def test_a_batch_of_conversations_has_a_choice_for_each(frontend: Running) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("a", "bc", "def")]
    status, answer = await post(frontend, "/v1/chat/completions/batch", {**CHAT, "messages": conversations})
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    singles = [(await post(frontend, "/v1/chat/completions", {**CHAT, "messages": m}))[1] for m in conversations]
    assert [c["message"] for c in answer["choices"]] == [one["choices"][0]["message"] for one in singles]
    assert answer["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in singles)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"messages": []}, "messages"),
        ({"messages": SAID}, "messages.0"),
        ({"messages": [SAID, []]}, "messages"),
        ({"messages": [SAID] * 1025}, "messages"),
    ],
)
async def test_what_a_batch_has_not_is_refused_by_name(frontend: Running, changes: Any, field: str) -> None:
    status, answer = await post(frontend, "/v1/chat/completions/batch", {**CHAT, "messages": [SAID], **changes})
    assert (status, answer["error"]["param"]) == (400, field)


async def test_every_answer_has_an_id_and_its_line_in_the_log_too(
    frontend: Running, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever reports a refusal can name it, though they had not named the call."""
    caplog.set_level("INFO", "quire.calls")
    for method, path, body in (
        ("GET", "/health", b""),
        ("GET", "/v1/models", b""),
        ("GET", "/v1/nowhere", b""),
        ("POST", "/v1/completions", b"{"),
        ("POST", "/v1/messages", b"{}"),
        ("POST", "/v1/completions", b'{"prompt": "x", "n": 0}'),
    ):
        answer = await frontend.http.request(method, path, content=body)
        drawn = answer.headers["x-request-id"]
        assert len(drawn) == 32
        assert answer.headers.get_list("x-request-id") == [drawn]
        await eventually(lambda path=path, drawn=drawn: path == "/health" or drawn in _named_in(caplog))
        for mine, is_shown in ((b"mine", True), ("Malm\xf6".encode("latin-1"), False), (b"m" * 257, False)):
            answer = await frontend.http.request(method, path, content=body, headers={b"x-request-id": mine})
            assert (answer.headers.get("x-request-id") == mine.decode("latin-1")) == is_shown, (path, mine[:9])


def _named_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Ids of the calls that have their line."""
    lines = [record for record in caplog.records if record.name == "quire.calls"]
    return [line.values["request"] for line in lines]  # type: ignore[attr-defined]


async def test_the_chunk_that_opens_a_choice_counts_no_token_yet(frontend: Running) -> None:
    usage = {"include_usage": True, "continuous_usage_stats": True}
    answer = await frontend.http.post(
        "/v1/chat/completions", json={**CHAT, "stream": True, "stream_options": usage, "stream_interval": 2}
    )
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line and line != "data: [DONE]"]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    # Of three tokens, as one, two or all of them have come by the time of the first message: all that there can be.
    assert counts in ([0, 1, 3, 3], [0, 2, 3, 3], [0, 3, 3]), "what has come together goes together"
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"


LOAD = {"kv_cache_usage_perc": 0.25, "num_requests_waiting": 3.0, "num_requests_running": 7.0}


async def test_whoever_asks_for_it_is_told_the_load_with_each_answer(tmp_path: Path) -> None:
    """Under the names and in the formats that gateways know from vLLM."""
    folder = tool_model_folder(tmp_path / "talking")
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address) as frontend:
        script.set_view(num_waiting=3, num_running=7, kv_cache_usage=0.25)
        await eventually(lambda: frontend.frontend.core.client.load == LOAD)
        for body in (COMPLETION, {**COMPLETION, "stream": True}, {**COMPLETION, "n": 0}):
            asked = {"endpoint-load-metrics-format": "json"}
            answer = await frontend.http.post("/v1/completions", json=body, headers=asked)
            kind, _, told = answer.headers["endpoint-load-metrics"].partition(" ")
            assert (kind, json.loads(told)) == ("JSON", {"named_metrics": LOAD})
        answer = await frontend.http.get("/v1/models", headers={"endpoint-load-metrics-format": "TEXT"})
        named = [f"named_metrics.{name}={value}" for name, value in LOAD.items()]
        assert answer.headers["endpoint-load-metrics"] == f"TEXT {', '.join(named)}"
        for headers in ({}, {"endpoint-load-metrics-format": "BINARY"}):
            answer = await frontend.http.get("/v1/models", headers=headers)
            assert "endpoint-load-metrics" not in answer.headers


async def test_a_path_in_front_of_all_paths(tmp_path: Path) -> None:
    """Behind a proxy that cuts it off and behind one that does not; keys, door and words of errors are the same."""
    folder = tool_model_folder(tmp_path / "talking")
    script = ScriptedScheduler(count_up)
    settings: Any = {"root_path": "/llm/one", "api_key": "secret"}
    key = {"authorization": "Bearer secret"}
    async with scheduler(script), running(folder, script.address, **settings) as frontend:
        for prefix in ("", "/llm/one"):
            assert (await frontend.http.get(f"{prefix}/health")).status_code == 200
            assert (await frontend.http.get(f"{prefix}/v1/models")).status_code == 401
            assert (await frontend.http.get(f"{prefix}/v1/models", headers=key)).status_code == 200
            answer = await frontend.http.post(f"{prefix}/v1/messages", json={}, headers=key)
            assert answer.json()["type"] == "error"
            done = await frontend.http.post(f"{prefix}/v1/completions", json=COMPLETION, headers=key)
            assert done.status_code == 200
        assert (await frontend.http.get("/llm/onerous/health", headers=key)).status_code == 404
        document = (await frontend.http.get("/openapi.json", headers=key)).json()
        assert document["servers"] == [{"url": "/llm/one"}]
        assert '"/llm/one/openapi.json"' in (await frontend.http.get("/docs", headers=key)).text.replace("'", '"')
        counted = (await frontend.http.get("/metrics", headers=key)).text
        assert 'handler="/v1/completions"' in counted
        assert 'handler="/llm' not in counted


async def test_places_are_kept_under_a_path_in_front(tmp_path: Path) -> None:
    folder = tool_model_folder(tmp_path / "talking")
    script = ScriptedScheduler(count_up)
    settings: Any = {"root_path": "/llm", "max_inflight_requests": 1}
    long = {**COMPLETION, "max_tokens": 400, "stream": True}
    async with (
        scheduler(script),
        running(folder, script.address, **settings) as frontend,
        frontend.http.stream("POST", "/llm/v1/completions", json=long),
    ):
        refused = await frontend.http.post("/llm/v1/completions", content=b"no JSON at all")
        assert refused.status_code == 429, "it was read, and should not have been"


async def test_a_path_in_front_that_comes_twice_is_no_path_here(tmp_path: Path) -> None:
    """Guards and routes see the same path: what is behind it is not served to who could not ask for it by its name."""
    folder = tool_model_folder(tmp_path / "talking")
    script = ScriptedScheduler(count_up)
    settings: Any = {"root_path": "/llm", "api_key": "secret"}
    key = {"authorization": "Bearer secret"}
    async with scheduler(script), running(folder, script.address, **settings) as frontend:
        assert (await frontend.http.get("/llm/is_paused", headers=key)).status_code == 401
        for prefix in ("/llm/llm", "/llm/llm/llm", "/llm//llm"):
            for path in ("/is_paused", "/pause", "/is_sleeping", "/v1/models", "/v1/completions", "/docs"):
                for method in ("GET", "POST"):
                    answer = await frontend.http.request(method, f"{prefix}{path}", headers=key)
                    assert answer.status_code == 404
