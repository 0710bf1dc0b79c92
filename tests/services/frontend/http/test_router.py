"""Routes are built on first use and behave as if built at start."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from fastapi import FastAPI

from quire.services.frontend.composition.dialects import DIALECTS
from quire.services.frontend.http.document.openapi import install_openapi
from quire.services.frontend.http.router import LazyRoute, Router
from quire.shared.errors import InvalidArgument
from tests.observing import calls_of


async def greet(name: str, times: int = 1) -> dict[str, str]:
    return {"text": " ".join([name] * times)}


async def drop(name: str) -> dict[str, str]:
    return {"dropped": name}


@pytest.fixture
def built() -> Iterator[list[str]]:
    """Returns the paths of the routes built so far, in order."""
    paths: list[str] = []
    build = vars(LazyRoute)["built"].func
    with calls_of(build, on_call=lambda call: paths.append(call.arguments["self"].path_format)):
        yield paths


@pytest.fixture
def app(built: list[str]) -> FastAPI:
    outer, inner = Router(tags=["outer"]), Router("/inner", tags=["inner"])
    outer.add_api_route("/greet/{name}", greet, methods=["GET"])
    inner.add_api_route("/{name}", greet, methods=["GET"])
    inner.add_api_route("/{name}", drop, methods=["DELETE"])
    outer.add(inner)
    app = FastAPI()
    app.router.routes.extend(outer.routes)
    install_openapi(app, DIALECTS)
    return app


async def asked(app: FastAPI, method: str, path: str) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
        return await client.request(method, path)


async def test_a_route_is_built_once_when_it_is_called(app: FastAPI, built: list[str]) -> None:
    assert built == []
    assert (await asked(app, "GET", "/greet/ada?times=2")).json() == {"text": "ada ada"}
    assert (await asked(app, "GET", "/greet/bob")).json() == {"text": "bob"}
    assert built == ["/greet/{name}"]


async def test_of_several_with_one_path_the_method_chooses(app: FastAPI) -> None:
    assert (await asked(app, "DELETE", "/inner/ada")).json() == {"dropped": "ada"}
    assert (await asked(app, "GET", "/inner/ada")).json() == {"text": "ada"}
    assert (await asked(app, "POST", "/inner/ada")).status_code == 405


async def test_unknown_paths_build_no_route(app: FastAPI, built: list[str]) -> None:
    assert (await asked(app, "GET", "/outer/ada")).status_code == 404
    assert built == []


async def test_wrong_parameters_are_refused(app: FastAPI) -> None:
    assert (await asked(app, "GET", "/greet/ada?times=often")).status_code == 422


async def test_the_document_has_all_of_them(app: FastAPI, built: list[str]) -> None:
    paths = (await asked(app, "GET", "/openapi.json")).json()["paths"]
    assert {path: {method: one["tags"] for method, one in methods.items()} for path, methods in paths.items()} == {
        "/greet/{name}": {"get": ["outer"]},
        "/inner/{name}": {"get": ["inner"], "delete": ["inner"]},
    }
    assert len(built) == 3


async def test_a_router_with_queries_of_its_own_refuses_others() -> None:
    strict = Router(own_query=True)
    strict.add_api_route("/greet/{name}", greet, methods=["GET"])
    app = FastAPI()
    app.router.routes.extend(strict.routes)
    assert (await asked(app, "GET", "/greet/ada?times=2")).json() == {"text": "ada ada"}
    with pytest.raises(InvalidArgument, match="unknown query parameter 'time'; available: times"):
        await asked(app, "GET", "/greet/ada?time=2")
