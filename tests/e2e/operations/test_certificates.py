"""The certificate recipe of SECURITY.md, executed as it stands."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.e2e.operations.test_guide import ROOT, typed, with_free_ports

BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
MISSING = [program for program in ("bash", "curl", "openssl") if shutil.which(program) is None]


@pytest.mark.slow
@pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
def test_certificates_of_the_recipe_are_taken_by_services_and_clients(tmp_path: Path) -> None:
    (recipe,) = BLOCK.findall((ROOT / "docs" / "operations" / "security.md").read_text())
    printed = typed(with_free_ports(recipe), tmp_path)
    assert re.search(r"ok +client_tls +run/certs/service.pem matches its key", printed)
    assert "FAIL" not in printed
    assert '"id":"quire-tiny"' in printed
    assert re.search(r"^68$", printed, re.MULTILINE)
    refused = r"^quire: localhost:\d+ requires TLS; name the certificates to trust with --tls ca=FILE"
    assert re.search(refused, printed, re.MULTILINE)
