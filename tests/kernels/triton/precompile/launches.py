"""`python -m tests.kernels.triton.precompile.launches`: kernels compiled ahead for models of several shapes, by GPU
capability, with digests of their compile-time properties. With `--write`, launches.json gets a summary.

Nothing is compiled, and no GPU is needed: Triton reports what it would compile.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

STORED = Path(__file__).with_name("launches.json")
CAPABILITIES = (80, 90, 100)

Launches = dict[str, dict[str, list[str]]]  # by case and kernel: digests


def cases() -> Iterator[tuple[str, Any]]:
    from quire.kernels.routing import Gate, Routing
    from quire.kernels.triton.precompile.shapes import ExpertsShape, LatentShape, ModelShape, PackedShape

    dense = ModelShape(1024, 3072, 16, 8, 128, 32000, True, 16, 64, "bfloat16", "bfloat16", single_row=True)
    plain = replace(dense, qk_norm=False, single_row=False)
    routing = Routing(8)
    mixture = ExpertsShape(64, 768, routing, Gate(), False, False, False, False, single_row=True)
    clamped = replace(mixture, gate=Gate(7.0, 1.702), biased=True, single_row=False)
    grouped = Routing(8, scoring="sigmoid", num_groups=8, top_groups=4, group_top=2, scale=2.5)
    shared = replace(mixture, routing=grouped, score_correction_bias=True, shared_is_there=True, shared_is_gated=True)
    latent = replace(plain, num_kv_heads=1, head_dim=192, latent=LatentShape(512, 64, 128))
    yield "dense", dense
    yield "float16", replace(dense, dtype="float16", kv_dtype="float16")
    yield "float32", replace(plain, dtype="float32", kv_dtype="float32")
    yield "fp8 cache", replace(dense, kv_dtype="float8_e4m3fn")
    yield "large", replace(dense, hidden_size=8192, intermediate_size=28672, num_q_heads=64, max_num_seqs=256)
    yield "wide heads", replace(plain, head_dim=256, hidden_size=1152, softcap=50.0)
    yield "few heads", replace(plain, num_q_heads=8, num_kv_heads=1, head_dim=80, block_size=64)
    yield "part", replace(dense, is_whole=False)
    yield "part of a plain one", replace(plain, is_whole=False, max_num_seqs=8)
    yield "sinks", replace(plain, head_dim=64, attention_sinks=True, experts=clamped)
    yield "chunked", replace(plain, chunked_windows=True, experts=mixture)
    yield "trees", replace(dense, has_trees=True)
    yield "mixture", replace(dense, experts=mixture)
    yield "mixture in float32", replace(plain, experts=mixture, dtype="float32", kv_dtype="float32")
    yield "shared expert", replace(plain, experts=shared)
    yield "latent", latent
    yield "latent mixture", replace(latent, experts=shared, num_q_heads=128)
    yield "codes by group", replace(dense, packed=PackedShape(64, None))
    yield "codes by long groups", replace(dense, packed=PackedShape(128, 8.0))
    yield "codes by row", replace(plain, packed=PackedShape(0, 8.0), is_whole=False)
    yield "codes beside experts", replace(dense, packed=PackedShape(128, 8.0), experts=mixture)
    yield "adapters", replace(dense, num_adapters=4)
    yield "adapters of a part", replace(dense, num_adapters=3, is_whole=False)
    yield "adapters and codes", replace(dense, num_adapters=4, packed=PackedShape(128, 8.0))
    yield "adapters and experts", replace(dense, num_adapters=2, experts=mixture)
    yield "adapters and clamped experts", replace(plain, num_adapters=2, experts=clamped)
    yield "invariant", replace(dense, batch_invariant=True)
    yield "invariant part", replace(dense, batch_invariant=True, is_whole=False, chunked_windows=True)
    yield "invariant mixture", replace(plain, batch_invariant=True, experts=mixture, attention_sinks=True)


class RequestedLaunch:
    """Kernels requested from Triton, as digests of their signatures, constants and compiler options."""

    def __init__(self, capability: int) -> None:
        import triton
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        from quire.kernels.triton.precompile.processes import AbsentGpu

        self._found: dict[str, set[str]] = {}
        driver.set_active(AbsentGpu(capability))
        triton.knobs.runtime.jit_cache_hook = self._on_missing
        run = JITFunction.run
        JITFunction.run = lambda *arguments, **options: run(*arguments, **{**options, "warmup": True})

    def _on_missing(self, *, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        """Returns True to skip the compilation."""
        about = [(name, str(compile[name])) for name in ("signature", "num_warps", "num_stages", "enable_fp_fusion")]
        about += sorted((str(name), str(value)) for name, value in compile["constants"].items())
        digest = hashlib.sha256(repr((about, str(compile["configs"]))).encode()).hexdigest()[:12]
        self._found.setdefault(fn.name.rpartition(".")[2], set()).add(digest)
        return True

    def take(self) -> dict[str, list[str]]:
        found, self._found = self._found, {}
        return {name: sorted(digests) for name, digests in sorted(found.items())}


def of_capability(capability: int) -> Launches:
    """Collects the kernels of a capability; has to run in a separate process."""
    from quire.kernels.triton.precompile.calls import precompile_calls

    asked, launches = RequestedLaunch(capability), {}
    for name, shape in cases():
        for call in precompile_calls(shape):
            call()
        launches[name] = asked.take()
    return launches


def summary(launches: Launches) -> dict[str, str]:
    """Returns, by kernel, the number of compilations and a digest of their properties by case."""
    by_kernel: dict[str, list[tuple[str, str]]] = {}
    for case, kernels in launches.items():
        for kernel, digests in kernels.items():
            by_kernel.setdefault(kernel, []).extend((case, digest) for digest in digests)
    return {
        kernel: f"{len(found)} {hashlib.sha256(repr(sorted(found)).encode()).hexdigest()[:16]}"
        for kernel, found in sorted(by_kernel.items())
    }


def triton_version() -> str:
    return version("triton")


def recorded(capability: int) -> Launches:
    import subprocess

    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", __spec__.name if __name__ == "__main__" else __name__, str(capability)]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    launches: Launches = json.loads(done.stdout)
    return launches


def main(option: str = "") -> None:
    if option.isdecimal():
        print(json.dumps(of_capability(int(option))))
        return
    found = {str(capability): recorded(capability) for capability in CAPABILITIES}
    if option == "--write":
        kernels = {capability: summary(launches) for capability, launches in found.items()}
        STORED.write_text(json.dumps({"triton": triton_version(), "kernels": kernels}, indent=1) + "\n")
    else:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
