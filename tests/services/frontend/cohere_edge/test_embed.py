"""Tests of vectors in the forms that Cohere's clients request.

The scripted scheduler's vector of a prompt is its length and its first token.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.services.frontend.cohere_edge.format import WRITERS
from quire.shared.columns import f32_bytes
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, prompt_of, scheduler
from tests.services.frontend.tiny_folder import write_folder

ASKED: dict[str, Any] = {"texts": ["one", "one two"]}
PROMPTS = {"query": "Ask: ", "search_document": "Read: "}


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[Running, ScriptedScheduler]]:
    script = ScriptedScheduler()
    async with scheduler(script), running(folder, script.address) as frontend:
        yield frontend, script


def prompted_folder(folder: Path) -> Path:
    """Writes a sentence-transformers folder with prompts."""
    model_folder = write_folder(folder)
    modules = [{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "1_Pooling"}]
    (model_folder / "1_Pooling").mkdir()
    (model_folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    (model_folder / "modules.json").write_text(json.dumps(modules))
    (model_folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}))
    return model_folder


async def test_a_text_has_a_vector_in_every_requested_encoding(folder: Path) -> None:
    async with serving(folder) as (frontend, script):
        plain = (await frontend.http.post("/v2/embed", json=ASKED)).json()
        kinds = {"embedding_types": ["base64", "float", "ubinary"], "output_dimension": 2}
        several = (await frontend.http.post("/v2/embed", json=ASKED | kinds)).json()
    expected = [[len(one), one[0]] for one in map(prompt_of, script.submissions[:2])]
    assert plain["embeddings"] == {"float": expected}
    assert (plain["response_type"], plain["texts"]) == ("embeddings_by_type", ASKED["texts"])
    assert plain["meta"]["billed_units"]["input_tokens"] == sum(length for length, _ in expected)
    decoded = [np.frombuffer(base64.b64decode(one), "<f4").tolist() for one in several["embeddings"]["base64"]]
    assert (decoded, list(several["embeddings"])) == (expected, ["base64", "float", "ubinary"])
    assert {one.params.pooling.dimensions for one in script.submissions[2:]} == {2}


async def test_version_1_has_only_floats_unless_encodings_are_named(folder: Path) -> None:
    async with serving(folder) as (frontend, _):
        plain = (await frontend.http.post("/v1/embed", json=ASKED)).json()
        named = (await frontend.http.post("/v1/embed", json=ASKED | {"embedding_types": ["float"]})).json()
    assert (plain["response_type"], named["response_type"]) == ("embeddings_floats", "embeddings_by_type")
    assert plain["embeddings"] == named["embeddings"]["float"]
    assert plain["meta"]["api_version"] == {"version": "1"}


def test_signs_are_bits_the_first_of_which_is_the_highest() -> None:
    vector = f32_bytes([1.0, -1.0, 0.0, 0.5, -0.1, -0.2, -0.3, 2.0, 3.0])
    assert WRITERS["ubinary"](vector) == [0b10010001, 0b10000000]
    assert WRITERS["binary"](vector) == [0b10010001 - 128, 0]


@pytest.mark.parametrize(
    ("input_type", "before"),
    [("search_query", "Ask: "), ("search_document", "Read: "), ("classification", ""), (None, "")],
)
async def test_the_input_type_selects_the_models_prompt(tmp_path: Path, input_type: str | None, before: str) -> None:
    async with serving(prompted_folder(tmp_path / "model")) as (frontend, script):
        answer = await frontend.http.post("/v2/embed", json={"texts": ["one"], "input_type": input_type})
        assert answer.status_code == 200, answer.text
        tokenizer = frontend.frontend.model.tokenizer
        assert prompt_of(script.submissions[0]) == tokenizer.encode_inline(before + "one", add_special_tokens=True)


async def test_texts_are_truncated_at_the_requested_end(folder: Path) -> None:
    async with serving(folder) as (frontend, script):
        for changes in ({"max_tokens": 2}, {"max_tokens": 2, "truncate": "START"}, {}):
            answer = await frontend.http.post("/v2/embed", json={"texts": ["abcd"], **changes})
            assert answer.status_code == 200, answer.text
        end, start, whole = map(prompt_of, script.submissions)
        refused = await frontend.http.post("/v2/embed", json={"texts": ["a " * 9000], "truncate": "NONE"})
        cut = await frontend.http.post("/v2/embed", json={"texts": ["a " * 9000]})
    assert (end, start) == (whole[:2], whole[-2:])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "texts")
    assert cut.status_code == 200


@pytest.mark.parametrize(
    ("changes", "field", "text"),
    [
        ({"texts": None}, "texts", "at least one entry"),
        ({"texts": []}, "texts", "at least 1"),
        ({"texts": [""]}, "texts", "empty"),
        (
            {"texts": None, "images": ["data:image/png;base64,AA=="]},
            "images",
            "images are not supported by this server",
        ),
        ({"texts": ["a"], "images": ["data:"]}, "texts", "exactly one of texts, images and inputs"),
        ({"texts": None, "inputs": [{"content": [{"type": "text"}]}]}, "inputs", "needs its text"),
        (
            {"texts": None, "inputs": [{"content": [{"type": "audio", "audio": "x"}]}]},
            "inputs",
            "of type 'audio' are not supported",
        ),
        ({"inputs": [{"content": []}]}, "inputs.0.content", "at least 1"),
        ({"input_type": "image"}, "input_type", "'search_document', 'search_query'"),
        ({"embedding_types": ["int8"]}, "embedding_types.0", "'float', 'base64', 'binary' or 'ubinary'"),
        ({"output_dimension": 2**21}, "output_dimension", "output_dimension must be in"),
        ({"max_tokens": 10_000_000}, "max_tokens", "max_tokens must be in"),
        ({"max_tokens": 2, "truncate": "NONE"}, "truncate", "requires truncate START"),
        ({"truncated": "END"}, "truncated", "Unrecognized"),
    ],
)
async def test_errors_name_the_field(folder: Path, changes: dict[str, Any], field: str, text: str) -> None:
    async with serving(folder) as (frontend, _):
        answer = await frontend.http.post("/v2/embed", json=ASKED | changes)
        unknown = await frontend.http.post("/v2/embed", json=ASKED | {"model": "nobody"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field
    assert text in error["message"]
    assert unknown.status_code == 404
