"""Prometheus and Grafana: their files are consistent with each other, compose and Kubernetes."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from quire.services.frontend.access.api_key import ApiKey
from quire.shared.settings import SERVICES
from quire.shared.settings.connection_limits import ConnectionLimits
from tests.deploy import kustomize
from tests.deploy.paths import COMPOSE, GRAFANA, K8S, PROMETHEUS
from tests.metrics.catalogue import families

DASHBOARDS = sorted((GRAFANA / "dashboards").glob("*.json"))
HOME = GRAFANA / "dashboards" / "quire.json"
RUNBOOKS = K8S.parent / "docs" / "operations" / "runbooks.md"
PROMTOOL = shutil.which("promtool")
COLUMNS = 24


@pytest.fixture(scope="module", params=DASHBOARDS, ids=lambda path: path.stem)
def dashboard(request: pytest.FixtureRequest) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(request.param.read_text())
    return document


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return document


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    "arguments",
    [["check", "rules", "rules.yml"], ["test", "rules", "rules.test.yml"], ["check", "config", "compose.yml"]],
)
def test_promtool_agrees(arguments: list[str]) -> None:
    done = subprocess.run([str(PROMTOOL), *arguments], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_in_which_it_fires() -> None:
    rules = yaml.safe_load((PROMETHEUS / "rules.yml").read_text())
    cases = yaml.safe_load((PROMETHEUS / "rules.test.yml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    checks = [check for case in cases["tests"] for check in case["alert_rule_test"]]
    assert alerts == {check["alertname"] for check in checks if check.get("exp_alerts")}
    assert alerts == {check["alertname"] for check in checks if not check.get("exp_alerts")}


def test_every_alert_leads_to_its_runbook_and_no_runbook_is_left_over() -> None:
    rules = [
        rule for group in yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"] for rule in group["rules"]
    ]
    parts = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", RUNBOOKS.read_text(), re.MULTILINE | re.DOTALL))
    assert list(parts) == [rule["alert"] for rule in rules]
    for rule in rules:
        assert rule["annotations"]["runbook"] == f"docs/operations/runbooks.md#{rule['alert'].lower()}"
        assert re.findall(r"^\*\*(\w+)\*\*", parts[rule["alert"]], re.MULTILINE) == ["Means", "Look", "Do"], rule[
            "alert"
        ]


def test_runbooks_name_panels_and_settings_that_there_are() -> None:
    text = RUNBOOKS.read_text()
    titles = {panel["title"] for path in DASHBOARDS for panel in json.loads(path.read_text())["panels"]}
    assert set(re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", text)) <= titles
    known = {name for settings in SERVICES.values() for name in settings.model_fields} | set(ApiKey.model_fields)
    known |= {limit.name for limit in dataclasses.fields(ConnectionLimits)}
    series = {name for family in families() for name in family.series}
    words = {re.split(r"[ :>]", name)[0] for name in re.findall(r"`([a-z_]+(?:[ :>][^`]*)?)`", text)}
    assert {word for word in words if "_" in word} <= known | series | {"step_deadline"}


@pytest.mark.parametrize("name", ["compose.yml", "kubernetes.yml"])
def test_prometheus_loads_the_rules(name: str) -> None:
    assert yaml.safe_load((PROMETHEUS / name).read_text())["rule_files"] == ["rules.yml"]


def test_jobs_have_one_name_everywhere() -> None:
    """Rules and dashboards select by job."""
    jobs = {job["job_name"] for job in yaml.safe_load((PROMETHEUS / "compose.yml").read_text())["scrape_configs"]}
    roles = {job.removeprefix("quire-") for job in jobs}
    (job,) = yaml.safe_load((PROMETHEUS / "kubernetes.yml").read_text())["scrape_configs"]
    assert {"target_label": "job", "replacement": "quire-$1"}.items() <= job["relabel_configs"][2].items()
    kept = re.compile(job["relabel_configs"][0]["regex"])
    for resource in kustomize.build(K8S / "overlays/cpu-demo"):
        if resource["kind"] == "Deployment":
            labels = resource["spec"]["template"]["metadata"]["labels"]
            if labels["app.kubernetes.io/name"] == "quire":
                role = labels["app.kubernetes.io/component"]
                (container,) = resource["spec"]["template"]["spec"]["containers"]
                names = [port["name"] for port in container["ports"]]
                assert role in roles
                assert len([name for name in names if kept.fullmatch(f"{role};{name}")]) == 1


def test_grafana_finds_its_dashboard_in_compose_and_kubernetes(compose: dict[str, Any]) -> None:
    provider = yaml.safe_load((GRAFANA / "provisioning/dashboards/quire.yml").read_text())["providers"][0]
    mounts = dict(mount.split(":")[:2] for mount in compose["services"]["grafana"]["volumes"])
    assert mounts["./k8s/observability/grafana/dashboards"] == provider["options"]["path"]
    assert mounts["./k8s/observability/grafana/provisioning"] == "/etc/grafana/provisioning"
    home = f"{provider['options']['path']}/{HOME.name}"
    assert compose["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == home
    (container,) = [
        c for c in kustomize.containers(kustomize.build(K8S / "overlays/cpu-demo")) if c["name"] == "grafana"
    ]
    in_kubernetes = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert in_kubernetes["dashboards"] == provider["options"]["path"]
    assert in_kubernetes["provisioning"] == "/etc/grafana/provisioning"
    assert {"name": "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH", "value": home} in container["env"]


def test_panels_ask_the_provisioned_data_source(dashboard: dict[str, Any]) -> None:
    (source,) = yaml.safe_load((GRAFANA / "provisioning/datasources/quire.yml").read_text())["datasources"]
    expected = {"type": source["type"], "uid": source["uid"]}
    for panel in dashboard["panels"]:
        assert panel["type"] == "row" or panel["datasource"] == expected
    assert all(variable["datasource"] == expected for variable in dashboard["templating"]["list"])


def test_dashboards_are_what_their_program_makes() -> None:
    program = runpy.run_path(str(GRAFANA / "dashboard"))
    made = {each.name: program["document"](each) for each in program["DASHBOARDS"]}
    found = {path.stem: json.loads(path.read_text()) for path in DASHBOARDS}
    assert made == found, "run python k8s/observability/grafana/dashboard"


def test_every_row_stands_in_one_dashboard_at_least() -> None:
    program = runpy.run_path(str(GRAFANA / "dashboard"))
    assert set(program["ROWS"]) == {row for each in program["DASHBOARDS"] for row in each.rows}


def test_kubernetes_gets_every_dashboard() -> None:
    maps = yaml.safe_load((GRAFANA / "kustomization.yaml").read_text())["configMapGenerator"]
    (files,) = [each["files"] for each in maps if each["name"] == "grafana-dashboards"]
    assert files == [f"dashboards/{path.name}" for path in DASHBOARDS]


def test_dashboards_link_to_each_other_by_a_tag_that_all_have(dashboard: dict[str, Any]) -> None:
    (link,) = dashboard["links"]
    assert set(link["tags"]) <= set(dashboard["tags"])


def test_panels_have_ids_and_places_of_their_own(dashboard: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= COLUMNS
        taken |= cells


def test_the_overview_has_the_panels_that_people_know_from_vllm() -> None:
    dashboard = json.loads(HOME.read_text())
    known = {
        "E2E Request Latency", "Token Throughput", "Inter Token Latency", "Scheduler State",
        "Time To First Token Latency", "Cache Utilization", "Request Prompt Length", "Request Generation Length",
        "Finish Reason", "Queue Time", "Requests Prefill and Decode Time", "Max Generation Token in Sequence Group",
    }  # fmt: skip
    assert known <= {panel["title"] for panel in dashboard["panels"]}
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["model_name"]
