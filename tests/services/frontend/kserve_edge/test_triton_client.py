"""A real client of the protocol, over gRPC and HTTP."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.programs import answered
from tests.services.frontend.tool_model import tool_model_folder, tool_server

PROGRAM = Path(__file__).with_name("triton_client.py")
HTTP_PROGRAM = Path(__file__).with_name("triton_http_client.py")
HAS_CLIENT = importlib.util.find_spec("tritonclient") is not None
HAS_HTTP = HAS_CLIENT and importlib.util.find_spec("geventhttpclient") is not None


@pytest.mark.skipif(not HAS_CLIENT, reason="needs pip install 'quire[dialects]'")
async def test_what_people_do_with_tritonclient(tmp_path: Path) -> None:
    folder = tool_model_folder(tmp_path / "talking")
    async with tool_server(folder, "It is sunny.") as (frontend, _, script):
        frontend.write_each_token(script)
        command = (sys.executable, str(PROGRAM), frontend.frontend.grpc_address, "talking")
        status, out, err = await answered(*command)
    assert status == 0, err
    told = json.loads(out)
    assert told["live"]
    assert told["ready"] == [True, True, False]
    assert "text_output" in told["outputs"]
    assert told["whole"] == "Hm? It is sunny."
    assert len(told["pieces"]) > 1
    assert "".join(told["pieces"]) == "It is sunny."
    assert told["refused"] == "StatusCode.INVALID_ARGUMENT: top_p must be in (0, 1], got 7.0."


@pytest.mark.skipif(not HAS_HTTP, reason="needs pip install 'quire[dialects]'")
async def test_what_people_do_with_it_over_http(tmp_path: Path) -> None:
    folder = tool_model_folder(tmp_path / "talking")
    async with tool_server(folder, "It is sunny.") as (frontend, _, _script):
        status, out, err = await answered(sys.executable, str(HTTP_PROGRAM), frontend.frontend.http_address, "talking")
    assert status == 0, err
    told = json.loads(out)
    [num_tokens], counts_are_bytes = told["binary"].pop("num_output_tokens")
    assert (num_tokens > 2, counts_are_bytes) == (True, True)
    assert told == {
        "live": True,
        "ready": [True, True, False],
        "extensions": ["generate", "binary_tensor_data"],
        "outputs": told["outputs"],
        "binary": {"text_output": [["Grüß dich. It is sunny."], True]},
        "text": {"text_output": [["Hm? It is sunny."], False]},
        "mixed": {"text_output": [["Hm? It is sunny."], True]},
        "compressed": [["Hm? It is sunny."]] * 2,
        "several": [[f"{number}. It is sunny."] for number in range(3)],
        "refused": "400: top_p must be in (0, 1], got 7.0.",
    }
    assert "text_output" in told["outputs"]
