"""Generates the dashboards: `python k8s/observability/grafana/dashboard` writes dashboards/*.json.

A dashboard is a list of rows, whose titles are the same in all dashboards; a row is a list of panels from left to
right; a panel has a title, queries and a description.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import memory_rows
import redis_rows
import requests_rows
import service_rows
import step_rows
import tenant_rows
import time_rows
import worker_rows
from panels import SOURCE

FOLDER = Path(__file__).parent.parent / "dashboards"
COLUMNS = 24
VARIABLE = "label_values(vllm:prompt_tokens_total, model_name)"
TAG = "quire"
ROWS = (
    requests_rows.ROWS
    | time_rows.ROWS
    | step_rows.ROWS
    | memory_rows.ROWS
    | worker_rows.ROWS
    | service_rows.ROWS
    | redis_rows.ROWS
    | tenant_rows.ROWS
)


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard file."""

    name: str
    title: str
    text: str
    rows: Sequence[str]


DASHBOARDS = (
    Dashboard(
        "quire",
        "Quire: overview",
        "Requests as clients see them, and what happens when parts die.",
        ("Now", "Requests, as clients see them", "Parts that die, leave or are full"),
    ),
    Dashboard(
        "quire-request",
        "Quire: a request's time",
        "Which part of a request is slow, hop by hop.",
        ("Where a request's time goes", "Until a token is back", "Frontends", "Resumable streams", "Batches"),
    ),
    Dashboard(
        "quire-scheduler",
        "Quire: scheduler and KV",
        "Steps, KV blocks, what is found again, and drafts.",
        (
            "Where a step's time goes",
            "What waits",
            "KV blocks and prefix cache",
            "KV in host memory",
            "KV on disk",
            "KV from worker to worker",
            "Speculative decoding",
            "Adapters and weights",
        ),
    ),
    Dashboard(
        "quire-workers",
        "Quire: workers and GPU",
        "What devices do with their time, and the processes of all services.",
        ("Workers, now", "What the devices do", "Tokens and masks", "Pictures", "Sound", "Experts", "Processes"),
    ),
    Dashboard(
        "quire-redis",
        "Quire: Redis",
        "The prefix index that schedulers share.",
        ("Redis, now", "The prefix index"),
    ),
    Dashboard(
        "quire-tenants",
        "Quire: tenants",
        "Who asks for what, and gets it when.",
        ("Tenants, now", "What they ask for", "What they get"),
    ),
)


def document(dashboard: Dashboard) -> dict[str, Any]:
    return {
        "uid": dashboard.name,
        "title": dashboard.title,
        "description": dashboard.text,
        "tags": [TAG, "llm"],
        "links": [_others()],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "5s",
        "timezone": "browser",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {"list": [_variable()]},
        "annotations": {"list": [_alerts()]},
        "panels": _panels(dashboard.rows),
    }


def _others() -> dict[str, Any]:
    """Returns links to the other dashboards that keep time range and model."""
    return {
        "type": "dashboards",
        "tags": [TAG],
        "title": "Quire",
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
    }


def _variable() -> dict[str, Any]:
    return {
        "name": "model_name",
        "label": "Model",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": VARIABLE, "refId": "model_name"},
        "definition": VARIABLE,
        "refresh": 2,
        "sort": 1,
        "multi": False,
        "includeAll": False,
    }


def _alerts() -> dict[str, Any]:
    return {
        "name": "Alerts",
        "datasource": SOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": 'ALERTS{alertname=~"Quire.*", alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "step": "15s",
    }


def _panels(rows: Sequence[str]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    y = 0
    for title in rows:
        panels, place = ROWS[title], {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        made.append(
            {"id": len(made) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        )
        x, y = 0, y + 1
        for panel in panels:
            if x + panel.width > COLUMNS:
                x, y = 0, y + panel.height
            made.append(panel.as_json(len(made) + 1, x, y))
            x += panel.width
        y += panels[-1].height
    return made


if __name__ == "__main__":
    for each in DASHBOARDS:
        (FOLDER / f"{each.name}.json").write_text(json.dumps(document(each), indent=1) + "\n")
