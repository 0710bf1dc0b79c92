"""gpt-oss (GptOssForCausalLM, arXiv 2508.10925): attention sinks, windows in every other layer, biased experts.

Expert gates are clamped. MXFP4 experts are dequantized to 16 bits while loading.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.kernels.routing import Gate, Routing
from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.layers.feed_forward.experts import Experts, SparseMLP
from quire.services.worker.layers.feed_forward.mxfp4 import GROUP, GROUP_BYTES
from quire.services.worker.models.config.block_config import AttentionConfig
from quire.services.worker.models.config.decoder_config import DecoderConfig, read_decoder
from quire.services.worker.models.config.experts_config import ExpertNames, ExpertsConfig, read_num_experts, read_top_k
from quire.services.worker.models.families.qwen2 import WINDOWED
from quire.services.worker.models.mixture import MixtureForCausalLM, MixtureLayer

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.attention.port import AttentionBackend
    from quire.services.worker.layers.placement import Alternative, Destination, LayerPlacement

MXFP4 = "mxfp4"
NAMES = ExpertNames(router="router")


class InterleavedExperts(Experts):
    """Experts whose checkpoint stacks all of them in one tensor, input features before output features, gates and ups
    interleaved."""

    takes_adapters = False

    def __init__(self, name: str, hidden_size: int, config: ExpertsConfig, place: LayerPlacement) -> None:
        super().__init__(name, hidden_size, config, place)
        count, size, self._shard = len(self.here), len(self._features), place.shard
        self._gate_up = place.empty(count, hidden_size, 2 * size)
        self._down = place.empty(count, size, hidden_size)
        self._gate_up_bias: Tensor = place.empty(count, 2 * size)
        self._down_bias: Tensor = place.empty(count, hidden_size)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield f"{self._name}.gate_up_proj", self._pairs(self._gate_up, 2)
        yield f"{self._name}.gate_up_proj_bias", self._pairs(self._gate_up_bias, 1)
        yield f"{self._name}.down_proj", self._stacked_destination(self._down, 1, (self._features,), self._total)
        yield f"{self._name}.down_proj_bias", self._all_down_biases

    def _pairs(self, tensor: Tensor, dim: int) -> Destination:
        """Returns the destination of this rank's features in a tensor with interleaved gate and up rows along `dim`."""
        first, last = 2 * self._features.start, 2 * self._features.stop
        return self._stacked_destination(tensor, dim, (range(first, last),), 2 * self._total)

    @property
    def _all_down_biases(self) -> Destination:
        return self._stacked_destination(self._down_bias, 1, (range(self._down_bias.size(1)),), self._down_bias.size(1))

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        return {}

    def finish(self) -> None:
        """Reorders the loaded tensors to gates first and output features first, packs them and frees the loaded ones.

        With sharded features only rank 0 keeps the bias of the down projection.
        """
        gate_up, down = _gates_first(self._gate_up.transpose(1, 2)), self._down.transpose(1, 2).contiguous()
        bias = _gates_first(self._gate_up_bias.unsqueeze(2)).squeeze(2)
        if self._shard.rank and not self._whole:
            self._down_bias.zero_()  # added by rank 0 alone
        self._pack(gate_up, down, bias, self._down_bias)
        del self._gate_up, self._down, self._gate_up_bias, self._down_bias


class Mxfp4Experts(InterleavedExperts):
    """Experts whose checkpoint has MXFP4 blocks and scales, output features before input features; dequantized by
    finish().

    Raises InvalidArgument if a rank's features are no multiple of the group size.
    """

    def __init__(self, name: str, hidden_size: int, config: ExpertsConfig, place: LayerPlacement) -> None:
        super().__init__(name, hidden_size, config, place)
        import torch  # lazy: families are also read without torch

        size = len(self._features)
        self._dtype, self._sizes = place.dtype, (2 * size, hidden_size)
        count, widths = len(self.here), (hidden_size, size)
        if size % GROUP:
            raise refusal("intermediate_size", self._total, f"{GROUP} numbers of MXFP4 share a scale on each rank")

        def bytes_of(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.uint8, device=place.device)

        self._blocks, self._scales = (
            [bytes_of(count, rows, width // GROUP, *rest) for rows, width in zip(self._sizes, widths, strict=True)]
            for rest in ((GROUP_BYTES,), ())
        )
        del self._gate_up, self._down

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield f"{self._name}.gate_up_proj_bias", self._pairs(self._gate_up_bias, 1)
        yield f"{self._name}.down_proj_bias", self._all_down_biases
        groups = range(self._features.start // GROUP, self._features.stop // GROUP)
        for kind, (gate_up, down) in (("blocks", self._blocks), ("scales", self._scales)):
            yield f"{self._name}.gate_up_proj_{kind}", self._pairs(gate_up, 1)
            yield f"{self._name}.down_proj_{kind}", self._stacked_destination(down, 2, (groups,), self._total // GROUP)

    def finish(self) -> None:
        """Dequantizes the loaded blocks to the model's dtype, frees them, and packs the experts."""
        self._gate_up, self._down = (
            self._widened(*given).transpose(1, 2) for given in zip(self._blocks, self._scales, strict=True)
        )
        del self._blocks, self._scales
        super().finish()

    def _widened(self, blocks: Tensor, scales: Tensor) -> Tensor:
        """Dequantizes to [num_experts, out_features, in_features], an expert at a time to limit temporary memory."""
        import torch

        from quire.services.worker.layers.feed_forward.mxfp4 import dequantized

        return torch.stack([dequantized(*expert, self._dtype) for expert in zip(blocks, scales, strict=True)])


def _gates_first(rows: Tensor) -> Tensor:
    """Reorders [num_experts, 2 * size, n] from interleaved gates and ups to all gates, then all ups."""
    import torch  # lazy: families are also read without torch

    return torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1)


class GptOssForCausalLM(MixtureForCausalLM):
    """gpt-oss: attention sinks, windows in every other layer, experts in every layer."""

    @staticmethod
    def read(config: ConfigFile) -> DecoderConfig:
        """Reads config.json. Raises InvalidArgument if MXFP4 groups do not divide the sizes."""
        quantization = config.section("quantization_config")
        in_mxfp4 = quantization is not None and quantization.get("quant_method") == MXFP4
        decoder = read_decoder(config.without("quantization_config") if in_mxfp4 else config)
        num_experts = read_num_experts(config, "num_local_experts")
        if in_mxfp4 and (decoder.hidden_size % GROUP or decoder.intermediate_size % GROUP):
            raise refusal("hidden_size", decoder.hidden_size, f"{GROUP} numbers of MXFP4 share a scale")
        experts = ExpertsConfig(
            num_experts,
            decoder.intermediate_size,
            Routing(read_top_k(config, num_experts)),
            sparse_layers=(True,) * decoder.num_layers,
            activation=Gate(config.number("swiglu_limit", 7.0), config.number("swiglu_alpha", 1.702)),
            router_bias=True,
            biased=True,
            in_mxfp4=in_mxfp4,
            by_expert=False,
            names=NAMES,
        )
        bias, windows = config.flag("attention_bias", True), _read_windows(config, decoder.num_layers)
        attention = AttentionConfig(qkv_bias=bias, o_bias=bias, has_sinks=True)
        return replace(decoder, sliding_windows=windows, attention=attention, experts=experts)

    @staticmethod
    def layer(index: int, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement) -> MixtureLayer:
        """Returns the layer at `index`, with experts in the checkpoint's layout: MXFP4 or interleaved floats."""
        assert config.experts is not None
        name = f"model.layers.{index}.{config.experts.names.module}"
        layout = Mxfp4Experts if config.experts.in_mxfp4 else InterleavedExperts
        stacked = layout(f"{name}.experts", config.hidden_size, config.experts, place)
        experts = SparseMLP(name, config.hidden_size, config.experts, place, stacked)
        return MixtureLayer(index, config, backend, place, experts)


def _read_windows(config: ConfigFile, num_layers: int) -> tuple[int, ...]:
    """Returns each layer's window in tokens, 0 for none: by layer_types, else in every other layer, from the first on.

    Raises InvalidArgument for unknown types or a wrong number of them.
    """
    window = config.integer("sliding_window", 128)
    implied = ["full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)]
    types = config.get("layer_types", implied)
    if len(types) != num_layers or not set(types) <= set(WINDOWED):
        raise refusal("layer_types", types, f"one of {', '.join(WINDOWED)} is needed for each of {num_layers} layers")
    return tuple(window if WINDOWED[kind] else 0 for kind in types)
