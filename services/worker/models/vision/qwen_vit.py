"""Vision transformer of Qwen2-VL (arXiv 2409.12191), Qwen2.5-VL (2502.13923) and Qwen3-VL (2511.21631): pictures of any
size, rotated by row and column; squares of patches are merged into one row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire.services.worker.layers.feed_forward.mlp import MLP, PlainMLP
from quire.services.worker.layers.linear import Linear, Projection
from quire.services.worker.layers.norm.layer_norm import LayerNorm
from quire.services.worker.layers.norm.rms_norm import RMSNorm
from quire.services.worker.models.vision import patch_grid

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from quire.services.worker.layers.placement import Destination, LayerPlacement, Loadable
    from quire.services.worker.models.vision.patch_grid import PatchGrid

FEATURES = 64  # divides the padded width of feed-forward layers
MOST_PLANS = 32  # a plan of 4,784 patches has 1.6 MB
EPS = 1e-6  # of all norms
NAME = "visual"  # of the tower in checkpoints


class MergerNames(NamedTuple):
    """Names of a merger's parts in checkpoints."""

    norm: str
    first: str
    second: str


@dataclass(frozen=True, slots=True)
class QwenViTConfig:
    """Sizes and variants of the tower."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int  # pixels on a side
    frames_per_patch: int
    merge_size: int  # patches on a side of a merged square
    out_size: int  # width of the text model's embeddings
    activation: str
    theta: float
    merger: MergerNames
    mlp: tuple[str, str] = ("", "")  # names of the two linear layers; empty: gated, three layers
    has_rms_norm: bool = False  # else LayerNorm
    has_patch_bias: bool = False
    window: int = 0  # merged squares on a window's side; 0: no windows
    full_layers: tuple[int, ...] = ()  # layers without windows
    position_side: int = 0  # of the square of learned positions; 0: none
    deepstack: tuple[int, ...] = ()  # layers whose outputs are merged into further rows

    @property
    def unit(self) -> int:
        """Number of patches that are merged into one row."""
        return self.merge_size**2

    @property
    def row_width(self) -> int:
        """Width of the tower's output: a row of text embeddings, and one for each deepstack level."""
        return self.out_size * (1 + len(self.deepstack))


class Spans(NamedTuple):
    """Ranges of patches that attend to each other."""

    starts: Tensor  # int32 [num_spans + 1]
    longest: int  # patches of the longest one


class TowerPlan(NamedTuple):
    """Indices of one call, on the device; patches are in the order in which the layers see them."""

    frames: Spans
    windows: Spans
    cos_sin: Tensor  # float32 [num_patches, head_dim]
    order: Tensor | None  # int64 [num_squares]: squares, window after window; None: no windows
    inverse: Tensor | None  # int64 [num_squares] that undoes `order`
    learned: tuple[Tensor, Tensor] | None  # indices int64 and weights float32 of positions, [num_patches, 4]


class QwenViT:
    """Tower that turns patches of several pictures into merged rows."""

    def __init__(self, config: QwenViTConfig, place: LayerPlacement) -> None:
        size, patch = config.hidden_size, config.patch_size
        self.config = config
        self._patches: Tensor = place.empty(size, 3, config.frames_per_patch, patch, patch)
        self._patch_bias: Tensor | None = place.empty(size) if config.has_patch_bias else None
        side = config.position_side
        self._positions: Tensor | None = place.empty(side**2, size) if side else None
        self._layers = [QwenViTLayer(f"{NAME}.blocks.{index}", config, place) for index in range(config.num_layers)]
        self._merger = Merger(f"{NAME}.merger", config, place, joins_first=False)
        self._deepstack = [
            Merger(f"{NAME}.deepstack_merger_list.{index}", config, place, joins_first=True)
            for index in range(len(config.deepstack))
        ]
        self._device = place.device
        self._plans: dict[tuple[PatchGrid, ...], TowerPlan] = {}  # the last used one at the end

    @property
    def _parts(self) -> Sequence[Loadable]:
        return (*self._layers, self._merger, *self._deepstack)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield f"{NAME}.patch_embed.proj.weight", self._patches
        if self._patch_bias is not None:
            yield f"{NAME}.patch_embed.proj.bias", self._patch_bias
        if self._positions is not None:
            yield f"{NAME}.pos_embed.weight", self._positions
        for part in self._parts:
            yield from part.destinations()

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def __call__(self, patches: Tensor, grids: Sequence[PatchGrid]) -> Tensor:
        """Computes the merged rows of all items, [num_squares, row_width], squares from left to right and from top to
        bottom.

        patches: normalized, in merge order, [num_patches, 3 * frames_per_patch * patch_size**2].
        """
        import torch

        config, plan = self.config, self._plan(tuple(grids))
        x = self._embed(patches, plan)
        levels: list[Tensor] = []
        for index, layer in enumerate(self._layers):
            spans = plan.windows if config.window and index not in config.full_layers else plan.frames
            x = layer(x, spans, plan.cos_sin)
            if index in config.deepstack:
                levels.append(self._deepstack[config.deepstack.index(index)](x))
        rows = torch.cat((self._merger(x), *levels), dim=1)
        return rows if plan.inverse is None else rows.index_select(0, plan.inverse)

    def _embed(self, patches: Tensor, plan: TowerPlan) -> Tensor:
        """Returns the patches' embeddings with learned positions, [num_patches, hidden_size], in the plan's order."""
        from torch.nn import functional

        x = functional.linear(patches, self._patches.flatten(1), self._patch_bias)
        if plan.learned is not None:
            assert self._positions is not None
            indices, weights = plan.learned
            x = x + (self._positions[indices] * weights.unsqueeze(2)).sum(1).to(x.dtype)
        if plan.order is not None:
            x = x.view(-1, self.config.unit, x.size(1)).index_select(0, plan.order).flatten(0, 1)
        return x

    def _plan(self, grids: tuple[PatchGrid, ...]) -> TowerPlan:
        """Returns the indices of a call, which are kept for the last shapes: copies to the device would wait for what
        it computes."""
        plan = self._plans.pop(grids, None) or self._new_plan(grids)
        self._plans[grids] = plan
        if len(self._plans) > MOST_PLANS:
            del self._plans[next(iter(self._plans))]
        return plan

    def _new_plan(self, grids: tuple[PatchGrid, ...]) -> TowerPlan:
        """Computes the indices of one call on the host and copies them to the device."""
        import torch

        config, device = self.config, self._device
        lengths = [grid.rows * grid.columns for grid in grids for _ in range(grid.frames)]
        place = np.concatenate([patch_grid.positions(grid, config.merge_size) for grid in grids])
        order, window_lengths = None, lengths
        if config.window:
            order, counts = _windows(grids, config)
            window_lengths = [count * config.unit for count in counts]
            place = place.reshape(-1, config.unit, 2)[order].reshape(-1, 2)
        learned = None
        if config.position_side:
            parts = [patch_grid.interpolation(grid, config.merge_size, config.position_side) for grid in grids]
            indices, weights = (np.concatenate(part) for part in zip(*parts, strict=True))
            learned = torch.from_numpy(indices).to(device), torch.from_numpy(weights).to(device)
        return TowerPlan(
            _spans(lengths, device),
            _spans(window_lengths, device),
            _rotation(torch.from_numpy(place).to(device), config),
            None if order is None else torch.from_numpy(order).to(device),
            None if order is None else torch.from_numpy(np.argsort(order)).to(device),
            learned,
        )


def _windows(grids: Sequence[PatchGrid], config: QwenViTConfig) -> tuple[patch_grid.Indices, list[int]]:
    """Returns the squares of all items in the order of their windows, and each window's number of squares."""
    orders, counts, first = [], [], 0
    for grid in grids:
        order, of_grid = patch_grid.windows(grid, config.merge_size, config.window)
        orders.append(order + first)
        counts += of_grid
        first += len(order)
    return np.concatenate(orders), counts


def _spans(lengths: list[int], device: torch.device) -> Spans:
    """Returns consecutive ranges of patches with these lengths, on the device."""
    import torch

    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    return Spans(torch.from_numpy(starts).to(device), max(lengths))


def _rotation(place: Tensor, config: QwenViTConfig) -> Tensor:
    """Returns cosines, then sines, of each patch's angles, float32 [num_patches, head_dim]: the first half of the pairs
    turns by row, the second by column. `place`: int64 [num_patches, 2]."""
    import torch

    head_dim = config.hidden_size // config.num_heads
    exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32, device=place.device) / (head_dim // 2)
    angles = (place.float().unsqueeze(2) * (1.0 / config.theta**exponents)).flatten(1)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def _norm(name: str, size: int, config: QwenViTConfig, place: LayerPlacement) -> RMSNorm | LayerNorm:
    """Builds a norm of the kind that the tower has."""
    return RMSNorm(name, size, EPS, place) if config.has_rms_norm else LayerNorm(name, size, EPS, place)


class QwenViTLayer:
    """Pre-norm layer with bidirectional, rotated attention within spans of patches."""

    def __init__(self, name: str, config: QwenViTConfig, place: LayerPlacement) -> None:
        size = config.hidden_size
        self._heads = config.num_heads
        self._attend, self._rotate = place.ops.ragged_attention, place.ops.rotate_pairs
        self._first_norm = _norm(f"{name}.norm1", size, config, place)
        self._input = Linear([Projection(f"{name}.attn.qkv", 3 * size)], size, True, place, quantized=False)
        self._output = Linear([Projection(f"{name}.attn.proj", size)], size, True, place, quantized=False)
        self._second_norm = _norm(f"{name}.norm2", size, config, place)
        self._mlp = _mlp(f"{name}.mlp", config, place)

    @property
    def _parts(self) -> tuple[Loadable, ...]:
        return self._first_norm, self._input, self._output, self._second_norm, self._mlp

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        for part in self._parts:
            yield from part.destinations()

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def __call__(self, x: Tensor, spans: Spans, cos_sin: Tensor) -> Tensor:
        """Runs the layer: adds its outputs to x [num_patches, hidden_size] in place, and returns it."""
        qkv = self._input(self._first_norm(x)).view(x.size(0), 3, self._heads, -1)
        self._rotate(qkv[:, :2], cos_sin)
        q, k, v = qkv.unbind(1)
        attended = self._attend(q, k, v, spans.starts, spans.longest, q.size(-1) ** -0.5, 0)
        return x.add_(self._mlp(self._second_norm(self._output(attended.flatten(1)), x)))


class PaddedMLP:
    """Gated feed-forward layer whose features are padded with zeros to a multiple of FEATURES.

    For rows of other lengths cuBLAS takes a kernel for older GPUs: with Qwen2.5-VL's 3,420 features and a picture of
    1280 x 720 pixels 0.21 ms a product instead of about 0.08 (H200).
    """

    def __init__(self, name: str, config: QwenViTConfig, place: LayerPlacement) -> None:
        padded = -(-config.intermediate_size // FEATURES) * FEATURES
        self._size, self._down = config.intermediate_size, f"{name}.down_proj"
        self._mlp = MLP(name, config.hidden_size, padded, True, place, activation=config.activation)
        for _, destination in self._mlp.destinations():
            _tensor(destination).zero_()

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        """Yields the parts of the weights that are not padding."""
        for name, destination in self._mlp.destinations():
            axis = 1 if name == f"{self._down}.weight" else 0
            is_padded = name != f"{self._down}.bias"
            yield name, _tensor(destination).narrow(axis, 0, self._size) if is_padded else destination

    def finish(self) -> None:
        self._mlp.finish()

    def __call__(self, x: Tensor) -> Tensor:
        """Runs the layer: x [num_patches, hidden_size] -> the same shape."""
        return self._mlp(x)


def _tensor(destination: Destination) -> Tensor:
    """Returns the destination of a whole tensor; a tower is not split among ranks."""
    import torch

    assert isinstance(destination, torch.Tensor)
    return destination


def _mlp(name: str, config: QwenViTConfig, place: LayerPlacement) -> PaddedMLP | PlainMLP:
    """Builds the feed-forward layer of the kind that the tower has: gated, or two linear layers."""
    size, width, (first, second) = config.hidden_size, config.intermediate_size, config.mlp
    if not first:
        return PaddedMLP(name, config, place)
    up, down = Projection(f"{name}.{first}", width), Projection(f"{name}.{second}", size)
    return PlainMLP(up, down, size, True, place, activation=config.activation)


class Merger:
    """Two linear layers that turn a square of patches into one row of text embeddings."""

    def __init__(self, name: str, config: QwenViTConfig, place: LayerPlacement, *, joins_first: bool) -> None:
        """Builds the merger. `joins_first`: the norm is over the joined square, not over each patch."""
        names, size = config.merger, config.hidden_size * config.unit
        self._joined, self._joins_first = size, joins_first
        self._norm = _norm(f"{name}.{names.norm}", size if joins_first else config.hidden_size, config, place)
        first = Projection(f"{name}.{names.first}", size)
        second = Projection(f"{name}.{names.second}", config.out_size)
        self._mlp = PlainMLP(first, second, size, True, place, activation="gelu")

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from self._norm.destinations()
        yield from self._mlp.destinations()

    def finish(self) -> None:
        self._norm.finish()
        self._mlp.finish()

    def __call__(self, x: Tensor) -> Tensor:
        """Merges x [num_patches, hidden_size] -> [num_squares, out_size]."""
        if self._joins_first:
            return self._mlp(self._norm(x.view(-1, self._joined)))
        return self._mlp(self._norm(x).view(-1, self._joined))
