"""One class name has one meaning in the whole tree."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACES = ("quire", "services", "shared", "kernels", "tools")

TWICE = {  # the same concept in two places
    "BeamSearch": "as users write it, and as a request has it",
    "RepetitionDetection": "as users write it, and as a request has it",
    "Histogram": "as it is counted, and as it is read back",
    "EagleHead": "while it is trained, and while it drafts",
    "MedusaHeads": "while they are trained, and while they draft",
    "Sequence": "at its frontend, and at its scheduler",
    "LateQuery": "at its frontend, and at its scheduler",
    "Outbox": "at either end of a frontend's session",
    "Link": "at either end of a frontend's session",
    "Replica": "at its scheduler, and at its worker",
    "Admission": "as the scheduler's core plans it, and as its worker has it",
    "StepPlan": "as the scheduler's core plans it, and as its worker has it",
    "MediaItem": "as the scheduler's core counts it, and as its worker places it",
    "StepResult": "as a worker found it, and as the scheduler's core takes it in",
    "WeightsGroups": "at the scheduler, and at its workers",
    "Launch": "what the replica knows of it, and the runner's",
    "SharedPrefixes": "as attention takes them, and as its kernel does",
    "PackedWeight": "for CPUs, and for GPUs",
}


def homes() -> dict[str, list[str]]:
    """Returns the files that define each public class name."""
    found = defaultdict(list)
    for place in PLACES:
        for path in sorted((ROOT / place).rglob("*.py")):
            if path.is_relative_to(ROOT / "shared/pb"):
                continue  # generated from the protos
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(path.relative_to(ROOT).as_posix())
    return found


def test_a_class_has_a_name_of_its_own() -> None:
    doubled = {name: files for name, files in homes().items() if len(files) > 1}
    assert {name: files for name, files in doubled.items() if name not in TWICE} == {}
    assert {name for name, files in doubled.items() if len(files) == 2} == set(TWICE), "in two files each"
