"""Properties that all services of a cluster must agree on: the model, the block layout and others.

The first service to connect sets them; later ones must match. An error names both sides.
"""

from __future__ import annotations

from quire.shared import worker_limits
from quire.shared.columns import u32
from quire.shared.errors import FailedPrecondition
from quire.shared.kv import block_hash, kv_wire
from quire.shared.kv.block_hash import TOKEN_BYTES
from quire.shared.kv.kv_specs import KVSpec
from quire.shared.models import adapter_ids, model_identity
from quire.shared.pb.common.v1 import model_pb2
from quire.shared.pb.worker.v1 import worker_pb2
from quire.shared.structured_output.backends import LLGUIDANCE

# Upper bounds; larger values are a mistake or an attack. A block costs the scheduler 120 bytes and 0.1 us when a worker
# attaches.
MAX_BLOCKS = worker_limits.MAX_BLOCKS
MAX_SEQS = 2**16
MAX_STEP_TOKENS = 2**24
MAX_MODEL_LEN = 2**27
MAX_DRAFTS = 256
MAX_BLOCK_SIZE = 2**16
MAX_VOCABULARY = 2**24
MAX_QUERY_VECTORS = 2**32

RAW_LOGPROBS = "raw_logprobs"  # the default, also of workers that do not send a mode


class ClusterTerms:
    """Agreed properties; fixed once, kept for the scheduler's lifetime, even while no worker is attached."""

    def __init__(self) -> None:
        self.model: model_pb2.ModelIdentity | None = None
        self.layout: model_pb2.BlockLayout | None = None
        self.kv_specs: tuple[KVSpec, ...] | None = None
        self.logprobs_mode = ""
        self.grammar_libraries: tuple[str, ...] = ()  # libraries that all workers so far have had
        self.batch_invariant: bool | None = None
        self.adapters: dict[str, bytes] | None = (
            None  # digests by name, ascending; only where workers cannot load adapters at run time
        )
        self.loads_adapters: bool | None = None
        self._set_by = ""
        self._weights, self._weights_of = b"", ""

    @property
    def model_name(self) -> str:
        return self.model.name if self.model is not None else ""

    def agree_on_model(self, model: model_pb2.ModelIdentity, service: str) -> None:
        """Fixes the model, or raises FailedPrecondition if it differs from that of the first service. `service`:
        name of the connecting one."""
        if self.model is None:
            self.model, self._set_by = model, service
            return
        first_service = f"{service}, when it connected first," if service == self._set_by else self._set_by
        problem = model_identity.mismatch(self.model, model, first_service, service)
        if problem:
            raise FailedPrecondition(problem, field="model")

    def agree_on_weights(self, hello: worker_pb2.WorkerHello, *, in_use: bool) -> bool:
        """Checks the weights that a worker starts with by their digest. While none of the agreed weights are
        `in_use`, others may replace them; returns whether they do. Otherwise raises FailedPrecondition for other
        weights."""
        digest, worker = hello.weights_state.weights_digest, f"worker {hello.worker_id}"
        has_changed = bool(digest and self._weights) and digest != self._weights
        if has_changed and in_use:
            raise FailedPrecondition(
                f"weights: {worker} has {digest.hex()[:12]}, {self._weights_of} has {self._weights.hex()[:12]}, under "
                "the same config.json: replace them in all workers at once (quire weights), or first stop the workers "
                "with the other weights",
                field="weights",
            )
        if digest:
            self._weights, self._weights_of = digest, worker
        return has_changed

    def agree_on_layout(self, hello: worker_pb2.WorkerHello) -> None:
        """Fixes the block size. Raises FailedPrecondition if a worker's block size or hash scheme differs."""
        layout = hello.layout
        if layout.hash_scheme != block_hash.SCHEME:
            raise FailedPrecondition(
                f"layout.hash_scheme: the scheduler has {block_hash.SCHEME!r}, worker {hello.worker_id} has "
                f"{layout.hash_scheme!r}",
                field="layout.hash_scheme",
            )
        if self.layout is None:
            self.layout = layout
        elif layout.block_size != self.layout.block_size:
            raise FailedPrecondition(
                f"layout.block_size: the cluster has {self.layout.block_size}, worker {hello.worker_id} has "
                f"{layout.block_size}",
                field="layout.block_size",
            )

    def agree_on_groups(self, hello: worker_pb2.WorkerHello) -> tuple[KVSpec, ...]:
        """Checks and returns the KV groups: the meaning of a block, and the prefixes that can be reused, must be the
        same on every worker. The first worker determines them. Raises FailedPrecondition if this one has others."""
        worker = f"worker {hello.worker_id}"
        specs = kv_wire.from_proto(hello.kv_cache.groups, worker)
        _check_held_groups(hello, len(specs), worker)
        self.kv_specs = self.kv_specs or specs
        if specs != self.kv_specs:
            raise FailedPrecondition(
                f"kv_groups: the cluster has {_list(self.kv_specs)}, {worker} has {_list(specs)}", field="kv_groups"
            )
        return specs

    def agree_on_logprobs(self, hello: worker_pb2.WorkerHello) -> None:
        """Checks the log-probability mode: a sequence that moves must not continue with values of another meaning."""
        mode = hello.sampling.logprobs_mode or RAW_LOGPROBS
        self.logprobs_mode = self.logprobs_mode or mode
        if mode != self.logprobs_mode:
            raise FailedPrecondition(
                f"logprobs_mode: the cluster has {self.logprobs_mode}, worker {hello.worker_id} has {mode}",
                field="logprobs_mode",
            )

    def agree_on_grammars(self, hello: worker_pb2.WorkerHello) -> None:
        """Reduces the grammar libraries to those common to all workers, so that any worker can run an accepted
        constraint; raises FailedPrecondition if none is left."""
        worker_libraries = tuple(hello.sampling.structured_output_backends) or (LLGUIDANCE,)
        common = tuple(name for name in self.grammar_libraries or worker_libraries if name in worker_libraries)
        if not common:
            raise FailedPrecondition(
                f"structured_output_backends: the cluster has {', '.join(self.grammar_libraries)}, worker "
                f"{hello.worker_id} has {', '.join(worker_libraries)}",
                field="structured_output_backends",
            )
        self.grammar_libraries = common

    def agree_on_invariance(self, hello: worker_pb2.WorkerHello) -> None:
        """Checks batch invariance: bitwise reproducible results must not depend on the worker."""
        if self.batch_invariant is None:
            self.batch_invariant = hello.sampling.batch_invariant
        if hello.sampling.batch_invariant != self.batch_invariant:
            raise FailedPrecondition(
                f"batch_invariant: the cluster has {_on(self.batch_invariant)}, worker {hello.worker_id} has "
                f"{_on(hello.sampling.batch_invariant)}",
                field="batch_invariant",
            )

    def agree_on_adapters(self, hello: worker_pb2.WorkerHello) -> None:
        """Checks that a name means the same adapter on every worker. Sequences are only placed where their adapter
        is."""
        loads = hello.lora.max_adapters > 0
        self.loads_adapters = loads if self.loads_adapters is None else self.loads_adapters
        if loads != self.loads_adapters:
            raise FailedPrecondition(
                f"lora_folders: adapters can be loaded while the cluster runs: {_on(self.loads_adapters)}; into worker "
                f"{hello.worker_id}: {_on(loads)}",
                field="lora_folders",
            )
        if loads:
            return
        digests = _adapters(hello)
        adapters = {name: digests[name] for name in sorted(digests)}
        agreed = self.adapters or {}
        changed = [name for name in adapters if adapters[name] != agreed.get(name, adapters[name])]
        if changed:
            name = changed[0]
            raise FailedPrecondition(
                f"adapters: {name!r} has another content: the cluster has {agreed[name].hex()[:12]}, worker "
                f"{hello.worker_id} has {adapters[name].hex()[:12]}; start all workers with the same files",
                field="adapters",
            )
        # Workers may have fewer or more: a worker skips adapters whose file is damaged, and it may be the first to
        # attach.
        self.adapters = dict(sorted({**agreed, **adapters}.items()))


def _list(specs: tuple[KVSpec, ...]) -> str:
    return f"[{', '.join(map(str, specs))}]"


def _on(value: bool) -> str:
    return "on" if value else "off"


MAX_PROCESSORS = 256
MAX_LIBRARIES = 16  # grammar libraries
MAX_ADAPTERS = 256
MAX_NAME_LENGTH = 256  # characters of ids, addresses and devices
MAX_PATH_LENGTH = 4096
LAYOUT_BYTES = DIGEST_BYTES = 32
MAX_BLOCK_BYTES = 2**32


def check_sizes(hello: worker_pb2.WorkerHello) -> None:
    """Checks a worker's hello against minimum and maximum values: a value that is too large would cost every sequence's
    time. Raises FailedPrecondition with the field, its value and the limit."""
    limits, cache = hello.limits, hello.kv_cache
    bounds = {
        "num_blocks": (cache.num_blocks, 2, MAX_BLOCKS),
        "max_num_seqs": (limits.max_num_seqs, 1, MAX_SEQS),
        "max_num_batched_tokens": (limits.max_num_batched_tokens, limits.max_num_seqs, MAX_STEP_TOKENS),
        "max_model_len": (limits.max_model_len, 2, MAX_MODEL_LEN),
        "num_speculative_tokens": (hello.drafting.num_speculative_tokens, 0, MAX_DRAFTS),
        "num_host_blocks": (cache.num_host_blocks, 0, MAX_BLOCKS),
        "num_disk_blocks": (cache.num_disk_blocks, 0, MAX_BLOCKS),
        "max_adapters": (hello.lora.max_adapters, 0, MAX_ADAPTERS),
        "num_query_vectors": (cache.num_query_vectors, 0, MAX_QUERY_VECTORS),
        "max_logprobs": (hello.sampling.max_logprobs, 0, MAX_VOCABULARY),
        "layout.block_size": (hello.layout.block_size, 1, MAX_BLOCK_SIZE),
    }
    check_name("worker_id", hello.worker_id)
    service = f"worker {hello.worker_id}"
    for name, (value, minimum, maximum) in bounds.items():
        if value < minimum:
            raise FailedPrecondition(f"{name}: {service} has {value}, needs at least {minimum}", field=name)
        if value > maximum:
            raise FailedPrecondition(f"{name}: {service} has {value}, the limit is {maximum}", field=name)
    check_model(hello.model, service)
    if len(hello.weights_state.weights_digest) not in (0, DIGEST_BYTES):
        num_bytes = len(hello.weights_state.weights_digest)
        text = f"weights_digest: {service} sent {num_bytes} bytes; {DIGEST_BYTES} are a digest"
        raise FailedPrecondition(text, field="weights_digest")
    names = {
        "address": hello.address,
        "version": hello.version,
        "device": hello.device,
        "kv_address": hello.kv_transfer.address,
    }
    for name, text in names.items():
        check_name(name, text, needed=False)
    if len(hello.sampling.logits_processors) > MAX_PROCESSORS:
        text = (
            f"logits_processors: {service} has {len(hello.sampling.logits_processors)}, the limit is {MAX_PROCESSORS}"
        )
        raise FailedPrecondition(text, field="logits_processors")
    for name in hello.sampling.logits_processors:
        check_name("logits_processors", name)
    if len(hello.sampling.structured_output_backends) > MAX_LIBRARIES:
        text = f"structured_output_backends: {service} has {len(hello.sampling.structured_output_backends)}"
        raise FailedPrecondition(f"{text}, the limit is {MAX_LIBRARIES}", field="structured_output_backends")
    for name in hello.sampling.structured_output_backends:
        check_name("structured_output_backends", name)
    if len(hello.lora.names) > MAX_ADAPTERS:
        text = f"adapters: {service} has {len(hello.lora.names)}, the limit is {MAX_ADAPTERS}"
        raise FailedPrecondition(text, field="adapters")
    for name in hello.lora.names:
        check_name("adapters", name)
    _adapters(hello)
    _check_paths(hello, service)
    _check_kv(hello, service)
    _check_held(hello, service)


def _check_kv(hello: worker_pb2.WorkerHello, service: str) -> None:
    """Raises FailedPrecondition if the worker's KV transfer layout is no digest, or does not go with a valid block
    size in bytes."""
    num_bytes, size = len(hello.kv_transfer.layout), hello.kv_transfer.block_bytes
    if num_bytes not in (0, LAYOUT_BYTES) or (num_bytes > 0) != (0 < size <= MAX_BLOCK_BYTES):
        text = f"kv_layout: {service} sent {num_bytes} bytes, for blocks of {size}; {LAYOUT_BYTES} are a layout"
        raise FailedPrecondition(text, field="kv_layout")


def check_model(model: model_pb2.ModelIdentity, service: str) -> None:
    """Checks the fields of a model identity; the first service to connect fixes the model. Raises
    FailedPrecondition."""
    for name in ("name", "fingerprint"):
        check_name(f"model.{name}", getattr(model, name), needed=False)
    if not 1 <= model.vocab_size <= MAX_VOCABULARY:
        limit = f"the limit is {MAX_VOCABULARY}" if model.vocab_size else "needs at least 1"
        raise FailedPrecondition(
            f"model.vocab_size: {service} has {model.vocab_size}, {limit}", field="model.vocab_size"
        )


def _adapters(hello: worker_pb2.WorkerHello) -> dict[str, bytes]:
    """Returns the digests of the worker's adapters by name. Raises FailedPrecondition if the digests do not match
    the names."""
    try:
        return adapter_ids.digests_by_name(hello.lora.names, hello.lora.digests)
    except ValueError as error:
        text = f"adapter_digests: worker {hello.worker_id} sent {error}"
        raise FailedPrecondition(text, field="adapter_digests") from None


def _check_paths(hello: worker_pb2.WorkerHello, service: str) -> None:
    """Raises FailedPrecondition unless the hello has one path for each adapter, or none, all of valid length."""
    paths = hello.lora.paths
    if len(paths) not in (0, len(hello.lora.names)) or max(map(len, paths), default=0) > MAX_PATH_LENGTH:
        text = f"adapter_paths: {service} sent {len(paths)} for {len(hello.lora.names)} adapters, or an invalid one"
        raise FailedPrecondition(text, field="adapter_paths")


def check_name(field: str, value: str, *, needed: bool = True) -> None:
    """Raises FailedPrecondition if `value` is longer than MAX_NAME_LENGTH characters, or is empty although `needed`.
    Any other text is a valid name."""
    if (needed and not value) or len(value) > MAX_NAME_LENGTH:
        shown = f"{value[:40]!r} ({len(value)} characters)"
        raise FailedPrecondition(f"{field}: {shown} is not a name of 1 to {MAX_NAME_LENGTH} characters", field=field)


def _check_held(hello: worker_pb2.WorkerHello, service: str) -> None:
    """Checks the columns of the blocks that a worker kept on the device, in host memory and on disk. Raises
    FailedPrecondition."""
    blocks = range(1, hello.kv_cache.num_blocks)
    _check_ids("held_block_ids", hello.held.block_ids, hello.held.block_hashes, blocks, f"{service}'s blocks")
    places = range(hello.kv_cache.num_host_blocks)
    _check_ids("held_place_ids", hello.held.host_place_ids, hello.held.host_place_hashes, places, f"{service}'s places")
    places, on_disk = range(hello.kv_cache.num_disk_blocks), f"{service}'s places on disk"
    _check_ids("held_disk_place_ids", hello.held.disk_place_ids, hello.held.disk_place_hashes, places, on_disk)


def _check_ids(field: str, ids: bytes, hashes: bytes, valid: range, what: str) -> None:
    """Raises FailedPrecondition unless `ids` (u32 column) and `hashes` have equally many entries, not more than
    `valid` has, and all ids lie in it."""
    num_held = len(ids) // TOKEN_BYTES
    if len(ids) % TOKEN_BYTES or len(hashes) != block_hash.HASH_BYTES * num_held or num_held > len(valid):
        raise FailedPrecondition(
            f"{field}: {len(ids)} bytes of ids and {len(hashes)} of hashes do not fit {what}, {len(valid)}",
            field=field,
        )
    sent = u32(ids)
    if len(sent) and not valid.start <= int(sent.min()) <= int(sent.max()) < valid.stop:
        raise FailedPrecondition(
            f"{field}: {what} are {valid.start} to {valid.stop - 1}, and {sent.min()} to {sent.max()} were sent",
            field=field,
        )


def _check_held_groups(hello: worker_pb2.WorkerHello, num_groups: int, service: str) -> None:
    """Checks the group columns of kept blocks against the worker's number of KV groups. Raises FailedPrecondition."""
    _check_groups("held_block_groups", hello.held.block_groups, hello.held.block_ids, num_groups, service)
    _check_groups("held_place_groups", hello.held.host_place_groups, hello.held.host_place_ids, num_groups, service)
    _check_groups(
        "held_disk_place_groups", hello.held.disk_place_groups, hello.held.disk_place_ids, num_groups, service
    )


def _check_groups(field: str, column: bytes, ids: bytes, num_groups: int, service: str) -> None:
    """Raises FailedPrecondition unless `column` (u32) is empty or has a KV group below `num_groups` for each of
    `ids`."""
    num_held = len(ids) // TOKEN_BYTES
    if len(column) not in (0, TOKEN_BYTES * num_held):
        raise FailedPrecondition(f"{field}: {service} sent {len(column)} bytes for {num_held} blocks", field=field)
    groups = u32(column)
    if len(groups) and int(groups.max()) >= num_groups:
        raise FailedPrecondition(f"{field}: {service} has {num_groups} groups, and sent {groups.max()}", field=field)
