"""Groups of the flags of `quire up` and of the services, in the order of the help pages.

Common flags are in `--help`, with the short texts given here; `--help=GROUP` shows all flags of a group with their
full text, `--help-all` all flags. A command shows only the flags that it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FlagGroup:
    """Group of flags under one title in help: `common` ones with a short text, `rare` ones by name only. Names have
    no leading dashes."""

    title: str
    common: Mapping[str, str]
    rare: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.common, *self.rare)


def _group(title: str, common: Mapping[str, str], rare: str = "") -> FlagGroup:
    return FlagGroup(title, common, tuple(rare.split()))


GROUPS: Mapping[str, FlagGroup] = {
    "model": _group(
        "the model",
        {
            "model": "folder, GGUF file, or ORG/NAME on a hub",
            "revision": "branch, tag or commit of a model on a hub",
            "served-model-name": "name that requests use",
            "dtype": "dtype of weights, activations and KV",
            "quantization": "quantize linear layers to 8 bits at load",
            "max-model-len": "longest sequence, tokens",
            "chat-template": "Jinja file, or name of a template",
        },
        "served-model-aliases model-impl language-model-only load-format seed threads",
    ),
    "answers": _group(
        "answers",
        {
            "tool-call-parser": "parser for tool calls",
            "reasoning-parser": "parser for reasoning sections",
        },
        "structured-output-backend enable-auto-tool-choice control-tokens max-logprobs logprobs-mode stream-interval "
        "sse-keepalive-s",
    ),
    "device": _group(
        "devices and parallelism",
        {
            "device": "where the model runs",
            "tensor-parallel-size": "GPUs that a model is split across",
        },
        "pipeline-parallel-size context-parallel-size nnodes node-rank master-addr master-port expert-parallel "
        "all2all-backend enable-eplb eplb-step-interval num-redundant-experts custom-all-reduce overlap-all-reduce "
        "attention-backend batch-invariant cuda-graphs cuda-graph-chunks",
    ),
    "kv": _group(
        "KV cache",
        {
            "gpu-memory-utilization": "share of the GPU's memory to use in total",
            "cpu-kv-cache-gib": "KV memory on the CPU, GiB",
            "kv-cache-dtype": "dtype of the KV cache",
            "kv-offloading-size": "host memory for offloaded KV, GiB",
            "enable-prefix-caching": "reuse the KV of common prefixes",
        },
        "num-blocks encoder-cache-size block-size prefix-grain kv-offloading-region kv-offloading-disk "
        "kv-offloading-disk-size kv-offloading-policy kv-offloading-store-threshold kv-handover query-cache-mb "
        "watermark",
    ),
    "steps": _group(
        "steps and scheduling",
        {
            "max-num-seqs": "sequences running at a time",
            "max-num-batched-tokens": "token budget of a step",
            "speculative-config": "speculative decoding, as JSON",
            "scheduling-policy": "order of waiting sequences",
        },
        "priority-aging-s tenant-weights placement long-prefill-token-threshold prefill-threshold max-stream-gap-ms "
        "max-steps-in-flight step-deadline-s max-worker-losses",
    ),
    "pictures": _group(
        "pictures in prompts",
        {},
        "limit-mm-per-prompt language-model-only allowed-media-domains allowed-media-networks allowed-local-media-path "
        "mm-processor-cache-gb max-media-gb media-processes media-host media-port",
    ),
    "lora": _group(
        "LoRA adapters",
        {"lora": "adapters that requests choose as their model"},
        "lora-folders max-loras max-cpu-loras max-lora-rank lora-modules-to-save",
    ),
    "weights": _group("weight updates and sleep", {}, "weights-folders enable-sleep-mode"),
    "cluster": _group(
        "the cluster",
        {
            "config": "YAML file with settings",
            "id": "stable name of this process",
            "role": "prefill, decode, encode or both",
            "scheduler": "HOST:PORT of the scheduler, or several",
            "workers": "workers, each a replica of the model",
            "frontends": "frontend processes, on the same ports",
            "join": "start workers only, for a running cluster",
            "redis": "prefix index that schedulers share",
        },
        "schedulers prefill-workers decode-workers encode-workers scheduler-host scheduler-port cluster-secret-file "
        "redis-password-file redis-namespace heartbeat-interval-ms drain-timeout-s worker-start-s health-awaits-worker",
    ),
    "network": _group(
        "addresses",
        {
            "host": "address to listen on; 0.0.0.0: all",
            "http-port": "OpenAI API and others over HTTP",
            "grpc-port": "gRPC",
            "metrics-port": "/metrics",
        },
        "advertise root-path connections share-ports",
    ),
    "security": _group(
        "access and security",
        {
            "api-keys": "file with keys of tenants, or redis",
            "client-tls": "TLS for clients, on both ports",
        },
        "tls insecure open-paths allowed-hosts cors-origins admin-host admin-port admin-key-file",
    ),
    "load": _group(
        "load and request limits",
        {
            "max-inflight-requests": "requests in flight; more are refused (429)",
            "max-waiting": "waiting sequences; more are refused",
        },
        "max-queued-tokens max-prompts-per-request max-request-bytes limits strict-request-fields retry-after-ms "
        "unavailable-after-s tokenizer-threads",
    ),
    "stores": _group(
        "files, batches, responses and resumable streams",
        {"batch-folder": "folder for /v1/files and /v1/batches"},
        "batch-concurrency batch-file-mb batch-store-mb response-store-mb stream-retention-s stream-limits",
    ),
    "logs": _group(
        "logs, metrics and traces",
        {
            "log-level": "least severe log line printed",
            "log-format": "format of log lines",
            "otlp-traces-endpoint": "http://HOST:PORT of an OpenTelemetry collector",
        },
        "otlp-traces-ratio metrics-host metrics-targets-file stat-loggers stats-interval-s",
    ),
    "simulated": _group(
        "simulated workers",
        {},
        "engine simulated-workers simulated-step-ms simulated-prompt-tokens-per-s simulated-sequence-us",
    ),
}
