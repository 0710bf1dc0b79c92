"""Fuzzes HTTP routes: calls generated from the OpenAPI document, bodies with one unusual field, and rich bodies with an
unusual value at one place. `python -m tests.services.frontend.http.fuzz --examples 500` runs more cases than a test has
time for."""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from tests.services.frontend.http import rich_bodies
from tests.services.frontend.running import running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.services.frontend.tool_model import tool_model_folder

CALL_TIMEOUT_S = 60.0
HELD = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
SAID = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "talking", "prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"model": "talking", "messages": SAID, "max_tokens": 2},
    "/v1/chat/completions/batch": {"model": "talking", "messages": [SAID], "max_tokens": 2},
    "/v1/responses": {"model": "talking", "input": "hi", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"model": "talking", "input": "hi"},
    "/v1/messages": {"model": "talking", "messages": SAID, "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "talking", "messages": SAID},
    "/api/chat": {"model": "talking", "messages": SAID, "options": {"num_predict": 2}},
    "/api/generate": {"model": "talking", "prompt": "hi", "options": {"num_predict": 2}},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 2}},
    "/tokenize": {"model": "talking", "prompt": "x"},
    "/detokenize": {"model": "talking", "tokens": [1]},
}
MARK = "the place"
Place = tuple[str | int, ...]
# JSON texts, since some of them cannot be produced by an encoder.
LEAVES = (
    *("null", "true", '""', "[]", "{}", "0", "-1", "-0.0", "0.5", "1e30", "-1e30", "1e400", "1E-400", "2147483648"),
    *("4294967296", "9223372036854775808", "18446744073709551616", "1" + "0" * 400, '"1"', '"NaN"', '"\\ud83d"'),
    *('"\\udc00a"', '"\\u0000"', '"\\ufeff"', '"' + "a" * 2000 + '"', '{"\\ud800":1}', "[null]", "[[]]", '["\\ud800"]'),
    *("NaN", "Infinity", "[1e30]", "[-1]", '{"type":"text"}', '[{"type":"text"}]', '{"type":"object"}', '"auto"'),
    *("[" * 200 + "]" * 200, '{"a":' * 200 + "1" + "}" * 200),
)


class Findings:
    """Counts of answers, and unexpected answers."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.wrong: list[str] = []
        self.untried: list[str] = []  # operations for which no call can be generated

    def of_document(self, url: str, examples: int) -> None:
        """Sends `examples` valid and invalid calls for each operation."""
        document = httpx.get(f"{url}/openapi.json", timeout=CALL_TIMEOUT_S).json()
        schema = schemathesis.openapi.from_dict(document)
        schema.config.update(base_url=url)
        checks = [check for check in CHECKS.get_all() if check.__name__ in HELD]
        for found in schema.get_all_operations():
            operation = found.ok()
            for mode in GenerationMode:
                try:
                    self._ask(operation.as_strategy(generation_mode=mode), examples, partial(self._case, checks))
                except Unsatisfiable:
                    self.untried.append(f"{mode.value} {operation.label}")

    def of_fields(self, url: str, examples: int) -> None:
        """Sends `examples` bodies for each route in which one or two fields, also nested ones, are unusual."""
        document = httpx.get(f"{url}/openapi.json", timeout=CALL_TIMEOUT_S).json()
        with httpx.Client(base_url=url, timeout=CALL_TIMEOUT_S) as client:
            for path, body in BODIES.items():
                names = st.sampled_from(fields_of(document, path))
                odd = st.dictionaries(names, odd_values(), min_size=1, max_size=2)
                self._ask(odd, examples, partial(self._body, client, path, body))

    def of_places(self, url: str, examples: int) -> None:
        """Sends `count` different unusual values at each place of each rich body."""
        with httpx.Client(base_url=url, timeout=CALL_TIMEOUT_S) as client:
            for path, body in rich_bodies.BODIES:
                answer = client.post(path, json=body)
                if answer.status_code != 200:
                    self.wrong.append(f"{path} as it is: {answer.status_code} {answer.text[:300]}")
                for place in places_in(body):
                    odd = random.Random(f"{path} {place}").sample(LEAVES, min(examples, len(LEAVES)))
                    for text in odd:
                        sent = json.dumps(put(body, place, MARK)).replace(json.dumps(MARK), text)
                        self._send(client, path, sent, f"{place}: {text}")

    def _ask(self, strategy: st.SearchStrategy[Any], examples: int, ask: Callable[[Any], None]) -> None:
        @settings(
            max_examples=examples,
            derandomize=True,
            database=None,
            deadline=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def each(value: Any) -> None:
            ask(value)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of the generators about difficult schemas
            each()

    def _case(self, checks: list[Any], case: Any) -> None:
        if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
            case.body["model"] = "talking"  # another model is 404 before the rest of the body is validated
        try:
            response = case.call(timeout=CALL_TIMEOUT_S)
            self.statuses[response.status_code] += 1
            case.validate_response(response, checks=checks)
        except Exception as error:
            self.wrong.append(f"{case.method} {case.path} {case.query} {str(case.body)[:300]}: {str(error)[:600]}")

    def _body(self, client: httpx.Client, path: str, body: dict[str, Any], odd: dict[str, str]) -> None:
        parts = {name: json.dumps(value) for name, value in body.items()} | odd
        sent = "{" + ",".join(f"{json.dumps(name)}:{text}" for name, text in parts.items()) + "}"
        self._send(client, path, sent, sent)

    def _send(self, client: httpx.Client, path: str, sent: str, told: str) -> None:
        """Sends a call. `told`: description of what is unusual."""
        try:
            response = client.post(path, content=sent, headers={"content-type": "application/json"})
        except httpx.HTTPError as error:
            self.wrong.append(f"{path} {told[:300]}: {error!r}")
            return
        self.statuses[response.status_code] += 1
        if response.status_code >= 500 or response.status_code == 429:
            self.wrong.append(f"{path} {told[:300]}: {response.status_code} {response.text[:300]}")


def places_in(value: Any, *, at: Place = ()) -> Iterator[Place]:
    """Yields the path of every field and entry, as keys and indices."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*at, key)
        yield from places_in(one, at=(*at, key))


def put(value: Any, place: Place, new: Any) -> Any:
    """Returns a copy with another value at the path."""
    if not place:
        return new
    copied = copy.copy(value)
    copied[place[0]] = put(value[place[0]], place[1:], new)
    return copied


def odd_values() -> st.SearchStrategy[str]:
    leaves = st.sampled_from(LEAVES)
    lists = st.lists(leaves, min_size=1, max_size=3).map(lambda items: f"[{','.join(items)}]")
    names = st.sampled_from(("type", "role", "content", "text", "name", "function", "schema", "json", "id", "1"))
    objects = st.dictionaries(names, leaves, min_size=1, max_size=3).map(
        lambda fields: "{" + ",".join(f'"{name}":{text}' for name, text in fields.items()) + "}"
    )
    return leaves | lists | objects | objects.map(lambda text: f"[{text}]")


def fields_of(document: dict[str, Any], path: str) -> list[str]:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    return sorted({*schema["properties"], *BODIES[path]})


async def fuzz(folder: Path, examples: int, part: Callable[[Findings, str, int], None]) -> Findings:
    """Runs all cases and waits until admission is idle."""
    script = ScriptedScheduler(count_up)
    findings = Findings()
    async with scheduler(script), running(tool_model_folder(folder), script.address) as frontend:
        await asyncio.to_thread(part, findings, frontend.url, examples)
        await frontend.until_idle()
        return findings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples", type=int, default=100, help="of each operation and sort")
    asked = parser.parse_args()
    for part in (Findings.of_document, Findings.of_fields, Findings.of_places):
        with tempfile.TemporaryDirectory() as scratch:
            findings = asyncio.run(fuzz(Path(scratch) / "talking", asked.examples, part))
        print(f"{part.__name__}: {dict(findings.statuses)}, wrong: {len(findings.wrong)}")
        for line in (*findings.wrong, *findings.untried):
            print(f"  {line}")


if __name__ == "__main__":
    main()
