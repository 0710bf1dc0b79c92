"""The table of attention backends, and the choice among them."""

from __future__ import annotations

from dataclasses import replace

from quire.kernels.capability import SM90
from quire.services.worker.attention.per_phase import PerPhaseAttention
from quire.services.worker.attention.port import (
    AheadBackend,
    AttentionBackend,
    AttentionSpec,
    LatentBackend,
    TreeBackend,
)
from quire.shared import plugins
from quire.shared.errors import FailedPrecondition, InvalidArgument
from quire.shared.logs import logger

log = logger("worker.attention")

AUTO = "auto"

GROUP = "quire.attention_backends"

# Imported lazily. Backends of plugins are selected by name only.
BACKENDS = {
    "cpu": "quire.services.worker.attention.cpu:CpuAttention",
    "flash_attn": "quire.services.worker.attention.flash_attn:FlashAttention",
    "flash_attn_2": "quire.services.worker.attention.flash_attn_2:FlashAttention2",
    "triton": "quire.services.worker.attention.triton:TritonAttention",
    "batch_invariant": "quire.services.worker.attention.batch_invariant:BatchInvariantAttention",
    "reference": "quire.services.worker.attention.reference:ReferenceAttention",
}

# Best first, by measurement (docs/design/worker.md).
DECODE_ORDER = ("cpu", "triton", "flash_attn_2", "reference")
CHUNK_ORDER = ("cpu", "flash_attn", "triton", "flash_attn_2", "reference")
CHUNK_ORDER_BEFORE_HOPPER = ("cpu", "flash_attn_2", "triton", "reference")  # chunks; not measured
BATCH_INVARIANT_ORDER = (
    "cpu",
    "batch_invariant",
)  # batch-invariant backends

# Block size for block_size=0, for backends that do not support the device's default or are slower with it.
BLOCK_SIZES = {"flash_attn": 128, "flash_attn_2": 256}


def choose_attention(name: str, spec: AttentionSpec) -> AttentionBackend:
    """Returns the backend called `name`; "auto" selects the fastest backend for each phase that accepts `spec`.

    Raises InvalidArgument for an unknown name and for a backend that rejects `spec`.
    """
    if name == AUTO:
        return _best(spec)
    known = plugins.known(GROUP, BACKENDS)
    if name not in known:
        raise InvalidArgument(
            f"attention_backend: {name!r} does not exist; available: {AUTO}, {', '.join(known)}",
            field="attention_backend",
        )
    if spec.batch_invariant and name not in BATCH_INVARIANT_ORDER:
        raise InvalidArgument(
            f"attention_backend: results of {name} depend on the other rows of a batch; with batch_invariant use "
            f"{AUTO}, "
            f"{', '.join(BATCH_INVARIANT_ORDER)}",
            field="attention_backend",
        )
    backend = load_backend(name)
    reason = reject_reason_of(backend, spec)
    if reason:
        raise InvalidArgument(
            f"attention_backend: {name} does not support this model: {reason}", field="attention_backend"
        )
    return backend


def _best(spec: AttentionSpec) -> AttentionBackend:
    """Returns the fastest backend that accepts `spec`, or a pair if decodes and chunks differ; logs the choice and the
    refusals.

    Raises FailedPrecondition if all refuse.
    """
    refusals: dict[str, str] = {}
    usable: dict[str, AttentionBackend] = {}
    for_decodes, for_chunks = _candidates(spec)
    causal = replace(spec, sees_ahead=False)
    decodes = _first_accepting(for_decodes, causal, usable, refusals)
    chunks = _first_accepting(for_chunks, causal, usable, refusals)
    log.info("attention backends", decodes=decodes, chunks=chunks, refused=refusals or "none")
    ahead = _for_pictures(spec, usable[chunks])
    if decodes == chunks and ahead is None:
        return usable[decodes]
    return PerPhaseAttention(usable[decodes], usable[chunks], ahead)


def _for_pictures(spec: AttentionSpec, chunks: AttentionBackend) -> AttentionBackend | None:
    """Returns the fastest backend for pictures whose tokens see each other, which others than `chunks` may have to
    compute; None: `chunks` computes them, or there are none. Raises FailedPrecondition if all refuse."""
    if not spec.sees_ahead or reject_reason_of(chunks, spec) is None:
        return None
    able: dict[str, AttentionBackend] = {}
    name = _first_accepting(_candidates(spec)[1], spec, able, {})
    log.info("attention backend of pictures", pictures=name)
    return able[name]


def _candidates(spec: AttentionSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the names of the candidates for decodes and for chunks, fastest first, by GPU generation and batch
    invariance."""
    if spec.batch_invariant:
        return BATCH_INVARIANT_ORDER, BATCH_INVARIANT_ORDER
    return DECODE_ORDER, CHUNK_ORDER_BEFORE_HOPPER if spec.capability < SM90 else CHUNK_ORDER


def _first_accepting(
    names: tuple[str, ...], spec: AttentionSpec, usable: dict[str, AttentionBackend], refusals: dict[str, str]
) -> str:
    """Returns the first backend of `names` that accepts `spec`; adds each one loaded to `usable` or, with its reason,
    to `refusals`.

    Raises FailedPrecondition if all refuse, which the reference backend never does.
    """
    for name in names:
        if name not in usable and name not in refusals:
            backend = load_backend(name)
            reason = reject_reason_of(backend, spec)
            if reason is None:
                usable[name] = backend
            else:
                refusals[name] = reason
        if name in usable:
            return name
    reasons = "; ".join(f"{name} {refusals[name]}" for name in names)
    raise FailedPrecondition(f"attention_backend: no backend supports this model: {reasons}", field="attention_backend")


def reject_reason_of(backend: AttentionBackend, spec: AttentionSpec) -> str | None:
    """Returns why `backend` cannot serve `spec`, or None.

    Adds to the backend's own reasons the lack of the extension protocols: latent attention, draft trees, and pictures
    whose tokens see each other.
    """
    if spec.latent_rank and not isinstance(backend, LatentBackend):
        return "does not support latent attention"
    if spec.sees_ahead and not (isinstance(backend, AheadBackend) and backend.sees_ahead):
        return "does not support attention in both directions within pictures"
    if spec.has_trees and not (isinstance(backend, TreeBackend) and backend.masks_trees):
        return "does not support trees of drafts"
    return backend.reject_reason(spec)


def load_backend(name: str) -> AttentionBackend:
    """Imports and instantiates a backend of this project or of a plugin; `name` must be known."""
    backend: AttentionBackend = plugins.load(plugins.known(GROUP, BACKENDS)[name])()
    return backend
