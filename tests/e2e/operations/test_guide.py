"""Runs the shell blocks of docs/operations/walkthrough.md in order in one shell, all chapters but the first."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import quiet_port

ROOT = Path(__file__).resolve().parents[3]
GUIDE = (ROOT / "docs" / "operations" / "walkthrough.md").read_text()
CHAPTER = re.compile(r"^## \d\. (.*?)$", re.MULTILINE)
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
TYPED = ("bash", "jq", "curl", "openssl", "prometheus")
PATIENCE_S = 900  # half a minute of it is the soak's, more than a minute what a busy machine takes to start services
MISSING = [program for program in TYPED if shutil.which(program) is None]


def chapters() -> dict[str, str]:
    """Commands by the chapter's name."""
    _, *parts = CHAPTER.split(GUIDE)
    return {name: "".join(BLOCK.findall(text)) for name, text in zip(parts[::2], parts[1::2], strict=True)}


def with_free_ports(script: str) -> str:
    """Others than the guide's, each by one of its own, so that nothing on this machine is in the way. Behind a metrics
    port of `quire up` are those of its services, as far as they are free."""
    named = set(re.findall(r"(?:-port |127\.0\.0\.1:)(\d+)", script))
    for port in named:
        script = re.sub(rf"\b{port}\b", str(quiet_port()), script)
    return script


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """As much of a clone as the guide reads; what it writes stays here."""
    for name in ("k8s", "quire"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def typed(script: str, folder: Path) -> str:
    """What it prints; nothing that it started is left. The first command that fails ends it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{environment['PATH']}", "HOME": str(folder)}
    environment["PYTHONPATH"] = str(ROOT)
    told = folder / "told"
    command = ["bash", "-euo", "pipefail", "-c", script]
    with told.open("w") as out:
        shell = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        status = shell.wait(PATIENCE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    printed = told.read_text()
    logs = "".join(f"\n{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(folder.glob("run/*.log")))
    assert status == 0, printed + logs
    return printed


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_S + 60)
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_who_types_what_the_guide_says_gets_what_it_says(folder: Path) -> None:
    written = chapters()
    assert "make demo" in written.pop("A machine")  # a test of its own, tests/e2e/faces/test_demo.py
    script = "".join(f"echo '## {name}'\n{commands}" for name, commands in written.items())
    _, *parts = re.split(r"^## (.*)$", typed(with_free_ports(script), folder), flags=re.MULTILINE)
    told = dict(zip(parts[::2], parts[1::2], strict=True))
    assert told.keys() == written.keys()
    assert re.search(r'"message": "ready",\s+"http": "127.0.0.1:\d+"', told["A cluster"])
    assert told["A cluster"].split()[-3:] == ["SERVING", "68", "68"]
    assert '"prompt_tokens":18,"completion_tokens":3' in told["What it does"]
    assert '"prefill_time_ms"' in told["What it does"]
    for job, count in (("frontend", 1), ("scheduler", 1), ("worker", 2)):
        assert f'["quire-{job}","{count}"]' in told["Monitoring"]
    assert "Once upon a time" in told["When parts die"]
    assert len(re.findall(r"^worker .* ready ", told["When parts die"], re.MULTILINE)) == 2
    assert told["Authentication and TLS"].split()[-3:] == ["401", "200", "42"]
    assert re.search(r"^worker +worker-1 .* ready ", told["Separate services"], re.MULTILINE)
    assert told["Separate services"].split()[-2:] == ["quire-tiny", "68"]
    assert re.search(r"^errors +0$", told["Long runs"], re.MULTILINE)
    assert re.search(r"^unowned_blocks +0$", told["Long runs"], re.MULTILINE)
