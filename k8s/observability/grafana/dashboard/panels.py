"""Panels: queries, appearance, and their JSON form."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

MODEL = '{model_name="$model_name"}'  # selector of most metrics; written {MODEL} in queries
EVERYTHING = ""
SOURCE = {"type": "prometheus", "uid": "prometheus"}


@dataclass(frozen=True, slots=True)
class Query:
    """One query with its legend."""

    expression: str
    legend: str
    form: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of a dashboard."""

    kind: str
    title: str
    queries: Sequence[Query]
    width: int
    height: int
    options: dict[str, Any]
    defaults: dict[str, Any]
    text: str = ""
    unit: str = "short"

    def as_json(self, number: int, x: int, y: int) -> dict[str, Any]:
        targets = []
        for letter, query in zip("ABCDEFGH", self.queries, strict=False):
            expression = query.expression.replace("{MODEL}", MODEL)
            target = {"refId": letter, "expr": expression, "legendFormat": query.legend}
            targets.append({**target, "format": query.form} if query.form else target)
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.text,
            "datasource": SOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "targets": targets,
            "fieldConfig": {"defaults": {"unit": self.unit, **self.defaults}, "overrides": []},
            "options": self.options,
        }


def quantiles(metric: str, *shares: float, selector: str = "{MODEL}") -> Iterable[Query]:
    """Returns queries for quantiles of a histogram."""
    for share in shares:
        rate = f"rate({metric}_bucket{selector}[$__rate_interval])"
        yield Query(f"histogram_quantile({share}, sum by (le) ({rate}))", f"P{share * 100:.0f}")


def average(metric: str, selector: str = "{MODEL}") -> Query:
    """Returns a query for the mean of a histogram."""
    total, count = (f"sum(rate({metric}_{part}{selector}[$__rate_interval]))" for part in ("sum", "count"))
    return Query(f"{total} / {count}", "average")


def stat(
    title: str,
    queries: Sequence[Query],
    text: str = "",
    unit: str = "short",
    red_below: float | None = None,
    red_from: float | None = None,
) -> Panel:
    """Returns a panel with a single number."""
    steps: list[dict[str, Any]] = [{"color": "green" if red_below is None else "red", "value": None}]
    if red_below is not None:
        steps.append({"color": "green", "value": red_below})
    if red_from is not None:
        steps.append({"color": "red", "value": red_from})
    options = {
        "colorMode": "value",
        "graphMode": "area",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }
    defaults = {"thresholds": {"mode": "absolute", "steps": steps}}
    return Panel("stat", title, queries, 4, 4, options, defaults, text, unit)


def curves(
    title: str,
    queries: Sequence[Query],
    text: str = "",
    unit: str = "short",
    highest: float | None = None,
    stacked: bool = False,
) -> Panel:
    """Returns a panel with curves over time."""
    options = {
        "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    custom: dict[str, Any] = {"fillOpacity": 40 if stacked else 5, "showPoints": "never"}
    if stacked:
        custom["stacking"] = {"mode": "normal"}
    bounds: dict[str, Any] = {"min": 0} if highest is None else {"min": 0, "max": highest}
    return Panel("timeseries", title, queries, 8, 8, options, {**bounds, "custom": custom}, text, unit)


def heatmap(title: str, queries: Sequence[Query], text: str = "") -> Panel:
    """Returns a heatmap of a histogram's buckets over time."""
    color = {"mode": "scheme", "scheme": "Spectral", "steps": 64, "scale": "exponential", "exponent": 0.5}
    options = {
        "calculate": False,
        "yAxis": {"unit": "short"},
        "color": {**color, "reverse": False},
        "cellGap": 1,
        "tooltip": {"mode": "single", "yHistogram": True},
        "legend": {"show": False},
    }
    shown = [Query(query.expression, query.legend, "heatmap") for query in queries]
    return Panel("heatmap", title, shown, 8, 8, options, {}, text)
