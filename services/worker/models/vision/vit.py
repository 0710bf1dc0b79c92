"""The vision transformer (arXiv 2010.11929): patches, learned positions, pre-norm layers; with the variants of CLIP,
SigLIP, InternViT and Llama 4."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.layers.feed_forward.mlp import PlainMLP
from quire.services.worker.layers.linear import Linear, Projection
from quire.services.worker.layers.norm.layer_norm import LayerNorm
from quire.services.worker.layers.norm.rms_norm import RMSNorm
from quire.services.worker.models.vision.axial_rotation import angles_of_grid, rotate_pairs
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Destination, LayerPlacement

CLIP, SIGLIP = "clip_vision_model", "siglip_vision_model"


@dataclass(frozen=True, slots=True)
class ViTNames:
    """Names of a tower's tensors in checkpoints, below the tower's own name."""

    patches: str = "embeddings.patch_embedding"
    class_token: str = "embeddings.class_embedding"
    positions: str = "embeddings.position_embedding.weight"
    first_norm: str = "pre_layrnorm"  # spelled so in checkpoints
    last_norm: str = "post_layernorm"
    layers: str = "encoder.layers"
    attention: str = "self_attn"
    attention_output: str = "out_proj"
    layer_norms: tuple[str, str] = ("layer_norm1", "layer_norm2")
    layer_scales: tuple[str, str] = ("lambda_1", "lambda_2")
    batch_dims: int = 0  # leading dimensions of size 1 of class token and positions: [1, ...]


@dataclass(frozen=True, slots=True)
class ViTConfig:
    """Sizes and variants of a vision transformer."""

    hidden_size: int
    intermediate_size: int
    num_layers: int  # that are run
    num_heads: int
    patch_size: int  # pixels on a side
    image_size: int  # pixels on a side
    norm_eps: float
    activation: str
    has_class_token: bool
    has_patch_bias: bool
    has_first_norm: bool = False  # before the first layer
    has_last_norm: bool = False  # after the last layer
    has_attention_bias: bool = True  # of queries, keys and values
    has_query_key_norm: bool = False  # RMS norm over all heads
    has_rms_norm: bool = False  # in place of layer norms in the layers
    has_layer_scale: bool = False  # outputs of attention and MLP are multiplied by learned vectors
    has_flat_patches: bool = False  # patch weights are stored as a matrix
    class_token_is_last: bool = False
    rope_theta: float = 0.0  # of rotary positions by column and row; 0: none
    has_bucketed_positions: bool = False  # rows of positions are found by bucket (arXiv 2307.06304)
    names: ViTNames = ViTNames()

    @property
    def patches_per_side(self) -> int:
        """Patches along one side of a picture."""
        return self.image_size // self.patch_size

    @property
    def num_patches(self) -> int:
        """Patches of one picture, without the class token."""
        return self.patches_per_side**2


def read_vit(config: ConfigFile, *, layer: int) -> ViTConfig:
    """Reads a `vision_config`. Raises InvalidArgument for unknown towers and layers out of range.

    `layer`: the hidden state that is used, in the count of transformers: 0 is the input of the first layer, -1 the
    output of the last.
    """
    kind = config.text("model_type")
    if kind not in (CLIP, SIGLIP):
        raise InvalidArgument(
            f"config.json: vision_config.model_type is {kind!r}; {CLIP} and {SIGLIP} are supported", field="model"
        )
    depth = config.integer("num_hidden_layers", 12)
    if not -depth - 1 <= layer <= depth:
        text = f"config.json: vision_feature_layer is {layer}, of {depth} layers; {-depth - 1} to {depth} is needed"
        raise InvalidArgument(text, field="model")
    return ViTConfig(
        hidden_size=config.integer("hidden_size", 768),
        intermediate_size=config.integer("intermediate_size", 3072),
        num_layers=layer % (depth + 1),
        num_heads=config.integer("num_attention_heads", 12),
        patch_size=config.integer("patch_size", 32 if kind == CLIP else 16),
        image_size=config.integer("image_size", 224),
        norm_eps=config.number("layer_norm_eps", 1e-5 if kind == CLIP else 1e-6),
        activation=config.text("hidden_act", "quick_gelu" if kind == CLIP else "gelu_pytorch_tanh"),
        has_class_token=kind == CLIP,
        has_patch_bias=kind != CLIP,
        has_first_norm=kind == CLIP,
    )


class ViT:
    """Vision transformer that turns pictures of one size into hidden states of their patches."""

    def __init__(self, name: str, config: ViTConfig, place: LayerPlacement) -> None:
        size, names = config.hidden_size, config.names
        self.config, self._name, self._place = config, name, place
        self._patches: Tensor = place.empty(size, 3, config.patch_size, config.patch_size)
        self._patch_bias: Tensor | None = place.empty(size) if config.has_patch_bias else None
        self._class: Tensor | None = place.empty(size) if config.has_class_token else None
        self._positions: Tensor = place.empty(config.num_patches + config.has_class_token, size)
        self._position_rows: Tensor | None = None  # of each patch; None: in order
        self._angles: Tensor | None = None  # [tokens of a picture, head_dim / 2]
        self._norms = {  # around the layers
            norm: LayerNorm(f"{name}.{norm}", size, config.norm_eps, place)
            for norm, is_there in ((names.first_norm, config.has_first_norm), (names.last_norm, config.has_last_norm))
            if is_there
        }
        self._layers = [ViTLayer(f"{name}.{names.layers}.{index}", config, place) for index in range(config.num_layers)]

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        names = self.config.names
        lead = (1,) * names.batch_dims
        yield (
            f"{self._name}.{names.patches}.weight",
            self._patches.flatten(1) if self.config.has_flat_patches else self._patches,
        )
        if self._patch_bias is not None:
            yield f"{self._name}.{names.patches}.bias", self._patch_bias
        if self._class is not None:
            yield f"{self._name}.{names.class_token}", self._class.view(*lead, *lead, -1)
        yield f"{self._name}.{names.positions}", self._positions.view(*lead, *self._positions.shape)
        for norm in self._norms.values():
            yield from norm.destinations()
        for layer in self._layers:
            yield from layer.destinations()

    def finish(self) -> None:
        config, device = self.config, self._place.device
        for norm in self._norms.values():
            norm.finish()
        for layer in self._layers:
            layer.finish()
        if config.has_bucketed_positions:
            self._position_rows = bucketed_rows(*(config.patches_per_side,) * 3).to(device)
        if config.rope_theta:
            head_dim = config.hidden_size // config.num_heads
            self._angles = angles_of_grid(config.patches_per_side, head_dim, config.rope_theta).to(device)

    def __call__(self, pixels: Tensor, shown: Sequence[tuple[int, int]] | None = None) -> Tensor:
        """Computes hidden states [num_pictures, num_patches, hidden_size], without the class token.

        `pixels` [num_pictures, 3, image_size, image_size], normalized, in the tower's dtype. `shown`: rows and columns
        of each picture's patches, from the top left, that show it; the others are padding, which no patch attends to.
        None: all. Only for towers with positions by bucket.
        """
        if shown is not None:
            return self._encode_padded(pixels, shown)
        x = self.tokens(pixels)
        if self._class is None:
            return x
        return x[:, :-1] if self.config.class_token_is_last else x[:, 1:]

    def tokens(self, pixels: Tensor) -> Tensor:
        """Computes hidden states [num_pictures, num_tokens, hidden_size] of all tokens, the class token included.
        `pixels` as in __call__()."""
        import torch

        x = self._embed(pixels)
        num_pictures, length, size = x.shape
        starts = torch.arange(num_pictures + 1, dtype=torch.int32, device=x.device) * length
        angles = None if self._angles is None else self._angles.repeat(num_pictures, 1)
        x = self._normed(self.config.names.first_norm, x.contiguous().view(num_pictures * length, size))
        for layer in self._layers:
            x = layer(x, starts, length, angles)
        return self._normed(self.config.names.last_norm, x).view(num_pictures, length, size)

    def _encode_padded(self, pixels: Tensor, shown: Sequence[tuple[int, int]]) -> Tensor:
        """Computes hidden states as __call__() does with `shown`. For the layers, the patches of each picture that show
        it are moved to the front, so that attention is limited to a number of leading tokens."""
        import torch

        side = self.config.patches_per_side
        patches = [shown_patches(side, rows, columns) for rows, columns in shown]
        order = torch.stack([mask.argsort(descending=True, stable=True) for mask in patches]).to(pixels.device)
        seen = torch.tensor([max(int(mask.sum()), 1) for mask in patches], dtype=torch.int32, device=pixels.device)
        rows = torch.stack([bucketed_rows(side, *grid) for grid in shown]).to(pixels.device)
        x = self._embed(pixels, rows).take_along_dim(order.unsqueeze(-1), dim=1)
        num_pictures, length, size = x.shape
        starts = torch.arange(num_pictures + 1, dtype=torch.int32, device=x.device) * length
        x = self._normed(self.config.names.first_norm, x.reshape(num_pictures * length, size))
        for layer in self._layers:
            x = layer(x, starts, length, num_seen=seen)
        x = self._normed(self.config.names.last_norm, x).view(num_pictures, length, size)
        return x.take_along_dim(order.argsort(dim=1).unsqueeze(-1), dim=1)

    def _normed(self, name: str, x: Tensor) -> Tensor:
        """Applies one of the norms around the layers, if the tower has it."""
        norm = self._norms.get(name)
        return x if norm is None else norm(x)

    def _embed(self, pixels: Tensor, position_rows: Tensor | None = None) -> Tensor:
        """Returns patch plus position embeddings, [num_pictures, num_patches (+ 1 for the class token), hidden_size].
        `position_rows`: rows of the position table for each picture, int64 [num_pictures, num_patches]; None: the same
        for all."""
        import torch
        from torch.nn import functional

        patches = functional.conv2d(pixels, self._patches, self._patch_bias, stride=self.config.patch_size)
        x = patches.flatten(2).transpose(1, 2)
        if self._class is not None:
            tokens = (x, self._class.expand(x.size(0), 1, -1))
            x = torch.cat(tokens if self.config.class_token_is_last else tokens[::-1], dim=1)
        rows = self._position_rows if position_rows is None else position_rows
        return x + (self._positions if rows is None else self._positions[rows])


def shown_patches(side: int, rows: int, columns: int) -> Tensor:
    """Returns which patches of a square picture are in its first `rows` and `columns`, bool [side ** 2]."""
    import torch

    places = torch.arange(side)
    return ((places < rows)[:, None] & (places < columns)).flatten()


def bucketed_rows(side: int, rows: int, columns: int) -> Tensor:
    """Returns the row of the position table for each patch of a square picture, int64 [side ** 2]; 0 for patches
    beyond the first `rows` and `columns`, which are padding.

    Positions are fractions of rows and columns, in float32, and fall into one of `side` buckets; rounding puts some of
    them into the bucket before their own, as in transformers.
    """
    import torch

    boundaries = torch.arange(1 / side, 1.0, 1 / side)

    def buckets(count: int) -> Tensor:
        """Returns the bucket of each of `side` positions on an axis of which `count` show the picture."""
        fractions = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(count))
        return torch.bucketize(fractions.clamp(max=1.0 - 1e-6), boundaries, right=True)

    places = (buckets(rows)[:, None] * side + buckets(columns)).flatten()
    return places.where(shown_patches(side, rows, columns), 0)


class ViTLayer:
    """Pre-norm layer with bidirectional attention within each picture."""

    def __init__(self, name: str, config: ViTConfig, place: LayerPlacement) -> None:
        size, names = config.hidden_size, config.names
        attention, norms = f"{name}.{names.attention}", [f"{name}.{norm}" for norm in names.layer_norms]
        inputs = [Projection(f"{attention}.{part}_proj", size) for part in ("q", "k", "v")]
        output = Projection(f"{attention}.{names.attention_output}", size)
        up, down = Projection(f"{name}.mlp.fc1", config.intermediate_size), Projection(f"{name}.mlp.fc2", size)
        norm = RMSNorm if config.has_rms_norm else LayerNorm
        self._heads = config.num_heads
        self._first_norm = norm(norms[0], size, config.norm_eps, place)
        self._input = Linear(inputs, size, config.has_attention_bias, place, quantized=False)
        self._query_key_norms = tuple(
            RMSNorm(f"{attention}.{part}_norm", size, 1e-6, place) for part in "qk" if config.has_query_key_norm
        )
        self._output = Linear([output], size, True, place, quantized=False)
        self._second_norm = norm(norms[1], size, config.norm_eps, place)
        self._mlp = PlainMLP(up, down, size, True, place, activation=config.activation)
        scales = names.layer_scales if config.has_layer_scale else ()
        self._scales = {f"{name}.{scale}": place.empty(size) for scale in scales}
        self._attend = place.ops.ragged_attention

    @property
    def _parts(self) -> tuple[LayerNorm | RMSNorm | Linear | PlainMLP, ...]:
        return (self._first_norm, self._input, *self._query_key_norms, self._output, self._second_norm, self._mlp)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for part in self._parts:
            yield from part.destinations()
        yield from self._scales.items()

    def finish(self) -> None:
        """Folds the layer scales into the weights, and packs them."""
        if self._scales:
            of_attention, of_mlp = self._scales.values()
            self._output.scale(of_attention)
            self._mlp.scale(of_mlp)
        for part in self._parts:
            part.finish()

    def __call__(
        self,
        x: Tensor,
        starts: Tensor,
        length: int,
        angles: Tensor | None = None,
        *,
        num_seen: Tensor | None = None,
    ) -> Tensor:
        """Runs the layer: x [num_tokens, hidden_size] -> the same shape.

        `starts`: int32 [num_pictures + 1]; picture i has the tokens from starts[i] to starts[i + 1] (exclusive),
        `length` each. `angles`: rotation of queries and keys, [num_tokens, head_dim / 2]. `num_seen`: int32
        [num_pictures], leading tokens of each picture that its tokens attend to; None: all.
        """
        q, k, v = self._input(self._first_norm(x)).chunk(3, dim=-1)
        if self._query_key_norms:
            q, k = (norm(part.contiguous()) for norm, part in zip(self._query_key_norms, (q, k), strict=True))
        q, k, v = (part.view(x.size(0), self._heads, -1) for part in (q, k, v))
        if angles is not None:
            q, k = rotate_pairs(q, angles), rotate_pairs(k, angles)
        if q.stride() != v.stride():  # kernels take equal strides
            v = v.contiguous()
        attended = self._attend(q, k, v, starts, length, q.size(-1) ** -0.5, 0, num_seen)
        x = x + self._output(attended.flatten(1))
        return x + self._mlp(self._second_norm(x))
