"""Runs the `sh` blocks of docs/models/audio.md against a cluster that takes sound."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.tools.docs.blocks import blocks

PAGE = "docs/models/audio.md"
DEFAULT = "127.0.0.1:8000"
BLOCK_S = 120


def output_of(path: str, base_url: str, folder: Path) -> str:
    """Returns the output of the block that calls the URL with this path. `folder`: contains the files that it sends."""
    (block,) = (block for block in blocks("sh") if block.page == PAGE and path in block.text)
    script = block.text.replace(f"http://{DEFAULT}", base_url).replace("curl ", "curl -sS --fail-with-body ")
    command = ["bash", "-euo", "pipefail", "-c", script]
    ended = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=BLOCK_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
