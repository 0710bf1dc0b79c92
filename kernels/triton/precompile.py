"""Compiles what a model will call, in several processes, before it is called.

Triton compiles a kernel when it first meets its arguments' types: 20 kernels one after the other are 15 s at the first
start on a machine (later ones find them on disk). Here the same functions are called on tensors of host memory, for the
GPU that is there but without it, and every call stops at the compiled kernel. What this list forgets is compiled when
it is first called, as ever. Triton 3.6 (not 3.9) also calls the C compiler for what passes a kernel's arguments on: 27
times another third of a second, which is done here, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver
from triton.runtime.jit import JITFunction

SOURCES = Path(__file__).parent
ROOT = SOURCES.parents[1]  # of the packages
MOST_PROCESSES = 12
MAJOR, MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*


@dataclass(frozen=True)
class ModelShape:
    """What the kernels of a model depend on."""

    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    qk_norm: bool
    block_size: int
    max_num_seqs: int
    dtype: str  # "bfloat16", ...
    kv_dtype: str
    single_row: bool  # the fused chain is used
    batch_invariant: bool = False  # the kernels of batch_invariant are used


class Precompilation:
    """Processes at work."""

    def __init__(self, processes: list[subprocess.Popen[bytes]], marker: Path | None) -> None:
        self._processes, self._marker = processes, marker

    def wait(self) -> bool:
        """Until they are done; whether there was anything to do. What failed will be compiled where it is called."""
        succeeded = [process.wait() == 0 for process in self._processes]
        if self._marker is not None and all(succeeded):
            with contextlib.suppress(OSError):
                self._marker.touch()
        return bool(succeeded)


def start(shape: ModelShape, num_cores: int) -> Precompilation:
    """Does nothing where there is no GPU, no core to spare, or everything on disk already."""
    capability, count = device_capability(), min(MOST_PROCESSES, num_cores * 3 // 4)
    if capability is None or count < 2:
        return Precompilation([], None)
    try:
        marker = _marker(shape, capability)
    except OSError:  # nothing can be kept on disk
        return Precompilation([], None)
    if marker.exists():
        return Precompilation([], None)
    words = json.dumps({"shape": asdict(shape), "capability": capability, "count": count})
    command = [sys.executable, "-m", "kernels.triton.precompile", words]
    processes = [subprocess.Popen([*command, str(i)], stdin=subprocess.DEVNULL, cwd=ROOT) for i in range(count)]
    return Precompilation(processes, marker)


def device_capability() -> int | None:
    """90 for 9.0; asked of the driver alone, because torch would take memory on the GPU for it."""
    cuda = _cuda()
    if cuda is None:
        return None
    device, major, minor = (ctypes.c_int() for _ in range(3))
    failed = (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), 0)
        or cuda.cuDeviceGetAttribute(ctypes.byref(major), MAJOR, device)
        or cuda.cuDeviceGetAttribute(ctypes.byref(minor), MINOR, device)
    )
    return None if failed else 10 * major.value + minor.value


def _cuda() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _marker(shape: ModelShape, capability: int) -> Path:
    digest = hashlib.sha256(repr((shape, capability, triton.__version__, torch.__version__)).encode())
    for source in sorted(SOURCES.rglob("*.py")):
        digest.update(source.read_bytes())
    folder = Path(triton.knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"quire-{digest.hexdigest()[:32]}.compiled"


class AbsentGpu:
    """Stands for Triton's driver: says what to compile for, and launches nothing."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def compile_share(shape: ModelShape, capability: int, index: int, count: int) -> None:
    """Every count-th job from `index` on; the process is good for nothing else afterwards."""
    driver.set_active(AbsentGpu(capability))
    run, links = JITFunction.run, _cuda() is not None
    builds_launchers = links and hasattr(nvidia, "make_launcher")

    def compile_only(*arguments: Any, **options: Any) -> Any:
        kernel = run(*arguments, **{**options, "warmup": True})
        if builds_launchers:
            _leave_on_disk(lambda: nvidia.CudaLauncher(kernel.src, kernel.metadata))
        return kernel

    JITFunction.run = compile_only
    if links and index == count - 1:  # it has the least to do
        _leave_on_disk(nvidia.CudaUtils)
    for job in list(jobs(shape))[index::count]:
        job()


def _leave_on_disk(build: Callable[[], object]) -> None:
    """What Triton makes with the C compiler. It does so again where it is missing, and then says what is wrong."""
    try:
        build()
    except Exception as error:
        print(f"precompile: {error}", file=sys.stderr)


def jobs(shape: ModelShape) -> Iterator[Callable[[], object]]:
    """Calls, those that take longest first."""
    dtype, kv_dtype = getattr(torch, shape.dtype), getattr(torch, shape.kv_dtype)
    hidden, heads, kv_heads, head_dim = shape.hidden_size, shape.num_q_heads, shape.num_kv_heads, shape.head_dim
    q_size, qkv_size = heads * head_dim, (heads + 2 * kv_heads) * head_dim
    many = shape.max_num_seqs

    def of(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    def ints(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32)

    def module(name: str) -> Any:
        return importlib.import_module(f"kernels.triton.{name}")

    caches = [of(16, shape.block_size, kv_heads, head_dim, dtype=kv_dtype) for _ in range(2)]
    scale, width = head_dim**-0.5, 16
    norm = of(head_dim) if shape.qk_norm else None
    cos_sin = torch.empty(shape.block_size * width, head_dim)
    floats = torch.empty(many)
    keys = torch.zeros(many, dtype=torch.int64), ints(many)
    logits = of(many, shape.vocab_size)

    def decode(rows: int, *, ordered: bool) -> None:
        order = ints(rows) if ordered else None
        module("decode_attention").decode_attention(
            of(rows, heads, head_dim), *caches, ints(rows, width), ints(rows), scale, 0, order
        )

    def shared(rows: int) -> None:
        prefix = module("shared_prefix")
        per_tile = prefix.rows_per_tile(heads, kv_heads)
        tiles = ints(4, per_tile), ints(4), ints(4), ints(rows)
        prefix.shared_prefix_attention(
            of(rows, heads, head_dim),
            *caches,
            ints(rows, width),
            ints(rows),
            prefix.SharedPrefixes(*tiles),
            scale,
            ints(rows),
        )

    def chunk() -> None:
        module("chunk_attention").chunk_attention(
            of(100, heads, head_dim), *caches, ints(2, width), ints(3), ints(2), scale, 0
        )

    def row_attention() -> None:
        module("row_attention").row_attention(
            of(1, qkv_size), norm, norm, 1e-6, cos_sin, ints(1), *caches, ints(1, width), ints(1), heads, scale, 0,
            pdl=capability_has_pdl(),
        )  # fmt: skip

    def row_linear(in_features: int, out_features: int, *, gated: bool = False, added: bool = False) -> None:
        row = module("row_linear")
        weight = importlib.import_module("kernels.reference.linear").LinearWeight(
            of(out_features * (2 if gated else 1), in_features), None
        )
        row.row_linear(
            of(1, in_features),
            weight,
            norm=None if added else row.Norm(of(in_features), 1e-6),
            gated=gated,
            residual=of(1, out_features) if added else None,
            pdl=capability_has_pdl(),
        )

    def sample(rows: int, temperature: bool, filtered: bool = False) -> None:
        filters = (ints(rows), floats[:rows], floats[:rows]) if filtered else (None, None, None)
        rest = keys[0][:rows], keys[1][:rows]
        module("sampling").sample(logits[:rows], floats[:rows] if temperature else None, *filters, *rest)

    def rows() -> None:
        norms = module("rms_norm")
        norms.rms_norm(of(8, hidden), of(hidden), 1e-6)
        norms.add_rms_norm(of(8, hidden), of(8, hidden), of(hidden), 1e-6)
        module("activation").silu_mul(of(8, 2 * shape.intermediate_size))
        edges = module("step_edges")
        edges.begin_step(*(ints(8) for _ in range(5)), ints(8, width))
        edges.end_step(ints(8), ints(8), ints(8))
        module("attention_inputs").qk_norm_rope_store(
            of(8, qkv_size), norm, norm, 1e-6, cos_sin, ints(8), ints(8), *caches, heads, kv_heads
        )

    def masks() -> None:
        words = ints(8, -(-shape.vocab_size // 32))
        full, half, ids = torch.empty(8, shape.vocab_size), of(8, shape.vocab_size), keys[0][:8]
        for chosen in (None, ids):
            for masked, places in ((full, None), (full, ids), (half, ids)):
                module("token_mask").mask_logits(masked, chosen, words, places)

    def invariant_linear(in_features: int, out_features: int) -> None:
        weight = importlib.import_module("kernels.reference.linear").LinearWeight(of(out_features, in_features), None)
        module("batch_invariant").linear(of(2, in_features), weight)

    def invariant_decode(rows: int, *, ordered: bool) -> None:
        module("batch_invariant.attention").decode_attention(
            of(rows, heads, head_dim), *caches, ints(rows, 4096), ints(rows), scale, 0, ints(rows) if ordered else None
        )

    def invariant_chunk() -> None:
        module("batch_invariant").paged_attention(
            of(100, heads, head_dim), *caches, ints(2, width), ints(3), ints(2), scale, 0
        )

    def invariant_choice() -> None:
        module("batch_invariant").sample(logits[:2], None, None, None, None, keys[0][:2], keys[1][:2])
        module("batch_invariant").log_softmax(torch.empty(2, shape.vocab_size))

    if shape.batch_invariant:
        yield invariant_choice
        yield invariant_chunk
        for few_or_many in (2, many):
            yield lambda rows=few_or_many: invariant_decode(rows, ordered=True)
            yield lambda rows=few_or_many: invariant_decode(rows, ordered=False)
        yield rows
        yield masks
        yield lambda: invariant_linear(hidden, qkv_size)
        yield lambda: invariant_linear(q_size, hidden)
        yield lambda: invariant_linear(hidden, 2 * shape.intermediate_size)
        yield lambda: invariant_linear(shape.intermediate_size, hidden)
        yield lambda: invariant_linear(hidden, shape.vocab_size)
        return
    yield lambda: sample(many, True, filtered=True)
    yield rows
    yield masks
    yield lambda: shared(many)
    if shape.single_row:
        yield row_attention
    yield chunk
    yield lambda: decode(many, ordered=True)
    yield lambda: decode(8, ordered=True)
    yield lambda: decode(many, ordered=False)
    yield lambda: decode(2, ordered=False)
    yield lambda: shared(8)
    yield lambda: sample(many, True)
    yield lambda: sample(8, True)
    yield lambda: sample(8, False)
    if shape.single_row:
        yield lambda: row_linear(hidden, qkv_size)
        yield lambda: row_linear(q_size, hidden, added=True)
        yield lambda: row_linear(hidden, shape.intermediate_size, gated=True)
        yield lambda: row_linear(shape.intermediate_size, hidden, added=True)
        yield lambda: row_linear(hidden, shape.vocab_size)


def capability_has_pdl() -> bool:
    return driver.active.get_current_target().arch >= 90


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    compile_share(ModelShape(**asked["shape"]), asked["capability"], int(sys.argv[2]), asked["count"])
