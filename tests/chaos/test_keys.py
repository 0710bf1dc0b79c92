"""Certificates, secrets and keys that become invalid while streams are open, and valid again."""

from __future__ import annotations

import datetime
import json
import os
import signal
import ssl
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import trustme

from quire.cluster import Cluster
from quire.shared.security import secret_file
from tests.chaos.conftest import SCHEDULER, WORKER, Said
from tests.chaos.paused_processes import keep_fault
from tests.chaos.test_workers import assert_survives, pid
from tests.e2e.conftest import running_cluster
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)

PAST = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
RIGHT, WRONG = "r" * 40, "w" * 40
KEY = "sk-chaos"
ROLES = ("scheduler", "worker", "frontend")
WITHOUT_S = 3.0  # that something is wrong


@dataclass
class StoredRequest:
    """A cluster with TLS, secrets and keys, all in separate files per service."""

    cluster: Cluster
    folder: Path
    authority: trustme.CA

    def certify(self, role: str, *, expired: bool = False) -> dict[str, str]:
        return certify(self.folder, self.authority, role, expired=expired)

    def secret(self, role: str, value: str) -> None:
        secret_file.write(self.folder / f"{role}.secret", value)

    def page(self, address: str) -> str:
        """Reads a metrics page, which requires a client certificate."""
        context = ssl.create_default_context(cafile=self.folder / "frontend.ca")
        context.load_cert_chain(self.folder / "frontend.cert", self.folder / "frontend.key")
        return httpx.get(f"https://{address}/metrics", verify=context).text

    async def assert_survives(self, undisturbed: dict[str, Said], fault: Callable[[], object]) -> None:
        await assert_survives(self.cluster, undisturbed, fault, page=self.page)

    async def restarted(self, name: str) -> None:
        """Kills a service and waits until its process has been restarted, ready or not."""
        process = self.cluster.process(name)
        before = process.restarts
        os.kill(pid(self.cluster, name), signal.SIGKILL)
        await eventually(lambda: process.restarts != before)


def certify(folder: Path, authority: trustme.CA, role: str, *, expired: bool = False) -> dict[str, str]:
    issued = authority.issue_cert("127.0.0.1", "localhost", not_after=PAST if expired else None)
    paths = {kind: folder / f"{role}.{kind}" for kind in ("cert", "key", "ca")}
    paths["cert"].write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(paths["key"])
    authority.cert_pem.write_to_path(paths["ca"])
    return {**{kind: str(path) for kind, path in paths.items()}, "clients": "require"}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoredRequest]:
    authority, keys = trustme.CA(), tmp_path / "keys.yaml"
    write_keys(keys)
    settings: dict[str, dict[str, object]] = {}
    for role in ROLES:
        secret_file.write(tmp_path / f"{role}.secret", RIGHT)
        trust = {"cluster_secret_file": tmp_path / f"{role}.secret", "tls": certify(tmp_path, authority, role)}
        settings[role] = dict(trust)
    settings["worker"] |= WORKER
    settings["scheduler"] |= SCHEDULER
    settings["frontend"] |= {"api_keys": keys, "unavailable_after_s": 120}
    monkeypatch.setenv("QUIRE_API_KEY", KEY)
    with running_cluster(**settings) as cluster:
        yield StoredRequest(cluster, tmp_path, authority)


def write_keys(path: Path) -> None:
    secret_file.write(path, json.dumps({"keys": [{"name": "chaos", "key": KEY}]}))


async def status_with(kept: StoredRequest, key: str) -> int:
    async with httpx.AsyncClient(base_url=f"http://{kept.cluster.http_address}", timeout=60) as client:
        return (await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code


@pytest.mark.parametrize("name", ["scheduler-0", "worker-0"])
@pytest.mark.slow
async def test_a_certificate_that_has_expired_is_a_pause_until_there_is_another(
    kept: StoredRequest, undisturbed: dict[str, Said], name: str
) -> None:
    """Open connections continue; after a restart the service is rejected until its certificate is renewed."""

    async def expire_and_renew() -> None:
        role = name.partition("-")[0]
        kept.certify(role, expired=True)
        await keep_fault(0.5)
        await kept.restarted(name)
        await keep_fault(WITHOUT_S)
        kept.certify(role)

    await kept.assert_survives(undisturbed, expire_and_renew)


@pytest.mark.slow
async def test_certificates_of_another_authority_take_over(kept: StoredRequest, undisturbed: dict[str, Said]) -> None:
    """All certificates are replaced one by one between two restarts; services without common trust retry meanwhile."""

    async def renew() -> None:
        kept.authority = trustme.CA()
        for role in ROLES:
            kept.certify(role)
        await kept.restarted("scheduler-0")

    await kept.assert_survives(undisturbed, renew)


@pytest.mark.slow
async def test_wrong_secret_after_a_restart_is_a_pause_until_corrected(
    kept: StoredRequest, undisturbed: dict[str, Said]
) -> None:
    async def exchange() -> None:
        kept.secret("scheduler", WRONG)
        await kept.restarted("scheduler-0")
        await keep_fault(WITHOUT_S)
        kept.secret("scheduler", RIGHT)

    await kept.assert_survives(undisturbed, exchange)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["torn", "removed"])
async def test_corrupt_or_missing_key_files_keep_the_old_ones_in_force(
    kept: StoredRequest, undisturbed: dict[str, Said], how: str
) -> None:
    """Keys, secrets and certificates at once; a worker that starts meanwhile attaches when they are restored."""
    files = [path for path in kept.folder.iterdir() if path.suffix in {".key", ".cert", ".secret", ".yaml"}]

    async def spoil_and_restore() -> None:
        contents = {path: path.read_bytes() for path in files}
        for path, content in contents.items():
            if how == "torn":
                path.write_bytes(content[: 20 if path.suffix == ".secret" else len(content) // 2])
            else:
                path.unlink()
        assert await status_with(kept, KEY) == 200
        assert await status_with(kept, "sk-other") == 401
        await kept.restarted("worker-0")
        await keep_fault(WITHOUT_S)
        for path, content in contents.items():
            path.write_bytes(content)
            path.chmod(0o600)

    await kept.assert_survives(undisturbed, spoil_and_restore)
    assert await status_with(kept, KEY) == 200
