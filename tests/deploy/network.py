"""Evaluates NetworkPolicies for the fields used in k8s/; any other field is an error.

The rules are those of the Kubernetes documentation: a pod that no policy selects for a direction is open in it;
otherwise a connection must be allowed by a rule at its source (egress) and at its target (ingress).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.deploy.kustomize import Resource

NAMESPACE_NAME = "kubernetes.io/metadata.name"  # a label that Kubernetes gives to every namespace


class Unsupported(Exception):
    """A field or form that is not supported here."""


@dataclass(frozen=True)
class Pod:
    """One end of a connection."""

    name: str
    namespace: str
    labels: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)  # by name


@dataclass(frozen=True)
class Network:
    """All policies of one cluster."""

    policies: tuple[Resource, ...]

    def allows(self, source: Pod, target: Pod, port: int, protocol: str = "TCP") -> bool:
        return self._lets(source, target, port, protocol, "Egress") and self._lets(
            target, source, port, protocol, "Ingress"
        )

    def _lets(self, own: Pod, other: Pod, port: int, protocol: str, direction: str) -> bool:
        """Whether the policies of `own` allow the connection; the port is always the target's."""
        rules_at, peers_at = ("egress", "to") if direction == "Egress" else ("ingress", "from")
        target = other if direction == "Egress" else own
        selecting = [p for p in self.policies if self._selects(p, own) and direction in p["spec"]["policyTypes"]]
        rules = [rule for policy in selecting for rule in policy["spec"].get(rules_at, [])]
        return not selecting or any(
            _is_peer(rule.get(peers_at), other, own.namespace) and _is_port(rule.get("ports"), target, port, protocol)
            for rule in (_only(rule, {peers_at, "ports"}) for rule in rules)
        )

    def _selects(self, policy: Resource, pod: Pod) -> bool:
        _only(policy["spec"], {"podSelector", "policyTypes", "ingress", "egress"})
        return policy["metadata"]["namespace"] == pod.namespace and matches(policy["spec"]["podSelector"], pod.labels)

    def selecting(self, pod: Pod) -> list[str]:
        """Returns the names of the policies that apply to a pod."""
        return [policy["metadata"]["name"] for policy in self.policies if self._selects(policy, pod)]


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a selector matches; an empty selector matches everything."""
    _only(selector, {"matchLabels", "matchExpressions"})
    if not selector.get("matchLabels", {}).items() <= labels.items():
        return False
    for expression in selector.get("matchExpressions", []):
        if expression["operator"] != "In":
            raise Unsupported(expression["operator"])
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return True


def _is_peer(peers: Iterable[Mapping[str, Any]] | None, other: Pod, namespace: str) -> bool:
    """Whether a rule's peers match; without peers it applies to all; without a namespace selector a peer is in the
    policy's namespace."""
    if peers is None:
        return True
    for peer in peers:
        _only(peer, {"podSelector", "namespaceSelector"})
        if "namespaceSelector" in peer:
            is_there = matches(peer["namespaceSelector"], {NAMESPACE_NAME: other.namespace})
        else:
            is_there = other.namespace == namespace
        if is_there and matches(peer.get("podSelector", {}), other.labels):
            return True
    return False


def _is_port(ports: Iterable[Mapping[str, Any]] | None, target: Pod, port: int, protocol: str) -> bool:
    if ports is None:
        return True
    for entry in ports:
        _only(entry, {"port", "protocol"})
        number = target.ports.get(entry["port"]) if isinstance(entry["port"], str) else entry["port"]
        if number == port and entry.get("protocol", "TCP") == protocol:
            return True
    return False


def _only(mapping: Mapping[str, Any], known: set[str]) -> Mapping[str, Any]:
    if unknown := set(mapping) - known:
        raise Unsupported(", ".join(sorted(unknown)))
    return mapping
