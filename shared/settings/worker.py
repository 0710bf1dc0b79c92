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
    """Owns a device, executes."""

    model: str = Field(..., description="Hugging Face folder with *.safetensors, GGUF file, or ORG/NAME on a hub")
    revision: str = Field("", description="branch, tag or commit of a model that is called by its name on a hub")
    served_model_name: str = Field("", description="name that requests use; default: the folder's name")
    scheduler: str = Field("127.0.0.1:50052", description="HOST:PORT of the scheduler to attach to, or several")
    role: Literal["both", "prefill", "decode"] = Field(
        "both",
        description="prefill: it computes long prompts and hands their KV to others; decode: it goes on with them",
    )
    grpc_port: int = Field(
        0, ge=0, le=65535, description="port of health, and of KV for other workers; 0: any free one"
    )
    metrics_port: int = Field(0, ge=0, le=65535, description="port of /metrics; 0: any free one")
    share_ports: bool = Field(False, description="let the launcher, which holds the port of /metrics, share it")
    device: Literal["cpu", "cuda"] = Field("cpu", description="where the model runs")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto", description="type of weights, activations and KV; auto: the checkpoint's, if the device is fast at it"
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto", description="type of cached keys and values; auto: the dtype; fp8: half the memory, CUDA only"
    )
    quantization: Literal["none", "fp8", "fp8_block"] = Field(
        "none", description="8-bit linear layers, made at load: a scale for each, or for every 128 x 128; CUDA only"
    )
    lora: dict[str, str] = Field(
        {}, description="adapters in PEFT's folders that requests choose as their model: NAME=FOLDER,NAME=FOLDER"
    )
    lora_folders: tuple[str, ...] = Field(
        (), description="folders from which adapters may be loaded while the worker runs; empty: none may"
    )
    enable_sleep_mode: bool = Field(
        False,
        description="take GPU memory so that it can be given back for a while (sleep); on the CPU it always can",
    )
    weights_folders: tuple[str, ...] = Field(
        (), description="folders from which weights may be updated while the worker runs; empty: none may"
    )
    max_loras: int = Field(
        16,
        ge=1,
        le=MOST_ADAPTERS,
        description="adapters on the device at a time, with lora_folders; others take their turns",
    )
    max_cpu_loras: int = Field(
        0, ge=0, description="adapters kept in host memory, the last used ones; others are read again; 0: as max_loras"
    )
    max_lora_rank: int = Field(
        MOST_LORA_RANK, ge=1, le=MOST_LORA_RANK, description="largest rank of an adapter that is taken"
    )
    lora_modules_to_save: tuple[str, ...] = Field(
        (),
        description="embeddings and output heads (embed_tokens, lm_head) that adapters of lora_folders may have whole: "
        "memory for one in each of max_loras",
    )
    tensor_parallel_size: int = Field(
        1, ge=1, le=MOST_RANKS, description="ranks that a model is cut into, a process and a GPU each"
    )
    pipeline_parallel_size: int = Field(
        1,
        ge=1,
        le=MOST_RANKS,
        description="stages that a model's layers are shared out among, each of tensor_parallel_size ranks",
    )
    context_parallel_size: int = Field(
        1,
        ge=1,
        le=MOST_RANKS,
        description="groups of tensor_parallel_size ranks that share out the tokens of long prompts; each has all KV",
    )
    nnodes: int = Field(1, ge=1, le=MOST_RANKS, description="hosts that have equally many of the ranks")
    node_rank: int = Field(
        0, ge=0, description="which of them this is: 0 has rank 0 and a scheduler, others do what that one says"
    )
    master_addr: str = Field("", description="node 0's IPv4 address or a name of it, the same on all nodes")
    master_port: int = Field(29500, ge=1, le=65535, description="port of node 0 that the others dial")
    expert_parallel: bool = Field(
        False, description="a mixture's experts are shared out among its ranks whole, instead of each one being cut"
    )
    all2all_backend: Literal["allreduce", "alltoall"] = Field(
        "allreduce",
        description="with --expert-parallel, allreduce: every rank has every token, and what experts make is added up; "
        "alltoall: each has tokens of its own and sends them where their experts are, in steps that no CUDA graph has",
    )
    enable_eplb: bool = Field(
        False, description="with --expert-parallel, experts move from rank to rank so that each has as many tokens"
    )
    eplb_step_interval: int = Field(
        3000, ge=1, description="steps of the worker after which their load is looked at again"
    )
    num_redundant_experts: int = Field(
        0, ge=0, description="copies that busy experts of a layer have on other ranks, of all ranks together"
    )
    custom_all_reduce: bool = Field(
        True,
        description="ranks on the GPUs of one host add up with kernels of our own over peer memory, if their GPUs can, "
        "up to the size from which NCCL is faster; otherwise with NCCL",
    )
    overlap_all_reduce: bool = Field(
        False,
        description="two ranks on GPUs make products of many rows in pieces, and copy one to each other while the next "
        "is made; it takes 128 MiB of each GPU, and is worth about 1 % of a prompt",
    )
    engine: Literal["device", "simulated"] = Field(
        "device", description="simulated: no model, made-up tokens after the time that a device would take"
    )
    simulated_workers: int = Field(1, ge=1, description="simulated workers in this process, named ID-0, ID-1, ...")
    simulated_step_ms: float = Field(
        10.0, gt=0, description="simulated: time of a step besides its tokens, milliseconds"
    )
    simulated_prompt_tokens_per_s: float = Field(
        20_000, gt=0, description="simulated: prompt tokens computed per second"
    )
    simulated_sequence_us: float = Field(20.0, ge=0, description="simulated: time of a decoding sequence, microseconds")
    model_impl: Literal["auto", "quire", "transformers"] = Field(
        "auto", description="whose code runs the model; auto: Quire's own, else that of the installed transformers"
    )
    load_format: Literal["auto", "dummy"] = Field("auto", description="auto: the model's own; dummy: random weights")
    max_model_len: int = Field(0, ge=0, description="longest sequence, tokens; 0: what the model and the memory allow")
    max_num_seqs: int = Field(0, ge=0, description="sequences running at a time; 0: by device")
    max_num_batched_tokens: int = Field(0, ge=0, description="token budget of a step; 0: by device")
    block_size: int = Field(0, ge=0, description="token positions per KV block; 0: by device and attention backend")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of the GPU's memory used in all")
    cpu_kv_cache_gib: float = Field(
        0.0, ge=0, description="KV memory on the CPU, GiB; 0: a tenth of what is free, at most 4"
    )
    kv_offloading_size: float = Field(
        0.0, ge=0, description="host memory for KV blocks that the device has no room for, GiB; 0: none"
    )
    kv_offloading_region: str = Field(
        "", description="folder in a tmpfs (/dev/shm) for that memory, which then outlives the worker; empty: its own"
    )
    kv_offloading_disk: str = Field(
        "", description="folder for KV blocks that host memory has no room for, kept over restarts; empty: none"
    )
    kv_offloading_disk_size: float = Field(0.0, ge=0, description="how much of them, GiB; with kv_offloading_disk")
    query_cache_mb: int = Field(
        64,
        ge=1,
        le=1 << 14,
        description="vectors of queries that documents are compared with token by token, kept on the device, MiB",
    )
    num_blocks: int = Field(0, ge=0, description="KV blocks, null block included; 0: from memory")
    attention_backend: str = Field("auto", description="attention implementation by name; auto: the best that can run")
    batch_invariant: bool = Field(
        False, description="a request gets the same tokens and log-probabilities, to the bit, alone and in any batch"
    )
    cuda_graphs: bool = Field(True, description="decode steps as CUDA graphs: faster steps for a second of start-up")
    cuda_graph_chunks: bool = Field(
        True, description="steps with chunks of prompts, too, where launching their kernels takes longer than computing"
    )
    max_logprobs: int = Field(
        20, ge=-1, description="most log-probabilities per token that a request may ask for; -1: the whole vocabulary"
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"] = Field(
        "raw_logprobs", description="raw: as the model gives them; processed: as the token was drawn from them"
    )
    structured_output_backend: Literal[
        "auto", "llguidance", "xgrammar", "outlines-core", "lm-format-enforcer", "guidance", "outlines"
    ] = Field(
        "auto",
        description="library of grammars; auto: llguidance, and for what it cannot the first installed that can; "
        "guidance and outlines: as vLLM calls llguidance and outlines-core",
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
        for name, folder in lora.items():
            if not name or not folder or not name.isprintable() or len(name) > LONGEST_ADAPTER_NAME:
                raise ValueError(f"{name!r:.80}={folder!r:.80} is not NAME=FOLDER")
        return lora

    @property
    def num_ranks(self) -> int:
        """Processes that the model is cut into."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def use_custom_all_reduce(self) -> bool:
        """Few rows and many are then added up in two ways, in two orders; GPUs of several hosts have no memory in
        common."""
        return self.custom_all_reduce and self.nnodes == 1 and not self.batch_invariant

    @property
    def use_overlapped_all_reduce(self) -> bool:
        """A row's product may have other bits in a piece than among all rows."""
        return self.overlap_all_reduce and self.use_custom_all_reduce

    @property
    def schedulers(self) -> tuple[str, ...]:
        """Addresses, the first to be tried first."""
        return tuple(part.strip() for part in self.scheduler.split(",") if part.strip())

    @property
    def main_module(self) -> str:
        return "quire.services.worker.simulated.main" if self.engine == "simulated" else super().main_module
