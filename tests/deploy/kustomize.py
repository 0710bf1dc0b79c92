"""Builds a kustomization like `kubectl kustomize`, for the fields used in k8s/; any other field is an error.

Tests must not require kubectl; where it is installed, a test compares the two.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

Resource = dict[str, Any]

FIELDS = {
    "apiVersion", "kind", "namespace", "resources", "components", "configMapGenerator", "patches", "labels", "images",
    "replicas", "configurations",
}  # fmt: skip
# Of lists that a strategic merge joins by key. All others are replaced.
MERGE_KEYS = {
    "containers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
}
BUILT_IN_GROUPS = ("", "apps", "batch", "policy", "networking.k8s.io", "rbac.authorization.k8s.io")
NOT_NAMESPACED = ("Namespace",)
POD_TEMPLATES = ("leaderTemplate", "workerTemplate")  # of a LeaderWorkerSet
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # that of libyaml takes a tenth of the time
GENERATED = "tests/generated"  # marks a ConfigMap whose name gets the hash of its content


class Unsupported(Exception):
    """A field or form that this builder does not support."""


def build(folder: Path, *components: Path, hashed: bool = True) -> list[Resource]:
    """Returns the resources of a kustomization and additional components; optionally with hashed names of generated
    ConfigMaps and adjusted references."""
    resources = _accumulate(folder, [])
    for component in components:
        _accumulate(component, resources)
    _hash_names(resources, hashed=hashed)
    return resources


def _accumulate(folder: Path, resources: list[Resource]) -> list[Resource]:
    """Adds the contents of `folder` to `resources`, which a component may also change."""
    (document,) = _read((folder / "kustomization.yaml").resolve())
    _only(document, FIELDS, folder)
    for entry in document.get("configurations", []):
        _only(yaml.safe_load((folder / entry).read_text()), {"nameReference"}, entry)
    for entry in document.get("resources", []):
        path = (folder / entry).resolve()
        resources.extend(_accumulate(path, []) if path.is_dir() else _read(path))
    for entry in document.get("components", []):
        _accumulate(folder / entry, resources)
    for generator in document.get("configMapGenerator", []):
        _generate(generator, folder, resources)
    for patch in document.get("patches", []):
        _patch(patch, folder, resources)
    if "namespace" in document:
        _set_namespace(document["namespace"], resources)
    for labels in document.get("labels", []):
        _label(labels, resources)
    for image in document.get("images", []):
        _set_image(image, resources)
    for replicas in document.get("replicas", []):
        _only(replicas, {"name", "count"}, folder)
        _named(resources, "Deployment", replicas["name"])["spec"]["replicas"] = replicas["count"]
    return resources


def _read(path: Path) -> list[Resource]:
    """Reads a YAML file; anchors are copied, because each place is patched separately."""
    return [json.loads(text) for text in _documents(path)]


@cache
def _documents(path: Path) -> tuple[str, ...]:
    """Returns the documents of a file as JSON; each file is parsed once."""
    return tuple(json.dumps(document) for document in yaml.load_all(path.read_text(), LOADER) if document)


def _only(mapping: dict[str, Any], known: set[str], where: object) -> None:
    if unknown := set(mapping) - known:
        raise Unsupported(f"{where}: {', '.join(sorted(unknown))}")


def _named(resources: list[Resource], kind: str, name: str) -> Resource:
    found = [r for r in resources if r["kind"] == kind and r["metadata"]["name"] == name]
    if len(found) != 1:
        raise Unsupported(f"{len(found)} of {kind}/{name}")
    return found[0]


def _generate(generator: dict[str, Any], folder: Path, resources: list[Resource]) -> None:
    _only(generator, {"name", "files", "behavior", "options"}, folder)
    _only(generator.get("options", {}), {"labels"}, folder)
    content = {}
    for entry in generator["files"]:
        key, _, file = entry.rpartition("=")
        path = (folder / file).resolve()
        if folder.resolve() not in path.parents:
            raise Unsupported(f"{path} lies outside {folder}")
        content[key or path.name] = path.read_text()
    if generator.get("behavior", "create") == "replace":
        _named(resources, "ConfigMap", generator["name"])["data"] = content
        return
    metadata: dict[str, Any] = {"name": generator["name"], "annotations": {GENERATED: "yes"}}
    if labels := generator.get("options", {}).get("labels"):
        metadata["labels"] = dict(labels)
    resources.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": content})


def _patch(patch: dict[str, Any], folder: Path, resources: list[Resource]) -> None:
    _only(patch, {"path", "patch", "target"}, folder)
    change = yaml.safe_load((folder / patch["path"]).read_text() if "path" in patch else patch["patch"])
    for resource in _targets(patch.get("target"), change, resources):
        if isinstance(change, list):
            for operation in change:
                _operate(resource, operation)
        elif change["apiVersion"].rpartition("/")[0] not in BUILT_IN_GROUPS:
            raise Unsupported(f"strategic merge of {change['kind']}")
        else:
            _merge(resource, {**change, "metadata": {**change["metadata"], "name": resource["metadata"]["name"]}})


def _targets(target: dict[str, str] | None, change: Any, resources: list[Resource]) -> list[Resource]:
    """Returns the resources that a patch applies to, by its target's name pattern or its own name."""
    if target is None:
        return [_named(resources, change["kind"], change["metadata"]["name"])]
    _only(target, {"group", "version", "kind", "name"}, "target")
    found = [
        resource
        for resource in resources
        if resource["kind"] == target["kind"] and re.fullmatch(target["name"], resource["metadata"]["name"])
    ]
    if not found:
        raise Unsupported(f"a patch of {target['kind']}/{target['name']}, of which there is none")
    return found


def _operate(resource: Resource, operation: dict[str, Any]) -> None:
    """Applies one operation of RFC 6902."""
    *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].split("/")[1:]]
    place: Any = resource
    for part in parents:
        place = place[int(part) if isinstance(place, list) else part]
    key = int(last) if isinstance(place, list) and last != "-" else last
    if operation["op"] == "remove":
        del place[key]
    elif operation["op"] == "add":
        if isinstance(place, list):
            place.insert(len(place) if last == "-" else key, operation["value"])
        else:
            place[key] = operation["value"]
    elif operation["op"] == "replace":
        if isinstance(place, dict) and key not in place:
            raise Unsupported(f"replace of nothing at {operation['path']}")
        place[key] = operation["value"]
    else:
        raise Unsupported(operation["op"])


def _merge(into: dict[str, Any], change: dict[str, Any]) -> None:
    for key, value in change.items():
        if key.startswith("$") or value is None:
            raise Unsupported(f"{key}: {value} in a patch")
        old = into.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            _merge(old, value)
        elif isinstance(old, list) and isinstance(value, list) and key in MERGE_KEYS:
            _merge_list(old, value, MERGE_KEYS[key])
        else:
            into[key] = copy.deepcopy(value)


def _merge_list(into: list[dict[str, Any]], change: list[dict[str, Any]], key: str) -> None:
    by_key = {item[key]: item for item in into}
    for item in change:
        if item[key] in by_key:
            _merge(by_key[item[key]], item)
        else:
            into.append(copy.deepcopy(item))


def _set_namespace(namespace: str, resources: list[Resource]) -> None:
    for resource in resources:
        if resource["kind"] not in NOT_NAMESPACED:
            resource["metadata"]["namespace"] = namespace
        for subject in resource.get("subjects", []):
            subject["namespace"] = namespace


def _label(labels: dict[str, Any], resources: list[Resource]) -> None:
    _only(labels, {"pairs", "includeTemplates"}, "labels")
    for resource in resources:
        places = [resource["metadata"]]
        if labels.get("includeTemplates") and "template" in resource.get("spec", {}):
            places.append(resource["spec"]["template"]["metadata"])
        for metadata in places:
            metadata.setdefault("labels", {}).update(labels["pairs"])


def _set_image(image: dict[str, str], resources: list[Resource]) -> None:
    _only(image, {"name", "newTag"}, "images")
    for container in containers(resources):
        if container["image"].split(":")[0] == image["name"]:
            container["image"] = f"{image['name']}:{image['newTag']}"


def pod_specs(resources: list[Resource]) -> Iterator[dict[str, Any]]:
    for resource in resources:
        for template in pod_templates(resource):
            yield template["spec"]


def pod_templates(resource: Resource) -> list[dict[str, Any]]:
    spec = resource.get("spec", {})
    group = spec.get("leaderWorkerTemplate", {})
    return [
        *([spec["template"]] if "template" in spec else []),
        *(group[name] for name in POD_TEMPLATES if name in group),
    ]


def containers(resources: list[Resource]) -> Iterator[dict[str, Any]]:
    for spec in pod_specs(resources):
        yield from spec["containers"]


def _hash_names(resources: list[Resource], *, hashed: bool) -> None:
    names = {}
    for resource in resources:
        annotations = resource["metadata"].get("annotations", {})
        if annotations.pop(GENERATED, None):
            name = resource["metadata"]["name"]
            suffix = f"-{_suffix(resource['data'])}" if hashed else ""
            names[name] = resource["metadata"]["name"] = f"{name}{suffix}"
            if not annotations:
                del resource["metadata"]["annotations"]
    for spec in pod_specs(resources):
        for volume in spec.get("volumes", []):
            if "configMap" in volume:
                volume["configMap"]["name"] = names[volume["configMap"]["name"]]


def _suffix(content: dict[str, str]) -> str:
    """Returns ten characters of the SHA-256 of the ConfigMap in Go's JSON (kustomize leaves its name empty here)."""
    document = {"data": content, "kind": "ConfigMap", "name": ""}
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    digest = hashlib.sha256(text.encode()).hexdigest()[:10]
    return digest.translate(str.maketrans("013ae", "ghkmt"))
