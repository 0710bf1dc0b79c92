"""Converts the base's objects to templates: values are substituted, and component changes become conditions."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from tests.deploy import kustomize
from tests.deploy.chart import values
from tests.deploy.kustomize import Resource
from tests.deploy.paths import K8S

Key = tuple[str, str]
MARK = "@@"
HASHED_ROLES = ("frontend", "scheduler", "worker", "prefill", "encode")
# What a component builds upon, besides the base; the Deployments of other components are there whenever they may be
# changed.
DEPLOYMENTS = ["roles", "encode-workers"]
BELOW = {
    "roles": [],
    "encode-workers": ["roles"],
    "roles-autoscaling": ["roles", "autoscaling"],
    "scale-to-zero": ["roles", "autoscaling"],
}
VOLUMES = ("kvTiers.diskSize", "kvTiers.memorySize")  # whose sizes a component brings
NAMESPACE = re.compile(r'namespace=(\\?")quire\\?"')  # in the queries of the autoscaler
CHECKSUM = "checksum/settings"


class Template:
    """Template of one object. Marked strings stand for parts that are not YAML before rendering."""

    def __init__(self, resource: Resource, condition: str = "") -> None:
        self._tree = copy.deepcopy(resource)
        self._conditions = [condition] if condition else []
        self._numbers = count()

    def also_with(self, switch: str) -> None:
        """Adds a condition under which another component provides the same object."""
        self._conditions.append(switch)

    def set_value(self, path: str, place: tuple[str | int, ...]) -> None:
        parent = values.at(self._tree, place[:-1])
        key = place[-1]
        if isinstance(parent, dict) and key not in parent:
            self._guard(parent, f"if .Values.{path}", {str(key): _value(path)})
        elif parent is not None:
            parent[key] = _tree_value(path) if isinstance(parent[key], dict) else _value(path)

    def set_settings(self) -> None:
        kind, name = self._tree["kind"], self._tree["metadata"]["name"]
        if (kind, name) == ("ConfigMap", "quire"):
            self._tree["data"] = {"quire.yaml": f"{MARK}block toYaml .Values.{values.SETTINGS}{MARK}"}
        elif kind == "ConfigMap":
            self._tree["data"] = {
                key: f'{MARK}block .Files.Get "files/{name}/{key}"{MARK}' for key in self._tree["data"]
            }
        elif kind == "Deployment" and name in HASHED_ROLES:
            told = {CHECKSUM: f"{MARK}{{{{ toYaml .Values.{values.SETTINGS} | sha256sum | toJson }}}}{MARK}"}
            self._tree["spec"]["template"]["metadata"]["annotations"] = told
        for subject in self._tree.get("subjects", []):
            subject["namespace"] = f"{MARK}{{{{ .Release.Namespace }}}}{MARK}"

    def differ(self, switch: str, before: Any, after: Any) -> None:
        """Makes a change from `before` to `after` conditional."""
        self._differ(switch, self._tree, before, after)

    def _differ(self, switch: str, tree: Any, before: dict[str, Any], after: dict[str, Any]) -> None:
        for key in [*before, *(key for key in after if key not in before)]:
            old, new = before.get(key), after.get(key)
            if old == new or _is_marked(tree.get(key)):
                if old is not None and new is None:
                    self._guard(tree, f"if not .Values.{switch}", {key: tree.pop(key)})
                continue
            if old is None:
                self._guard(tree, f"if .Values.{switch}", {key: new})
            elif isinstance(old, dict) and isinstance(new, dict):
                self._differ(switch, tree[key], old, new)
            elif isinstance(old, list) and isinstance(new, list):
                self._differ_lists(switch, tree[key], old, new)
            else:
                told = f"{{{{ if .Values.{switch} }}}}{_scalar(new)}{{{{ else }}}}{_scalar(old)}{{{{ end }}}}"
                tree[key] = f"{MARK}{told}{MARK}"

    def _differ_lists(self, switch: str, tree: list[Any], before: list[Any], after: list[Any]) -> None:
        for index, (old, new) in enumerate(zip(before, after, strict=False)):
            if old != new:
                self._differ(switch, tree[index], old, new)
        if added := after[len(before) :]:
            tree += [f"{MARK}if .Values.{switch}{MARK}", *added, f"{MARK}end{MARK}"]

    def _guard(self, tree: dict[str, Any], condition: str, added: dict[str, Any]) -> None:
        number = next(self._numbers)
        tree[f"{MARK}{number} {condition}{MARK}"] = None
        tree.update(added)
        tree[f"{MARK}{number} end{MARK}"] = None

    def replace(self, text: str, path: str) -> None:
        """Substitutes a value that occurs in several places."""

        def visit(tree: Any) -> None:
            for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
                if value == text:
                    tree[key] = _value(path)
                elif isinstance(value, dict | list):
                    visit(value)

        visit(self._tree)

    def text(self) -> str:
        dumped = yaml.safe_dump(self._tree, sort_keys=False, width=1000, allow_unicode=True)
        lines = [NAMESPACE.sub(r"namespace=\1{{ .Release.Namespace }}\1", _line(line)) for line in dumped.splitlines()]
        if self._conditions:
            either = " ".join(f".Values.{condition}" for condition in self._conditions)
            either = f"or {either}" if len(self._conditions) > 1 else either
            lines = [f"{{{{- if {either} }}}}", *lines, "{{- end }}"]
        return "\n".join(lines) + "\n"


def _line(line: str) -> str:
    if MARK not in line:
        return line.replace("{{", '{{ "{{" }}')
    directive = re.fullmatch(rf" *(?:- )?'?{MARK}(?:\d+ )?((?:if|end).*?){MARK}'?(?:: null)?", line)
    if directive:
        return f"{{{{- {directive[1]} }}}}"
    indent = len(line) - len(line.lstrip()) + 2 * line.lstrip().startswith("- ")
    line = re.sub(rf"'?{MARK}block (.*?){MARK}'?", lambda m: f"|{{{{ {m[1]} | nindent {indent + 2} }}}}", line)
    line = re.sub(rf" '?{MARK}tree (.*?){MARK}'?", lambda m: f" {{{{- {m[1]} | nindent {indent + 2} }}}}", line)
    return re.sub(rf"'?{MARK}({{{{.*?}}}}){MARK}'?", lambda m: m[1].replace("''", "'"), line)


def _value(path: str) -> str:
    return f"{MARK}{{{{ .Values.{path} | toJson }}}}{MARK}"


def _tree_value(path: str) -> str:
    return f"{MARK}tree toYaml .Values.{path}{MARK}"


def _scalar(value: Any) -> str:
    return json.dumps(value)


def _is_marked(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(MARK)


def all_templates() -> dict[str, str]:
    """Returns the templates by file name."""
    templates: dict[Key, Template] = {}
    known: dict[Key, Resource] = {}
    places: dict[Key, list[tuple[str, tuple[str | int, ...]]]] = {}
    for path, (kind, name, place) in values.PLACES.items():
        places.setdefault((kind, name), []).append((path, place))
    for switch, before, after in _stages():
        for key, resource in after.items():
            if key not in templates:
                templates[key] = known_template = Template(resource, switch)
                known[key] = resource
                for path, place in places.get(key, []):
                    known_template.set_value(path, place)
                known_template.set_settings()
            elif key not in before:
                assert known[key] == resource, f"{key} is another in {switch}"
                templates[key].also_with(switch)
            elif before.get(key) != resource:
                templates[key].differ(switch, before[key], resource)
    address = values.at(known["ScaledObject", "worker"], ("spec", "triggers", 0, "metadata", "serverAddress"))
    for name in ("worker", "prefill"):
        templates["ScaledObject", name].replace(address, values.PROMETHEUS)
    with_volumes = _by_key(kustomize.build(K8S / "base", *_folders(["roles", "kv-tiers"]), hashed=False))
    for path in VOLUMES:
        kind, name, place = values.PLACES[path]
        for deployment in ("worker", "prefill"):
            templates[kind, deployment].replace(values.at(with_volumes[kind, name], place), path)
    return {f"{kind.lower()}-{name}.yaml": template.text() for (kind, name), template in templates.items()}


def _stages() -> Iterator[tuple[str, dict[Key, Resource], dict[Key, Resource]]]:
    """Yields the base, then each component on top of those it builds on: (switch, without it, with it)."""
    base = _by_key(kustomize.build(K8S / "base", hashed=False))
    yield "", {}, base
    for component, switch in values.SWITCHES.items():
        below = BELOW.get(component, DEPLOYMENTS)
        before = _by_key(kustomize.build(K8S / "base", *_folders(below), hashed=False))
        yield switch, before, _by_key(kustomize.build(K8S / "base", *_folders([*below, component]), hashed=False))


def _folders(components: list[str]) -> list[Path]:
    return [K8S / "components" / name for name in components]


def _by_key(resources: list[Resource]) -> dict[Key, Resource]:
    return {(r["kind"], r["metadata"]["name"]): r for r in resources}
