"""Runs `sh` blocks of pages, which need another model than the bundled one, against a cluster that serves it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.tools.docs.blocks import blocks

AUDIO, PICTURES = "docs/models/audio.md", "docs/serving/pictures.md"
TRANSCRIPTION = "docs/serving/transcription.md"
DEFAULT, DEFAULT_GRPC = "127.0.0.1:8000", "127.0.0.1:50051"
BLOCK_S = 120


def output_of(path: str, base_url: str, folder: Path, page: str = AUDIO, grpc: str = DEFAULT_GRPC) -> str:
    """Returns the output of the block of a page that has this text, such as the path of a URL. `folder`: contains the
    files that it sends; `grpc`: HOST:PORT."""
    (block,) = (block for block in blocks("sh") if block.page == page and path in block.text)
    script = block.text.replace(DEFAULT, base_url.removeprefix("http://")).replace(DEFAULT_GRPC, grpc)
    script = script.replace("curl ", "curl -sS --fail-with-body ").replace("python ", f"{sys.executable} ")
    command = ["bash", "-euo", "pipefail", "-c", script]
    ended = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=BLOCK_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
