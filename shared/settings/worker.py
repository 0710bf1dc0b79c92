"""Settings of a worker."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from quire.shared.settings.base import Settings

MOST_RANKS = 64
LONGEST_ADAPTER_NAME = 256  # characters
MOST_ADAPTERS = 256
MOST_LORA_RANK = 256


class WorkerSettings(Settings):
    """Settings of the worker, which owns a device and executes steps."""

    model: str = Field(..., description="Hugging Face folder with *.safetensors, GGUF file, or ORG/NAME on a hub")
    revision: str = Field("", description="branch, tag or commit of a model on a hub")
    served_model_name: str = Field("", description="name that requests use; default: the folder's name")
    scheduler: str = Field("127.0.0.1:50052", description="HOST:PORT of the scheduler to attach to, or several")
    role: Literal["both", "prefill", "decode", "encode"] = Field(
        "both",
        description="prefill: computes long prompts and hands their KV over; decode: continues these sequences; "
        "encode: encodes pictures for the other workers, without language weights and KV cache",
    )
    grpc_port: int = Field(
        0, ge=0, le=65535, description="port for health checks and transfer of KV and rows of media; 0: any free one"
    )
    metrics_port: int = Field(0, ge=0, le=65535, description="port of /metrics; 0: any free one")
    share_ports: bool = Field(
        False, description="share the metrics port with the launcher, which reserves it (SO_REUSEPORT)"
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="where the model runs")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="dtype of weights, activations and KV; auto: the checkpoint's, if efficient on the device"
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto", description="dtype of the KV cache; auto: the model's dtype; fp8: half the memory, CUDA only"
    )
    quantization: Literal["none", "fp8", "fp8_block"] = Field(
        "none",
        description="quantize linear layers to 8 bits at load: one scale per tensor, or per 128 x 128 block; CUDA only",
    )
    lora: dict[str, str] = Field(
        {}, description="LoRA adapters in PEFT format that requests select as their model: NAME=FOLDER,NAME=FOLDER"
    )
    lora_folders: tuple[str, ...] = Field(
        (), description="folders from which adapters may be loaded at run time; empty: none"
    )
    enable_sleep_mode: bool = Field(
        False,
        description="allocate GPU memory so that it can be released temporarily (sleep); always possible on CPU",
    )
    weights_folders: tuple[str, ...] = Field(
        (), description="folders from which weights may be updated at run time; empty: none"
    )
    max_loras: int = Field(
        16,
        ge=1,
        le=MOST_ADAPTERS,
        description="adapters on the device at a time, with lora_folders; others are swapped in",
    )
    max_cpu_loras: int = Field(
        0,
        ge=0,
        description="most recently used adapters kept in host memory; others are read again; 0: same as max_loras",
    )
    max_lora_rank: int = Field(MOST_LORA_RANK, ge=1, le=MOST_LORA_RANK, description="largest adapter rank accepted")
    lora_modules_to_save: tuple[str, ...] = Field(
        (),
        description="embeddings and output heads (embed_tokens, lm_head) that adapters of lora_folders may replace: "
        "memory for one in each of max_loras",
    )
    tensor_parallel_size: int = Field(
        1, ge=1, le=MOST_RANKS, description="tensor-parallel ranks, one process and GPU each"
    )
    pipeline_parallel_size: int = Field(
        1,
        ge=1,
        le=MOST_RANKS,
        description="pipeline stages, each with tensor_parallel_size ranks",
    )
    context_parallel_size: int = Field(
        1,
        ge=1,
        le=MOST_RANKS,
        description="context-parallel groups, which split the tokens of long prompts; each holds all KV",
    )
    nnodes: int = Field(1, ge=1, le=MOST_RANKS, description="number of hosts; each runs the same number of ranks")
    node_rank: int = Field(0, ge=0, description="index of this host; node 0 runs rank 0 and dials the scheduler")
    master_addr: str = Field("", description="IPv4 address or name of node 0, the same on all nodes")
    master_port: int = Field(29500, ge=1, le=65535, description="port of node 0 for the other nodes")
    expert_parallel: bool = Field(
        False, description="distribute whole experts among the ranks instead of splitting each expert"
    )
    all2all_backend: Literal["allreduce", "alltoall"] = Field(
        "allreduce",
        description="with --expert-parallel, allreduce: every rank has every token, and expert outputs are summed; "
        "alltoall: each rank has its own tokens and sends them to their experts, without CUDA graphs",
    )
    enable_eplb: bool = Field(
        False, description="with --expert-parallel, move experts between ranks to balance their load"
    )
    eplb_step_interval: int = Field(3000, ge=1, description="number of steps between load-balancing decisions")
    num_redundant_experts: int = Field(
        0, ge=0, description="total number of replicas of busy experts per layer, over all ranks"
    )
    custom_all_reduce: bool = Field(
        True,
        description="all-reduce between the GPUs of one host with custom kernels over peer memory, if supported, "
        "up to the size at which NCCL is faster; otherwise with NCCL",
    )
    overlap_all_reduce: bool = Field(
        False,
        description="split products of many rows on two GPU ranks, and transfer one piece while the next "
        "is computed; takes 128 MiB per GPU and saves about 1 % of a prompt's time",
    )
    engine: Literal["device", "simulated"] = Field(
        "device", description="simulated: no model; artificial tokens after the time that a device would take"
    )
    simulated_workers: int = Field(1, ge=1, description="simulated workers in this process, named ID-0, ID-1, ...")
    simulated_step_ms: float = Field(10.0, gt=0, description="simulated: fixed time per step, milliseconds")
    simulated_prompt_tokens_per_s: float = Field(
        20_000, gt=0, description="simulated: prompt tokens computed per second"
    )
    simulated_sequence_us: float = Field(
        20.0, ge=0, description="simulated: time per decoding sequence and step, microseconds"
    )
    model_impl: Literal["auto", "quire", "transformers"] = Field(
        "auto", description="model implementation; auto: Quire's own, else that of the installed transformers"
    )
    load_format: Literal["auto", "dummy"] = Field("auto", description="auto: the model's own; dummy: random weights")
    max_model_len: int = Field(0, ge=0, description="longest sequence, tokens; 0: as the model and memory allow")
    max_num_seqs: int = Field(0, ge=0, description="sequences running at a time; 0: by device")
    max_num_batched_tokens: int = Field(0, ge=0, description="token budget of a step; 0: by device")
    block_size: int = Field(0, ge=0, description="token positions per KV block; 0: by device and attention backend")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of the GPU's memory to use in total")
    cpu_kv_cache_gib: float = Field(
        0.0, ge=0, description="KV cache on the CPU, GiB; 0: a tenth of free memory, at most 4"
    )
    kv_offloading_size: float = Field(0.0, ge=0, description="host memory for offloaded KV blocks, GiB; 0: none")
    kv_offloading_region: str = Field(
        "",
        description="folder in a tmpfs (/dev/shm) for that memory, which then survives restarts; empty: private memory",
    )
    kv_offloading_disk: str = Field(
        "", description="folder for KV blocks offloaded from host memory, kept across restarts; empty: none"
    )
    kv_offloading_disk_size: float = Field(
        0.0, ge=0, description="disk space for KV blocks, GiB; with kv_offloading_disk"
    )
    query_cache_mb: int = Field(
        64,
        ge=1,
        le=1 << 14,
        description="device memory for cached late-interaction query vectors, MiB",
    )
    language_model_only: bool = Field(
        False, description="of a model that takes pictures, serve the text part alone: no encoder is loaded"
    )
    encoder_cache_size: int = Field(
        0,
        ge=0,
        description="rows of pictures' embeddings kept on the device; 0: four token budgets of a step, and at least "
        "one picture",
    )
    num_blocks: int = Field(0, ge=0, description="KV blocks, null block included; 0: from memory")
    attention_backend: str = Field("auto", description="attention implementation by name; auto: the best that can run")
    batch_invariant: bool = Field(
        False, description="results do not depend on the batch: same tokens and log-probabilities, bit for bit"
    )
    cuda_graphs: bool = Field(
        True, description="run decode steps as CUDA graphs: faster steps, one second longer start-up"
    )
    cuda_graph_chunks: bool = Field(
        True, description="also for steps with prompt chunks, where launching kernels takes longer than computing"
    )
    max_logprobs: int = Field(
        20, ge=-1, description="maximum log-probabilities per token in a request; -1: the whole vocabulary"
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"] = Field(
        "raw_logprobs",
        description="raw: as computed by the model; processed: after the logits processing used for sampling",
    )
    structured_output_backend: Literal[
        "auto", "llguidance", "xgrammar", "outlines-core", "lm-format-enforcer", "guidance", "outlines"
    ] = Field(
        "auto",
        description="grammar backend; auto: llguidance, then the first installed one that supports the constraint; "
        "guidance and outlines: vLLM's names for llguidance and outlines-core",
    )
    speculative_config: str = Field(
        "",
        description='speculative decoding, as JSON: {"method": "ngram", "num_speculative_tokens": 3}; empty: none',
    )
    threads: int = Field(0, ge=0, description="CPU threads of the model; 0: all cores")
    seed: int = Field(0, ge=0, description="seed of dummy weights")

    @field_validator("lora")
    @classmethod
    def _named(cls, lora: dict[str, str]) -> dict[str, str]:
        """Checks that adapters are written NAME=FOLDER with a printable name of limited length; raises ValueError."""
        for name, folder in lora.items():
            if not name or not folder or not name.isprintable() or len(name) > LONGEST_ADAPTER_NAME:
                raise ValueError(f"{name!r:.80}={folder!r:.80} is not NAME=FOLDER")
        return lora

    @property
    def num_ranks(self) -> int:
        """Number of processes that the model is split across."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def use_custom_all_reduce(self) -> bool:
        """Whether to use the custom all-reduce. It sums few and many rows in different orders, so it excludes batch
        invariance; GPUs of several hosts share no memory."""
        return self.custom_all_reduce and self.nnodes == 1 and not self.batch_invariant

    @property
    def use_overlapped_all_reduce(self) -> bool:
        """Whether to overlap the all-reduce; a row's product may then differ in its last bits between piece and
        whole."""
        return self.overlap_all_reduce and self.use_custom_all_reduce

    @property
    def schedulers(self) -> tuple[str, ...]:
        """Addresses of the schedulers, in the order in which they are tried."""
        return tuple(part.strip() for part in self.scheduler.split(",") if part.strip())

    @property
    def main_module(self) -> str:
        return "quire.services.worker.simulated.main" if self.engine == "simulated" else super().main_module
