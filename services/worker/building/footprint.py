"""The memory that a model needs, computed from its config.json alone: no weights are read and no device is opened."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from quire import kernels
from quire.services.worker.attention.backends import load_backend
from quire.services.worker.building.checks import state_blocks
from quire.services.worker.building.encoder_decoder import encoder_size
from quire.services.worker.building.replica_config import ReplicaConfig, read_replica_config
from quire.services.worker.device.device import DTYPES, KV_DTYPES
from quire.services.worker.kv.kv_memory import BlockShape, block_shape
from quire.services.worker.layers.placement import LayerPlacement, memory_of
from quire.services.worker.layers.quantization.port import CheckpointQuantization
from quire.services.worker.layers.sharding import Shard
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.models.attention_spec import attention_spec
from quire.services.worker.models.causal_lm import CausalLM
from quire.services.worker.models.registry import find_encoder
from quire.services.worker.ranks.placement import SINGLE_RANK
from quire.shared.errors import InvalidArgument
from quire.shared.settings import WorkerSettings

REFERENCE_ATTENTION = "reference"  # reads the same caches as every other backend, and needs no device
HIDDEN_COPIES = 4  # residual stream, normed input, query or product, output of a layer
LOGITS_COPIES = 3  # logits, their sorted copy, probabilities; in float32
HALF, SINGLE = 2, 4  # bytes
DEVICE_BYTES = 3 << 29  # CUDA context, graphs, workspaces: 0.5 to 1.5 GiB measured for six shapes on one H200
UNQUANTIZED = ("embed_tokens", "lm_head")  # stay in the model's type when `quantization` converts weights at load


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory that one rank of a replica, that is one GPU, needs, computed from config.json."""

    architecture: str
    num_parameters: int  # stored values of all ranks; packed formats count what is stored
    weight_bytes: int
    activation_bytes: int  # estimated, of the largest step, with the rows of pictures that are kept
    block: BlockShape
    limits: WorkerLimits
    dtype: str
    quantization: str  # method by which linear layers are stored or converted at load; empty: none
    kv_dtype: str

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes that each further token adds to a long sequence, whose windows are full."""
        growing = self.limits.num_groups - len(self.limits.layout.windows)
        return self.block.num_bytes * growing / self.limits.block_size

    def num_blocks(self, gpu_bytes: int, utilization: float) -> int:
        """KV blocks that fit into a GPU beside weights and activations; 0 if those alone do not fit."""
        free = int(gpu_bytes * utilization) - self.weight_bytes - self.activation_bytes
        return max(free // self.block.num_bytes, 0)

    def num_sequences(self, num_blocks: int, num_tokens: int) -> int:
        """Sequences of `num_tokens` tokens each whose KV fits into `num_blocks` at the same time."""
        limits = replace(self.limits, max_model_len=num_tokens, num_blocks=num_blocks)
        pages = limits.max_pages_per_seq
        return max(num_blocks - 1, 0) // pages if pages else 0


def footprint(settings: WorkerSettings, values: dict[str, Any], *, num_ranks: int = 1) -> Footprint:
    """Computes the memory of each of `num_ranks` tensor-parallel ranks. `values`: config.json.

    Raises InvalidArgument for a model that no worker could run, or that cannot be divided among so many ranks."""
    if find_encoder(values) is not None:
        text = "config.json: an encoder keeps no KV; it needs the memory of its weights and of one step's activations"
        raise InvalidArgument(text, field="model")
    settings = settings.model_copy(update={"load_format": "dummy"})  # nothing in the folder but config.json is read
    replica_config = read_replica_config(settings, values, SINGLE_RANK)
    dtype = _dtype(settings.dtype, replica_config.config.dtype)
    kv_dtype = dtype if settings.kv_cache_dtype == "auto" else KV_DTYPES[settings.kv_cache_dtype]
    shard = Shard(0, num_ranks, whole_experts=settings.expert_parallel)
    place = LayerPlacement(
        kernels.load("cpu"), dtype, torch.device("meta"), checkpoint=replica_config.config.quantization, shard=shard
    )
    limits = state_blocks.fit(replica_config.limits, replica_config.config, kv_dtype, settings, shard=shard)
    spec = attention_spec(replica_config.config, limits.block_size, place, kv_dtype)
    model = replica_config.family(replica_config.config, load_backend(REFERENCE_ATTENTION), place, limits.max_model_len)
    block = block_shape(spec, limits.layout.for_layers(model.here).layers_per_page, kv_dtype)
    num_parameters, weight_bytes = _weights(model, settings.quantization)
    vision = encoder_size(settings, place, model, limits)
    return Footprint(
        architecture=replica_config.family.__name__,
        num_parameters=num_parameters + vision.num_parameters,
        weight_bytes=weight_bytes + vision.weight_bytes,
        activation_bytes=_activation_bytes(replica_config, limits, num_ranks) + vision.cache_bytes,
        block=block,
        limits=limits,
        dtype=str(dtype).removeprefix("torch."),
        quantization=_method(settings.quantization, replica_config.config.quantization),
        kv_dtype=str(kv_dtype).removeprefix("torch."),
    )


def _dtype(setting: str, checkpoint: str) -> torch.dtype:
    """Returns the type of weights and activations on a GPU: as choose_dtype(), with bfloat16 where nothing names one.
    Raises InvalidArgument for an unknown type."""
    name = setting if setting != "auto" else checkpoint or "bfloat16"
    if name not in DTYPES:
        raise InvalidArgument(f"dtype: the checkpoint is {name!r}; available: {', '.join(DTYPES)}", field="dtype")
    return DTYPES[name]


def _method(setting: str, checkpoint: CheckpointQuantization | None) -> str:
    """Returns the name of the method that quantizes linear layers: that of the setting, else the checkpoint's; empty:
    none does."""
    if setting != "none":
        return setting
    return "" if checkpoint is None else checkpoint.method


def _weights(model: CausalLM, quantization: str) -> tuple[int, int]:
    """Returns the number of stored values of the whole model, and the bytes of this rank's part of them after
    quantization at load."""
    num_values, num_bytes = 0, 0
    for name, destination in model.destinations():
        part, size = memory_of(destination), math.prod(destination.shape)
        converted = quantization != "none" and part.dim() > 1 and not any(kept in name for kept in UNQUANTIZED)
        num_values += size
        num_bytes += part.numel() * (1 if converted else part.element_size())
    return num_values, num_bytes


def _activation_bytes(replica_config: ReplicaConfig, limits: WorkerLimits, num_ranks: int) -> int:
    """Estimates what the largest step needs besides weights and KV: hidden states and the widest layer's output for
    every token of the step, logits and two copies of them for every sequence, and the device's own share."""
    config = replica_config.config
    widest = max(2 * config.intermediate_size, (config.num_q_heads + 2 * config.num_kv_heads) * config.head_dim)
    tokens = limits.max_num_batched_tokens * (HIDDEN_COPIES * config.hidden_size + 2 * widest // num_ranks) * HALF
    logits = limits.max_num_seqs * config.vocab_size * LOGITS_COPIES * SINGLE
    return tokens + logits + DEVICE_BYTES
