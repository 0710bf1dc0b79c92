"""The table of dialects determines how a server handles a path outside of its route."""

from __future__ import annotations

from dataclasses import replace

import pytest
from starlette.responses import Response
from starlette.routing import compile_path

from quire.services.frontend.composition.dialects import DIALECTS
from quire.services.frontend.http.dialect import Dialect, ErrorFormat, InferencePath
from quire.services.frontend.http.dialects import Dialects
from quire.services.frontend.openai_edge.routes.transcription_routes import TRANSCRIPTIONS, TRANSLATIONS
from quire.shared.errors import InvalidArgument, NotFound, QuireError


@pytest.mark.parametrize(
    ("path", "begin"),
    [
        ("/v1/chat/completions", b'{"error":{'),
        ("/v1/nope", b'{"error":{'),
        ("/sleep", b'{"error":{'),
        ("/v1/messages", b'{"type":"error"'),
        ("/v1/messages/nope", b'{"type":"error"'),
        ("/api/chat", b'{"error":"'),
        ("/api/nope", b'{"error":"'),
        ("/v2", b'{"error":"'),
        ("/v2/models/llama/infer", b'{"error":"'),
        ("/v2/rerank", b'{"error":{'),  # paths of Cohere and Jina, whose clients expect OpenAI's errors
        ("/v2/embed", b'{"error":{'),
        ("/v2/chat", b'{"error":{'),
    ],
)
def test_an_error_has_the_format_of_its_path(path: str, begin: bytes) -> None:
    assert bytes(DIALECTS.refusal(path, NotFound("gone")).body).startswith(begin)
    assert bytes(DIALECTS.status(path, 405, "no").body).startswith(begin)


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/completions", "/v1/completions"),
        ("/v1/messages/count_tokens", "/v1/messages/count_tokens"),
        ("/v2/models/org/llama/infer", "/v2/models/{name:path}/infer"),
        ("/v2/models/llama/versions/1/generate_stream", "/v2/models/{name:path}/generate_stream"),
        ("/v2/models/llama/ready", ""),
        ("/infer", ""),
        ("/tokenize", ""),
        ("/v1/batches", ""),
    ],
)
def test_work_is_known_by_its_path(path: str, route: str) -> None:
    assert DIALECTS.inference_path(path) == route


def test_a_field_is_named_as_in_the_body_once() -> None:
    error = InvalidArgument("max_tokens must be at least 1; max_tokens is a count", field="max_tokens")
    told = DIALECTS.in_client_terms("/v1/responses", error)
    assert (told.field, told.message) == (
        "max_output_tokens",
        "max_output_tokens must be at least 1; max_tokens is a count",
    )
    assert DIALECTS.in_client_terms("/v1/completions", error) is error
    form = InvalidArgument("structured_output: no such thing", field="structured_output")
    assert DIALECTS.in_client_terms("/v1/completions", form, "response_format").field == "response_format"


def test_each_path_belongs_to_one_dialect() -> None:
    paths = [path for one in DIALECTS.all for path in (*(work.path for work in one.inference_paths), *one.paths)]
    prefixes = [prefix for one in DIALECTS.all for prefix in one.prefixes]
    assert len(paths) == len(set(paths))
    assert len(prefixes) == len(set(prefixes))
    assert len({one.name for one in DIALECTS.all}) == len(DIALECTS.all)


FORMS = {TRANSCRIPTIONS, TRANSLATIONS}  # their bodies hold files


def test_examples_are_of_the_dialects_own_paths() -> None:
    for one in DIALECTS.all:
        mine = {compile_path(work.path)[1] for work in one.inference_paths}
        others = {
            compile_path(work.path)[1] for other in DIALECTS.all if other is not one for work in other.inference_paths
        }
        assert one.examples("model").keys() >= mine - FORMS
        assert not one.examples("model").keys() & others


def test_a_new_dialect_is_one_value() -> None:
    def worded(error: QuireError) -> Response:
        return Response(f"oh: {error.message}", 418)

    tgi = Dialect(
        name="tgi",
        routers=lambda _: [],
        errors=ErrorFormat(worded, lambda status, text: Response(text, status), {"type": "string"}),
        prefixes=("/tgi/",),
        inference_paths=(InferencePath("/tgi/generate", {"type": "array"}, field_names={"prompt": "inputs"}),),
    )
    dialects = Dialects((*DIALECTS.all, tgi))
    error = InvalidArgument("prompt: it is empty", field="prompt")
    assert dialects.inference_path("/tgi/generate") == "/tgi/generate"
    assert bytes(dialects.refusal("/tgi/info", error).body) == b"oh: prompt: it is empty"
    assert dialects.in_client_terms("/tgi/generate", error).message == "inputs: it is empty"
    assert dialects.error_schema("/tgi/generate") == {"type": "string"}
    assert dialects.documented_paths()["/tgi/generate"].answer == {"type": "array"}
    assert Dialects((replace(tgi, prefixes=()),)).refusal("/elsewhere", error).status_code == 418, (
        "the first dialect answers for paths of none"
    )
