"""k8s/make-secrets.sh, against a kubectl that keeps what it is given in a folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from quire.shared.security.secret_file import SecretFile
from tests.deploy.paths import ROOT

KUBECTL = """#!/bin/sh
echo "$*" >>"$KEPT.calls"
for last; do :; done
case "$*" in
  *" get secret trust"*) test -d "$KEPT" ;;
  *" create secret generic trust "*) cp -r "${last#--from-file=}" "$KEPT" ;;
esac
"""


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the script wants openssl")
def test_secrets_are_made_once_and_are_what_services_want(tmp_path: Path) -> None:
    program, kept = tmp_path / "kubectl", tmp_path / "kept"
    program.write_text(KUBECTL)
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "KEPT": str(kept)}
    command = ["bash", str(ROOT / "k8s/make-secrets.sh"), "elsewhere"]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    made = {path.name: path.read_text() for path in kept.iterdir()}
    assert made["redis.conf"] == f"requirepass {made['redis-password']}"
    for name in ("cluster-secret", "redis-password"):
        (kept / name).chmod(0o600)
        assert len(SecretFile(str(kept / name), name).first) == 64
    subprocess.run(command, env=environment, check=True, capture_output=True)
    assert {path.name: path.read_text() for path in kept.iterdir()} == made, "nothing changes"
    calls = (tmp_path / "kept.calls").read_text()
    assert calls.count(" create ") == 1
    assert "-n elsewhere" in calls
    assert not any(secret.strip() in calls for secret in made.values()), "none is on a command line"
