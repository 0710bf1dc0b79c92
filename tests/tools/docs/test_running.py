"""Runs the `bash` and `python` blocks of the README and the pages against one cluster of `quire up`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image, ImageDraw

from tests.tools.docs.blocks import FRAGMENTS, ROOT, Block, blocks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
RUN = [block for block in blocks("bash", "python") if block.page not in FRAGMENTS]
START_S, BLOCK_S = 120, 120
DEFAULTS = {"127.0.0.1:8000": "http", "127.0.0.1:50051": "grpc"}
CURL = 'curl() { command curl --fail-with-body --silent --show-error "$@"; echo; }\n'


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Addresses of a cluster of `quire up` with the bundled model, by the names of its `ready` line."""
    errors = tmp_path_factory.mktemp("cluster") / "errors"
    command = [sys.executable, "-m", "quire", "up", "--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    with (
        errors.open("w") as log,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True) as up,
    ):
        try:
            assert up.stdout is not None
            words = up.stdout.readline().split()
            assert words[:2] == ["quire", "ready"], errors.read_text()
            yield dict(word.split("=", 1) for word in words[2:])
        finally:
            up.send_signal(signal.SIGTERM)
            up.wait(START_S)


def draw_picture(path: Path) -> None:
    """Draws the picture that blocks send: a word in black on white."""
    picture = Image.new("RGB", (96, 96), "white")
    ImageDraw.Draw(picture).text((20, 30), "cat", fill="black", font_size=32)
    picture.save(path)


@pytest.mark.parametrize("block", RUN, ids=lambda block: block.name)
def test_the_block_runs(block: Block, addresses: dict[str, str], tmp_path: Path) -> None:
    text = block.text
    for default, name in DEFAULTS.items():
        text = text.replace(default, addresses[name])
    script = tmp_path / f"block.{block.language}"
    draw_picture(tmp_path / "picture.png")
    script.write_text(CURL + text if block.language == "bash" else text)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{environment['PATH']}", "PYTHONPATH": str(ROOT)}
    environment["QUIRE_ADDRESS"] = addresses["grpc"]
    program = ["bash", "-euo", "pipefail"] if block.language == "bash" else [sys.executable]
    command = [*program, str(script)]
    ended = subprocess.run(
        command, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=BLOCK_S
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.strip(), "a block shows something"
