"""Runs `sh` blocks of pages, which need another model than the bundled one, against a cluster that serves it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.tools.docs.blocks import blocks

AUDIO, PICTURES = "docs/models/audio.md", "docs/serving/pictures.md"
DEFAULT = "127.0.0.1:8000"
BLOCK_S = 120


def output_of(path: str, base_url: str, folder: Path, page: str = AUDIO) -> str:
    """Returns the output of the block of a page that calls the URL with this path. `folder`: contains the files that it
    sends."""
    (block,) = (block for block in blocks("sh") if block.page == page and path in block.text)
    script = block.text.replace(f"http://{DEFAULT}", base_url).replace("curl ", "curl -sS --fail-with-body ")
    command = ["bash", "-euo", "pipefail", "-c", script]
    ended = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=BLOCK_S)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
