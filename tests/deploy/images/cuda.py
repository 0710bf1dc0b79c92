"""Checks of the GPU image that work without a GPU."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from quire.shared.version import VERSION
from tests.deploy.images import inside_cuda
from tests.deploy.images.builder import WORKER_CUDA, Builder
from tests.deploy.images.cluster import write_secret

NO_GPU = "device: cuda was asked for"
SETTINGS = {"model": "/opt/quire/quire-tiny", "scheduler": "127.0.0.1:1", "cluster_secret_file": "/etc/quire/secret"}
ENDS = 2  # a setting that does not fit


def look(builder: Builder) -> bool:
    """Whether the image has everything that a worker on a GPU needs, checked with its own Python and user."""
    with tempfile.TemporaryDirectory() as scratch, builder.container(WORKER_CUDA) as container:
        files = Path(scratch)
        write_secret(files)
        shutil.copy(inside_cuda.__file__, files / "inside_cuda.py")
        (files / "quire.yaml").write_text(json.dumps({"worker": SETTINGS}))  # JSON is YAML
        inside = builder.call(container, ["python", "/etc/quire/inside_cuda.py"], files=files)
        print(inside.stdout, end="")
        if inside.returncode:
            print(inside.stderr)
        version = builder.call(container, ["quire", "--version"], files=files)
        print(f"quire --version: {version.stdout.strip()}")
        alone = builder.call(container, ["quire", "worker"], files=files)
        print(f"a worker without a GPU ends with {alone.returncode} and says:\n{alone.stderr}", end="")
    said = alone.stderr.splitlines()
    clear = alone.returncode == ENDS and "Traceback" not in alone.stderr and any(NO_GPU in line for line in said)
    return inside.returncode == 0 and VERSION in version.stdout and clear
