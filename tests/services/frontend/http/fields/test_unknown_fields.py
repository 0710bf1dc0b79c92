"""Unknown fields: those of other servers' clients are ignored and counted, misspelt ones refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import pytest

from quire.services.frontend.http.fields.unknown_fields import LABELS, LIKENESS, OTHER, UnknownFields, likely_name
from quire.shared.errors import InvalidArgument
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.services.frontend.tool_model import tool_model_folder

SAID = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/messages": {"messages": SAID, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": SAID},
    "/v1/embeddings": {"input": "hi"},
    "/v2/embed": {"texts": ["hi"]},
    "/api/chat": {"messages": SAID, "stream": False, "options": {"num_predict": 3}},
    "/tokenize": {"prompt": "x"},
}
KNOWN = frozenset({"temperature", "max_tokens", "top_p", "top_k", "stop", "n", "tools", "cache_salt", "min_p"})


@pytest.fixture
async def frontend(tmp_path: Path) -> AsyncIterator[Running]:
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(tool_model_folder(tmp_path / "talking"), script.address) as frontend:
        yield frontend


@pytest.mark.parametrize("path", BODIES)
async def test_a_field_of_another_servers_clients_is_ignored_and_counted(frontend: Running, path: str) -> None:
    """Fields of LiteLLM, LM Studio and OpenRouter, and an arbitrary one."""
    sent = {"drop_params": True, "ttl": 300, "transforms": ["middle-out"], "acme_department": "r&d"}
    before = await frontend.metrics()
    answer = await frontend.http.post(path, json={**BODIES[path], **sent})
    assert answer.status_code == 200, answer.text
    after = await frontend.metrics()
    for label in ("drop_params", "ttl", "transforms", OTHER):
        name = f"quire_unknown_request_fields_total{{field={label}}}"
        assert after[name] == before.get(name, 0) + 1


@pytest.mark.parametrize("path", BODIES)
async def test_a_misspelt_field_is_refused_with_what_was_meant(frontend: Running, path: str) -> None:
    answer = await frontend.http.post(path, json={**BODIES[path], "modell": "x"})
    assert answer.status_code == 400
    assert "Unrecognized request argument supplied: modell; did you mean 'model'?" in answer.text


@pytest.mark.parametrize("path", BODIES)
async def test_a_strict_server_refuses_every_unknown_field(tmp_path: Path, path: str) -> None:
    script = ScriptedScheduler(count_up)
    folder = tool_model_folder(tmp_path / "talking")
    async with scheduler(script), running(folder, script.address, strict_request_fields=True) as frontend:
        assert (await frontend.http.post(path, json=BODIES[path])).status_code == 200
        answer = await frontend.http.post(path, json={**BODIES[path], "drop_params": True})
    assert answer.status_code == 400
    assert "Unrecognized request argument supplied: drop_params" in answer.text


async def test_a_name_that_is_too_long_comes_back_shortened_or_not_at_all(frontend: Running) -> None:
    for path, body in BODIES.items():
        answer = await frontend.http.post(path, json={**body, "x" * 500_000: 1})
        assert answer.status_code == 200
        assert len(answer.content) < 40_000


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        ("temprature", "temperature"),
        ("temperatur", "temperature"),
        ("maxTokens", "max_tokens"),
        ("max-tokens", "max_tokens"),
        ("max_token", "max_tokens"),
        ("topP", "top_p"),
        ("tool", "tools"),
        ("stops", "stop"),
        ("n_predict", "max_tokens"),
        ("max_new_tokens", "max_tokens"),
        ("stop_sequences", "stop"),
    ],
)
def test_a_likely_name_is_found(sent: str, meant: str) -> None:
    assert likely_name(sent, KNOWN) == meant


@pytest.mark.parametrize("sent", ["cache_prompt", "client_metadata", "id", "user_tier", "x" * 100, "", "🙂", "plugins"])
def test_a_name_that_resembles_no_field_is_taken_for_no_mistake(sent: str) -> None:
    assert likely_name(sent, KNOWN) == ""


def test_labels_are_bounded() -> None:
    counted: Counter[str] = Counter()

    def count(label: str) -> None:
        counted[label] += 1

    unknown = UnknownFields(count)
    unknown.check(LABELS, KNOWN)
    for place in range(0, 1000, 100):
        unknown.check([f"zz{number}" for number in range(place, place + 100)], KNOWN)
    assert counted == Counter(dict.fromkeys(LABELS, 1)) + Counter({OTHER: 1000})


def test_a_strict_policy_names_the_field_and_its_object() -> None:
    with pytest.raises(InvalidArgument, match=r"supplied: options\.plugins$") as refused:
        UnknownFields(lambda _: None, strict=True).check(["plugins"], KNOWN, "options.")
    assert refused.value.field == "options.plugins"


@pytest.mark.parametrize("known", [KNOWN, frozenset(LABELS)])
def test_the_letter_filter_never_changes_the_result(known: frozenset[str]) -> None:
    """The letter filter rules out most names and never changes the result."""
    fields = {field.lower().replace("-", "").replace("_", ""): field for field in sorted(known)}
    changes = [("", 1), ("x", 0), ("x", 1), ("abc", 0), ("zz", 2)]
    names = [name[:at] + more + name[at + cut :] for name in fields for at in range(3) for more, cut in changes]
    for name in names:
        if name not in LABELS:
            found = get_close_matches(name, fields, n=1, cutoff=LIKENESS)
            assert likely_name(name, known) == (fields[found[0]] if found else "")
