"""Dashboards, rules and autoscaling use only metrics that the services report."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
import yaml

from tests.deploy import kustomize
from tests.deploy.paths import GRAFANA, K8S, PROMETHEUS
from tests.metrics import promql
from tests.metrics.catalogue import families

DASHBOARDS = [json.loads(path.read_text()) for path in sorted((GRAFANA / "dashboards").glob("*.json"))]
# Made by Prometheus: of a target, and of its own.
OF_TARGETS = {"instance", "job", "le", "namespace"}
OF_PROMETHEUS = {"up": set[str](), "ALERTS": {"alertname", "alertstate"}}


def expressions() -> Iterator[tuple[str, str]]:
    """Returns (place, expression) pairs."""
    for dashboard in DASHBOARDS:
        for panel in dashboard["panels"]:
            for target in panel.get("targets", []):
                yield panel["title"], promql.expanded(target["expr"])
        for variable in dashboard["templating"]["list"]:
            yield variable["name"], re.fullmatch(r"label_values\((.*), \w+\)", variable["query"]["query"])[1]  # type: ignore[index]
        for annotation in dashboard["annotations"]["list"]:
            yield annotation["name"], annotation["expr"]
    for group in yaml.safe_load((PROMETHEUS / "rules.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for resource in kustomize.build(K8S / "overlays/gpu-to-zero"):
        if resource["kind"] == "ScaledObject":
            for trigger in resource["spec"]["triggers"]:
                yield "autoscaling", trigger["metadata"]["query"]


EXPRESSIONS = list(dict.fromkeys(expressions()))
SERIES = {series: set(family.labels) for family in families() for series in family.series}
each = pytest.mark.parametrize(("where", "expression"), EXPRESSIONS, ids=[where for where, _ in EXPRESSIONS])


@each
def test_asks_for_metrics_that_exist(where: str, expression: str) -> None:
    assert promql.metrics(expression) <= set(SERIES) | set(OF_PROMETHEUS)


@each
def test_asks_for_labels_that_its_metrics_have(where: str, expression: str) -> None:
    known = OF_TARGETS.union(*({**SERIES, **OF_PROMETHEUS}[name] for name in promql.metrics(expression)))
    assert promql.labels(expression) <= known


@each
def test_is_promql(where: str, expression: str) -> None:
    parser = pytest.importorskip("promql_parser")
    found: set[str] = set()

    def visit(node: object) -> bool:
        if isinstance(node, parser.VectorSelector):
            found.add(node.name)
        return True

    parser.walk(parser.parse(expression), pre_visit=visit)
    assert found == promql.metrics(expression)


def test_reads_names_and_labels_of_an_expression() -> None:
    expression = (
        'sum by (le, a) (rate(x:y_total{b="c{}"}[5m] offset 1h)) / on (d) group_left z{e=~"f"} unless vector(0)'
    )
    assert promql.metrics(expression) == {"x:y_total", "z"}
    assert promql.labels(expression) == {"le", "a", "b", "d", "e"}


def test_legends_name_labels_that_the_query_keeps() -> None:
    for panel in (panel for dashboard in DASHBOARDS for panel in dashboard["panels"]):
        for target in panel.get("targets", []):
            wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            kept = promql.labels(target["expr"])
            if not re.search(r"\b(sum|count|histogram_quantile)\b", target["expr"]):
                kept |= OF_TARGETS.union(*(SERIES[name] for name in promql.metrics(promql.expanded(target["expr"]))))
            assert wanted <= kept, panel["title"]
