"""Generates shared/pb from protos/quire and protos/dialects: `python -m quire.protos.generate` (make protos).

The Python modules lie at shared/pb/<area>/v1/, not under a package named
`quire`, which is the project's public face, and at shared/pb/dialects/.
Imports in the generated code are rewritten to match; names on the wire and in descriptors are untouched.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
OUT = ROOT / "shared" / "pb"
DIALECTS = "dialects"  # protocols of others: names and numbers are theirs
OWN_IMPORT = re.compile(rf"^(from|import) (?:quire\.|(?={DIALECTS} ))", re.MULTILINE)


def generate(out: Path) -> None:
    sources = sorted(str(p.relative_to(PROTOS)) for p in PROTOS.rglob("*.proto"))
    well_known = str(resources.files("grpc_tools") / "_proto")
    args = ["protoc", f"-I{PROTOS}", f"-I{well_known}"]
    args += [f"--{kind}={out}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    if protoc.main(args + sources) != 0:
        sys.exit("protos: protoc failed")


def publish(generated: Path, out: Path) -> None:
    """Moves quire/<area>/v1 to out/<area>/v1, and dialects to out, with imports that fit, replacing what was there."""
    for area in [*sorted(p for p in (generated / "quire").iterdir() if p.is_dir()), generated / DIALECTS]:
        target = out / area.name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(area, target)
        for module in target.rglob("*.py*"):
            module.write_text(OWN_IMPORT.sub(r"\1 quire.shared.pb.", module.read_text()))
        for folder in (target, *(p for p in target.rglob("*") if p.is_dir())):
            (folder / "__init__.py").touch()


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        publish(Path(scratch), OUT)


if __name__ == "__main__":
    main()
