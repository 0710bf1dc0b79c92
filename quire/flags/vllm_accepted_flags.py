"""Flags of `vllm serve` that `quire up` accepts although it does not have them: always, for some values, or by
another name."""

from __future__ import annotations

from collections.abc import Mapping

from quire.flags.vllm_flag_table import EXPERTS, GENERATION, KV_HASHES, NO_OFFLOAD, NO_RAY, TEMPLATE

# Switches that request the existing behaviour.
IGNORED_FLAGS = frozenset({
    "--allow-deprecated-quantization",
    "--aggregate-engine-logging",
    "--async-scheduling",
    "--cohere-is-reasoning-model",
    "--cudagraph-metrics",
    "--disable-cascade-attn",
    "--disable-chunked-mm-input",
    "--disable-fastapi-access-log",
    "--disable-frontend-multiprocessing",
    "--disable-hybrid-kv-cache-manager",
    "--disable-log-requests",
    "--disable-log-stats",
    "--disable-mm-preprocessor-cache",
    "--disable-nccl-for-dp-synchronization",
    "--disable-uvicorn-access-log",
    "--enable-chunked-prefill",
    "--enable-fault-tolerance",
    "--enable-flash-late-interaction",
    "--enable-log-deltas",
    "--enable-log-requests",
    "--enable-lora",
    "--enable-mfu-metrics",
    "--enable-offline-docs",
    "--enable-prompt-tokens-details",
    "--enable-reasoning",
    "--enable-request-id-headers",
    "--enable-server-load-tracking",
    "--enable-ssl-refresh",
    "--enable-tokenizer-info-endpoint",
    "--fail-on-environ-validation",
    "--kv-cache-metrics",
    "--log-error-stack",
    "--skip-mm-profiling",
    "--trust-request-chat-template",
    "--use-tqdm-on-load",
    "--use-v2-block-manager",
})  # fmt: skip

# Flags with values that request the existing behaviour (empty: any value). Others are refused with the row's reason.
ACCEPTED_VALUES: Mapping[str, tuple[tuple[str, ...], str]] = {
    "--chat-template-content-format": (("auto",), TEMPLATE),
    "--config-format": (("auto", "hf"), "only config.json is supported, not Mistral's params.json"),
    "--convert": (
        ("auto", "none"),
        "the architecture in config.json determines whether the model generates, embeds or classifies",
    ),
    "--cpu-offload-gb": (("0", "0.0"), NO_OFFLOAD),
    "--disable-access-log-for-endpoints": ((), ""),
    "--distributed-executor-backend": (("mp", "uni"), NO_RAY),
    "--expert-placement-strategy": (("linear",), EXPERTS),
    "--generation-config": (("auto",), GENERATION),
    "--kv-cache-metrics-sample": ((), ""),
    "--max-parallel-loading-workers": ((), ""),
    "--max-seq-len-to-capture": ((), ""),
    "--mm-processor-cache-type": ((), ""),
    "--mm-shm-cache-max-object-size-mb": ((), ""),
    "--offload-backend": (("auto",), NO_OFFLOAD),
    "--prefix-caching-hash-algo": (("builtin", "sha256", "sha256_cbor", "xxhash", "xxhash_cbor"), KV_HASHES),
    "--prefix-match-unit": (("1",), "--prefix-grain"),
    "--renderer-num-workers": (("1",), "--tokenizer-threads"),
    "--runner": (
        ("auto",),
        "the architecture in config.json determines whether the model generates, embeds or classifies",
    ),
    "--safetensors-load-strategy": (("lazy", "eager", "prefetch"), "--load-format auto"),
    "--show-hidden-metrics-for-version": ((), ""),
    "--task": ((), ""),
    "--tokenizer-mode": (("auto", "hf", "slow", "mistral"), "the tokenizer is read from the model's folder"),
}

# vLLM's names of flags of `quire up`.
SYNONYMS: Mapping[str, str] = {
    "-dp": "--workers",
    "-n": "--nnodes",
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
    "-tp": "--tensor-parallel-size",
    "--device-memory-utilization": "--gpu-memory-utilization",
    "--num-gpu-blocks-override": "--num-blocks",
}

# Short names of the flags above.
SHORT: Mapping[str, str] = {
    "-O": "--optimization-level",
    "-ac": "--attention-config",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-dc": "--diffusion-config",
    "-dcp": "--decode-context-parallel-size",
    "-dpa": "--data-parallel-address",
    "-dpb": "--data-parallel-backend",
    "-dpe": "--data-parallel-external-lb",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpl": "--data-parallel-size-local",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-dpn": "--data-parallel-rank",
    "-dpp": "--data-parallel-rpc-port",
    "-dpr": "--data-parallel-start-rank",
    "-ep": "--enable-expert-parallel",
    "-pcp": "--prefill-context-parallel-size",
}
