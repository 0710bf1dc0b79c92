"""Tests of browser clients from npm, in Node."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import answered
from tests.services.frontend.tool_model import tool_model_folder, tool_server

ROOT = Path(__file__).resolve().parents[4]
PROGRAM = Path(__file__).with_name("clients.cjs")
# The @connectrpc packages must have exactly the same version, and are not always published together.
PACKAGES = (
    "@connectrpc/connect@2.1 @connectrpc/connect-web@2.1 @connectrpc/connect-node@2.1 @bufbuild/protobuf grpc-web xhr2"
)


def packages() -> str:
    folder = os.environ.get("TEST_NODE_MODULES", "")
    if shutil.which("node") is None or not (Path(folder) / "@connectrpc" / "connect-web").is_dir():
        pytest.skip(f"needs node and TEST_NODE_MODULES=FOLDER/node_modules: npm install {PACKAGES}")
    return folder


@pytest.fixture
def described(tmp_path: Path) -> Path:
    path = tmp_path / "descriptors.bin"
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}", "--include_imports"]
    subprocess.run([*command, f"--descriptor_set_out={path}", "quire/inference/v1/inference.proto"], check=True)
    return path


async def test_browser_clients(described: Path, tmp_path: Path) -> None:
    found = packages()
    async with tool_server(tool_model_folder(tmp_path / "talking"), "It is sunny.") as (frontend, _, _script):
        status, out, err = await answered(
            "env", f"NODE_PATH={found}", "node", str(PROGRAM), str(described), frontend.url
        )
    assert status == 0, err
    results = json.loads(out)
    assert results.pop("grpc-web package") == {"text": "It is sunny."}
    assert len(results) == 6
    for name, one in results.items():
        assert (one["models"], one["text"]) == (["talking"], "It is sunny."), name
        assert one["unary"] == [
            "NotFound",
            "The model `other` does not exist; available: talking.",
            ["google.rpc.BadRequest"],
        ], name
        assert one["stream"][0] == "InvalidArgument", name
