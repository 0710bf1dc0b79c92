"""`quire doctor` on machines with problems."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import trustme

from quire import bundled
from quire.cluster import metrics_ports
from quire.doctor import certificates, cluster
from quire.shared.pb.admin.v1 import admin_pb2 as pb
from quire.shared.security.tls_files import NO_TLS, Tls
from quire.shared.version import VERSION
from tests.e2e.conftest import running_cluster
from tests.ports import quiet_port
from tests.preloaded import command

Found = dict[str, list[dict[str, str]]]
PORTS = ("--http-port", "--grpc-port", "--metrics-port")


def doctor(*arguments: str, path: str = "", without: Sequence[str] = ()) -> tuple[int, Found]:
    """Returns exit status and findings by subject; `without`: packages to treat as not installed."""
    if without:
        hidden = f"sys.modules.update(dict.fromkeys({list(without)!r}))"
        script = f"import sys; {hidden}; from quire.cli.main import main; sys.exit(main(sys.argv[1:]))"
        words = [sys.executable, "-c", script, "doctor", "--json", *arguments]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    else:
        done = command.run("doctor", "--json", *arguments, env={"PATH": path or os.environ["PATH"]})
    assert done.stderr == ""
    answer = json.loads(done.stdout)
    assert answer["ok"] == (done.returncode == 0)
    found: Found = {}
    for finding in answer["findings"]:
        found.setdefault(finding["subject"], []).append(finding)
    return done.returncode, found


def test_a_machine_that_can_serve_is_told_so_in_lines_that_people_read() -> None:
    flags = ("--http-port", str(quiet_port()), "--grpc-port", str(quiet_port()))
    status, found = doctor(*flags)
    assert status == 0, found
    assert found["weights"][0]["level"] == found["model"][0]["level"] == found["http_port"][0]["level"] == "ok"
    assert "ok    weights" in command.run("doctor", *flags).stdout


def test_it_says_in_which_shape_the_chat_template_gets_messages(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bundled.FOLDER, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    _, found = doctor(str(folder))
    assert found["chat template"][0]["found"].startswith("default: messages ")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
    )
    _, found = doctor(str(folder))
    assert "user=parts" in found["chat template"][0]["found"]
    (folder / "chat_template.jinja").write_text("{{ messages | no_such_filter }}")
    _, found = doctor(str(folder))
    assert found["chat template"][0]["level"] == "error"
    assert "chat_template.jinja" in found["chat template"][0]["found"]


def test_where_only_a_frontend_is_installed_it_says_who_looks_at_the_model() -> None:
    """The frontend's image has no worker code."""
    ports = [word for flag in PORTS for word in (flag, str(quiet_port()))]
    status, found = doctor(*ports, without=["quire.services.worker", "quire.kernels"])
    assert status == 0, found
    assert "checks device and model" in found["worker"][0]["found"]
    assert found.keys().isdisjoint({"CPU kernels", "GPU", "model", "weights"})


@pytest.mark.parametrize("flag", PORTS)
def test_a_port_that_is_taken_fails_and_says_which_flag_moves_it(flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = {other: str(quiet_port()) for other in PORTS} | {flag: str(taken.getsockname()[1])}
        status, found = doctor(*(word for pair in ports.items() for word in pair))
    (finding,) = found[flag.removeprefix("--").replace("-", "_")]
    assert status == 1
    assert finding["level"] == "error"
    assert "is in use" in finding["found"]
    assert flag in finding["advice"]


def test_a_running_cluster_is_found_and_its_ports_are_its_own() -> None:
    with running_cluster(worker={"num_blocks": 300}) as running:
        grpc_port, http_port = (address.rsplit(":", 1)[1] for address in (running.grpc_address, running.http_address))
        status, found = doctor("--grpc-port", grpc_port, "--http-port", http_port)
    assert status == 0
    assert "3 services" in found["cluster"][0]["found"]
    assert found["versions"] == [{"subject": "versions", "level": "ok", "found": f"{VERSION} everywhere", "advice": ""}]
    assert "a cluster answers" in found["http_port"][0]["found"]


def test_services_of_another_version_and_those_that_stand_still_are_named() -> None:
    services = [
        pb.ServiceStatus(role=pb.ROLE_FRONTEND, id="frontend-0", state=pb.STATE_READY, version=VERSION),
        pb.ServiceStatus(role=pb.ROLE_WORKER, id="worker-3", state=pb.STATE_STALLED, version="0.0.7"),
    ]
    levels = {
        finding.subject: (finding.level, finding.found)
        for finding in cluster.check(cluster.ClusterAddress("somewhere", NO_TLS), services)
    }
    assert levels["worker-3"] == ("error", "is stalled")
    assert levels["versions"][0] == "warning"
    assert "0.0.7: worker-3" in levels["versions"][1]


def test_a_model_folder_that_lacks_something_is_told_what(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copy(bundled.FOLDER / name, tmp_path)
    status, found = doctor(str(tmp_path))
    assert status == 1
    assert found["model"][0]["level"] == "ok"
    assert found["tokenizer"][0]["level"] == found["weights"][0]["level"] == "error"
    _, found = doctor("/nowhere")
    assert found["model"][0]["found"].startswith("model '/nowhere' does not exist; give the path of a folder")


def test_settings_are_read_as_services_read_them(tmp_path: Path) -> None:
    config = tmp_path / "quire.yaml"
    config.write_text("frontend: {http_prot: 8000}")
    status, found = doctor("--config", str(config))
    assert status == 1
    assert "http_prot" in found["settings"][0]["found"]
    secret = tmp_path / "secret"
    secret.write_text("short")
    config.write_text(f"frontend: {{cluster_secret_file: {secret}, redis: 'redis://127.0.0.1:1'}}")
    status, found = doctor("--config", str(config))
    assert status == 1
    assert found["cluster secret"][0]["level"] == found["redis"][0]["level"] == "error"


def test_a_gpu_is_described_and_its_absence_is_an_error_only_for_who_wants_one(tmp_path: Path) -> None:
    """With a driver's program that says what is written here: what it says on a machine with two GPUs."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho 'NVIDIA H200, 570.124.06, 9.0, 143771, 0, Disabled'\n"
        "echo 'NVIDIA H200, 570.124.06, 9.0, 143771, 90000, Disabled'\n"
    )
    program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    _, found = doctor(path=path)
    assert found["GPU 0"][0]["found"] == "NVIDIA H200, driver 570.124.06, 143771 MiB, compute capability 9.0"
    assert found["GPU 1"][0]["level"] == "warning", "somebody else has most of its memory"
    _, found = doctor("--device", "cuda", "--tensor-parallel-size", "4", path=path)
    assert "times --pipeline-parallel-size times --context-parallel-size must be at most" in found["ranks"][0]["advice"]
    _, found = doctor("--device", "cuda", "--context-parallel-size", "2", path=path)
    assert found["ranks"][0]["found"] == "2 of 2 GPUs for each worker"
    program.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    assert doctor(path=path)[1]["GPU"][0]["level"] == "ok"
    status, found = doctor("--device", "cuda", path=path)
    assert status == 1
    assert "NVIDIA driver" in found["GPU"][0]["advice"]


@pytest.mark.parametrize(("days", "level"), [(365, "ok"), (5, "warning"), (-1, "error")])
def test_certificates_are_dated_and_paired(tmp_path: Path, days: int, level: str) -> None:
    now = datetime.datetime.now(datetime.UTC)
    issued = trustme.CA().issue_cert("localhost", not_after=now + datetime.timedelta(days=days))
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    issued.cert_chain_pems[0].write_to_path(cert)
    issued.private_key_pem.write_to_path(key)
    found = list(certificates.check("client_tls", Tls(cert=str(cert), key=str(key))))
    assert [finding.level for finding in found] == ["ok", level]
    other = tmp_path / "other.pem"
    trustme.CA().issue_cert("localhost").private_key_pem.write_to_path(other)
    first, _ = certificates.check("client_tls", Tls(cert=str(cert), key=str(other)))
    assert first.level == "error"


def test_the_dates_of_a_certificate_are_those_that_openssl_reads(tmp_path: Path) -> None:
    path = tmp_path / "cert.pem"
    end = datetime.datetime(2061, 2, 3, 4, 5, 6, tzinfo=datetime.UTC)  # beyond what two digits of a year can say
    trustme.CA().issue_cert("localhost", not_after=end).cert_chain_pems[0].write_to_path(path)
    begin_s, end_s = certificates.validity(ssl.PEM_cert_to_DER_cert(path.read_text()))
    assert end_s == end.timestamp()
    assert begin_s < end_s


def test_the_port_of_metrics_is_that_of_up_which_takes_another_where_it_is_in_use() -> None:
    ports = ("--http-port", "0", "--grpc-port", str(quiet_port()))
    try:
        taken = socket.create_server(("127.0.0.1", metrics_ports.DEFAULT))
    except OSError:  # another program of this machine has it, which is the case as well
        taken = socket.socket()
    with taken:
        status, found = doctor(*ports)
    (finding,) = found["metrics_port"]
    assert (finding["level"], status) == ("warning", 0)
    assert f"127.0.0.1:{metrics_ports.DEFAULT} is in use" in finding["found"]


def test_a_port_that_may_be_any_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default is another one, and so is that of the environment."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("QUIRE_FRONTEND_HTTP_PORT", str(taken.getsockname()[1]))
        _, found = doctor("--http-port", "0", "--grpc-port", str(quiet_port()))
    assert "http_port" not in found


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_a_cluster_that_was_named_and_does_not_answer_fails(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "variable":
        monkeypatch.setenv("QUIRE_ADDRESS", "127.0.0.1:1")
    status, found = doctor("--http-port", "0", *(("--address", "127.0.0.1:1") if how == "flag" else ()))
    assert status == 1
    assert found["cluster"][0]["level"] == "error"
    assert "nothing answers at 127.0.0.1:1" in found["cluster"][0]["found"]


def test_a_cluster_that_shows_itself_to_its_operator_alone_is_told_from_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_cluster(worker={"num_blocks": 300}) as running:
        address = running.grpc_address
        for variable in ("TMPDIR", "XDG_RUNTIME_DIR"):  # where commands find a frontend's admin service
            monkeypatch.setenv(variable, str(tmp_path))
        _, found = doctor("--http-port", "0", "--address", address)
    assert found["cluster"][0]["level"] == "warning"
    assert "--admin-address and --admin-key-file" in found["cluster"][0]["advice"]


@pytest.mark.parametrize("service", ["frontend", "scheduler", "worker"])
def test_a_secret_that_others_can_read_is_found_for_each_service(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s" * 40)
    secret.chmod(0o644)
    monkeypatch.setenv(f"QUIRE_{service}_CLUSTER_SECRET_FILE".upper(), str(secret))
    status, found = doctor("--http-port", "0", "--grpc-port", str(quiet_port()))
    assert status == 1
    assert found["cluster secret"][0]["level"] == "error"
    secret.chmod(0o600)
    _, found = doctor("--http-port", "0", "--grpc-port", str(quiet_port()))
    assert found["cluster secret"][0]["found"] == f"{secret}, of {service}"


def test_keys_are_read_as_a_frontend_reads_them(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys:\n  - {name: one, key: " + "k" * 40 + "}\n")
    keys.chmod(0o600)
    ports = ("--http-port", "0", "--grpc-port", str(quiet_port()))
    _, found = doctor(*ports, "--api-keys", str(keys))
    assert found["API keys"][0]["found"] == f"1 in {keys}"
    keys.chmod(0o644)
    status, found = doctor(*ports, "--api-keys", str(keys))
    assert (status, found["API keys"][0]["level"]) == (1, "error")
    _, found = doctor(*ports)
    assert found["API keys"][0]["found"].startswith("not configured")
