"""What can be seen of the image for GPUs where there is none."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from shared.version import VERSION
from tests.deploy.images import inside_cuda
from tests.deploy.images.builder import WORKER_CUDA, Builder

NO_GPU = "device: cuda was asked for"
ENDS = 2  # a setting that does not fit


def look(builder: Builder) -> bool:
    """Whether it has all that a worker on a GPU needs, by its own Python and as its own user."""
    with tempfile.TemporaryDirectory() as scratch, builder.container(WORKER_CUDA) as container:
        files = Path(scratch)
        files.chmod(0o755)
        shutil.copy(inside_cuda.__file__, files / "inside_cuda.py")
        (files / "secret").write_text("of this test alone, and long enough to be one")
        inside = builder.call(container, ["python", "/etc/quire/inside_cuda.py"], files=files)
        print(inside.stdout, end="")
        if inside.returncode:
            print(inside.stderr)
        version = builder.call(container, ["quire", "--version"], files=files)
        print(f"quire --version: {version.stdout.strip()}")
        worker = ["quire", "worker", "--config", "", "--cluster-secret-file", "/etc/quire/secret"]
        alone = builder.call(container, [*worker, "--model", "/opt/quire/quire-tiny"], files=files)
        print(f"a worker without a GPU ends with {alone.returncode} and says:\n{alone.stderr}", end="")
    said = alone.stderr.splitlines()
    clear = alone.returncode == ENDS and "Traceback" not in alone.stderr and any(NO_GPU in line for line in said)
    return inside.returncode == 0 and VERSION in version.stdout and clear
