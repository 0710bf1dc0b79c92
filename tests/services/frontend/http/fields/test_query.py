"""Parameters of queries that a route does not have: refused by name where a query says anything at all."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.services.frontend.running import Running
from tests.services.frontend.tool_model import tool_model_folder, tool_server

pytestmark = pytest.mark.asyncio(loop_scope="module")

KEY = "an operator's key that is long enough"
SHOWN = {"authorization": f"Bearer {KEY}"}
STRICT = {"batches", "responses", "streams", "operations"}  # tags of the routes that any query has a meaning for


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def frontend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    root = tmp_path_factory.mktemp("query")
    (root / "key").write_text(KEY)
    (root / "key").chmod(0o600)
    settings: dict[str, Any] = {"batch_folder": str(root / "batches"), "admin_key_file": str(root / "key")}
    async with tool_server(tool_model_folder(root / "talking"), "Yes.", **settings) as (started, _client, _script):
        yield started


async def test_every_such_route_refuses_an_unknown_one_by_name(frontend: Running) -> None:
    document = (await frontend.http.get("/openapi.json")).json()
    asked, wrong = 0, []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            there = [one["name"] for one in operation.get("parameters", ()) if one["in"] == "query"]
            if not STRICT.intersection(operation["tags"]):
                continue
            asked += 1
            answer = await frontend.http.request(method, re.sub("{.*}", "x", path), params={"limt": "1"}, headers=SHOWN)
            message = f"unknown query parameter 'limt'; available: {', '.join(there) or 'none'}"
            if (answer.status_code, answer.json()["error"]["message"]) != (400, message):
                wrong.append((method, path, answer.text))
            assert answer.json()["error"]["param"] == "limt"
    assert not wrong
    assert asked >= 20


@pytest.mark.parametrize("query", ["order=oldest", "order=", "limit=0", "purpos=batch", "x" * 5000, "a=1&limit=1"])
async def test_a_list_of_files_is_not_made_of_a_query_that_asks_for_another(frontend: Running, query: str) -> None:
    answer = await frontend.http.get(f"/v1/files?{query}")
    assert answer.status_code == 400
    assert len(answer.text) < 400


async def test_known_ones_and_those_of_azure_are_read(frontend: Running) -> None:
    for number in range(3):
        form = {"files": {"file": (f"{number}.jsonl", b"{}")}, "data": {"purpose": "batch"}}
        assert (await frontend.http.post("/v1/files?api-version=preview", **form)).status_code == 200

    async def names(query: str) -> list[str]:
        listed = (await frontend.http.get(f"/v1/files?{query}")).json()
        return [one["filename"] for one in listed["data"]]

    newest = await names("")
    assert sorted(newest) == ["0.jsonl", "1.jsonl", "2.jsonl"]
    assert await names("order=asc") == newest[::-1]
    assert await names("order=desc&limit=2&purpose=batch&api-version=preview") == newest[:2]


async def test_where_a_query_has_no_meaning_any_is_read_over(frontend: Running) -> None:
    """Anthropic's clients, proxies and probes send some."""
    said = {"model": "talking", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
    for path in ("/v1/messages?beta=true", "/v1/chat/completions?beta=true"):
        assert (await frontend.http.post(path, json=said)).status_code == 200
    for path in ("/v1/models?limit=1000", "/health?at=1"):
        assert (await frontend.http.get(path)).status_code == 200


async def test_a_method_that_is_not_there_is_told_before(frontend: Running) -> None:
    assert (await frontend.http.delete("/v1/files?limt=1")).status_code == 405


async def test_the_guards_come_before(frontend: Running) -> None:
    assert (await frontend.http.post("/pause?mod=abort")).status_code == 401


async def test_what_vllm_clears_stays_and_is_not_said_to_be_cleared(frontend: Running) -> None:
    refused = await frontend.http.post("/pause?clear_cache=true", headers=SHOWN)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "clear_cache")
    document = (await frontend.http.get("/openapi.json")).json()
    (said,) = [one for one in document["paths"]["/pause"]["post"]["parameters"] if one["name"] == "clear_cache"]
    assert said["schema"]["const"] is False


async def test_items_of_a_response_come_in_the_order_that_is_asked_for(frontend: Running) -> None:
    said = [{"role": "user", "content": text} for text in ("one", "two")]
    made = await frontend.http.post("/v1/responses", json={"model": "talking", "input": said})
    path = f"/v1/responses/{made.json()['id']}"

    async def texts(query: str) -> list[str]:
        listed = (await frontend.http.get(f"{path}/input_items{query}")).json()
        return [item["content"] for item in listed["data"]]

    assert await texts("") == await texts("?order=asc") == ["one", "two"]
    assert await texts("?order=desc") == ["two", "one"]
    assert await texts("?limit=1") == ["one"]
    assert await texts("?limit=2") == ["one", "two"]
    more = [(await frontend.http.get(f"{path}/input_items?limit={limit}")).json()["has_more"] for limit in (1, 2)]
    assert more == [True, False]
    assert (await frontend.http.get(f"{path}/input_items?limit=0")).status_code == 400
    assert (await frontend.http.get(f"{path}?include_obfuscation=false")).status_code == 200
