"""Test with a real client of the protocol."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.programs import answered
from tests.services.frontend.tool_model import tool_model_folder, tool_server

PROGRAM = Path(__file__).with_name("smg_client.py")
HAS_CLIENT = importlib.util.find_spec("smg_grpc_proto") is not None


@pytest.mark.skipif(not HAS_CLIENT, reason="needs pip install 'quire[dialects]'")
async def test_the_published_stubs(tmp_path: Path) -> None:
    folder = tool_model_folder(tmp_path / "talking")
    reply_ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("It is sunny.", add_special_tokens=False).ids
    async with tool_server(folder, "It is sunny.") as (frontend, _, _script):
        status, out, err = await answered(sys.executable, str(PROGRAM), frontend.frontend.grpc_address)
    assert status == 0, err
    result = json.loads(out)
    assert result["tokens"] == reply_ids[:4]
    assert (result["finish_reason"], result["prompt_tokens"]) == ("length", 3)
    assert (result["healthy"], result["model"], result["running"]) == (True, "talking", 0)
