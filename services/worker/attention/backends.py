"""The table of attention backends, and the choice among them."""

from __future__ import annotations

import importlib

from services.worker.attention.port import AttentionBackend, AttentionSpec
from shared.errors import InvalidArgument
from shared.logs import logger

log = logger("worker.attention")

AUTO = "auto"

# Best first; imported when considered.
BACKENDS = {
    "cpu": "services.worker.attention.cpu:CpuAttention",
    "reference": "services.worker.attention.reference:ReferenceAttention",
}


def choose_attention(name: str, spec: AttentionSpec) -> AttentionBackend:
    """The backend called `name`, or with "auto" the first that does not refuse `spec`."""
    if name == AUTO:
        return _first_that_can(spec)
    if name not in BACKENDS:
        raise InvalidArgument(
            f"attention_backend: {name!r} does not exist; there are {AUTO}, {', '.join(BACKENDS)}",
            field="attention_backend",
        )
    backend = _load(name)
    reason = backend.reject_reason(spec)
    if reason:
        raise InvalidArgument(f"attention_backend: {name} cannot serve this model: {reason}", field="attention_backend")
    return backend


def _first_that_can(spec: AttentionSpec) -> AttentionBackend:
    refusals: dict[str, str] = {}
    for name in BACKENDS:
        backend = _load(name)
        reason = backend.reject_reason(spec)
        if reason is None:
            log.info("attention backend", chosen=name, refused=refusals or "none")
            return backend
        refusals[name] = reason
    raise AssertionError("the reference refuses nothing")


def _load(name: str) -> AttentionBackend:
    module, _, attribute = BACKENDS[name].partition(":")
    backend: AttentionBackend = getattr(importlib.import_module(module), attribute)()
    return backend
