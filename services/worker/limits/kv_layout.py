"""Which layers share block tables and pages: the KV groups of a model (shared/kv/kv_specs.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from quire.shared.errors import InvalidArgument
from quire.shared.kv.kv_specs import (
    FULL,
    NOTHING,
    Full,
    KVGroup,
    KVSpec,
    Latent,
    LayerSpec,
    State,
    Window,
    each,
    form_groups,
    reach,
)

MIN_WINDOW = 2  # a token and the one before


@dataclass(frozen=True)
class KVLayout:
    """A page holds a block of positions for all layers of one group; every group has room for as many layers."""

    groups: tuple[KVGroup, ...]

    @classmethod
    def of(cls, layers: Sequence[LayerSpec], max_model_len: int, *, num_stages: int = 1) -> KVLayout:
        """Of a model's layers. A window that no sequence outgrows keeps everything. Several stages have about as many
        layers of each group. Raises InvalidArgument."""
        kept = [tuple(_effective_spec(spec, max_model_len) for spec in each(specs)) for specs in layers]
        first = each(layers[0])[0]
        for layer, specs in enumerate(layers):
            for spec in each(specs):
                _check(layer, spec, first)
            if len(set(kept[layer])) < len(kept[layer]):
                text = f"config.json: layer {layer} keeps {', '.join(map(str, kept[layer]))}: each spec once at most"
                raise InvalidArgument(text, field="model")
        return cls(form_groups(kept, by_turns=num_stages > 1))

    @cached_property
    def has_no_kv(self) -> bool:
        """Sequences have no blocks, and are computed whole."""
        return any(group.spec == NOTHING for group in self.groups)

    @cached_property
    def num_groups(self) -> int:
        return len(self.groups)

    @cached_property
    def layers_per_page(self) -> int:
        return max(len(group.layers) for group in self.groups)

    @cached_property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """(group, length) of those that give blocks back while a sequence goes on; a state's reaches to the token
        before."""
        reaches = ((i, reach(group.spec)) for i, group in enumerate(self.groups))
        return tuple((group, length) for group, length in reaches if length is not None)

    @cached_property
    def has_states(self) -> bool:
        return any(isinstance(group.spec, State) for group in self.groups)

    @cached_property
    def places(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """(group, place in its pages) of everything that a layer keeps, by layer; in the order of groups."""
        found: dict[int, list[tuple[int, int]]] = {}
        for i, group in enumerate(self.groups):
            for place, layer in enumerate(group.layers):
                found.setdefault(layer, []).append((i, place))
        return tuple(tuple(found[layer]) for layer in range(len(found)))

    def for_layers(self, layers: range) -> KVLayout:
        """What a stage that has these layers alone keeps: the same groups, of which some may have none of them. A page
        has room for as many as are there."""
        first = layers.start
        return KVLayout(
            tuple(
                KVGroup(group.spec, tuple(layer - first for layer in group.layers if layer in layers))
                for group in self.groups
            )
        )

    def max_positions(self, num_pages: int, block_size: int) -> int:
        """Positions that a sequence can have with so many pages. The scheduler reckons more closely."""
        in_windows = sum(-(-length // block_size) + 3 for _, length in self.windows)
        num_full = self.num_groups - len(self.windows)
        together = num_pages // self.num_groups
        behind = (num_pages - in_windows) // num_full if num_full else (1 << 40) * (num_pages >= in_windows)
        return max(together, behind) * block_size


def _effective_spec(spec: KVSpec, max_model_len: int) -> KVSpec:
    """What is kept of a sequence of at most so many tokens."""
    return FULL if isinstance(spec, Window) and spec.length >= max_model_len else spec


def _check(layer: int, spec: KVSpec, first: KVSpec) -> None:
    """`first`: of layer 0. Raises InvalidArgument."""
    if not isinstance(spec, Full | Window | Latent | State):
        raise InvalidArgument(f"config.json: layer {layer} keeps {spec}, which nothing here can", field="model")
    if spec != first and Latent in (type(spec), type(first)):
        text = f"config.json: layer {layer} keeps {spec} where layer 0 keeps {first}: pages have one size"
        raise InvalidArgument(text, field="model")
    if isinstance(spec, Window) and spec.length < MIN_WINDOW:
        text = f"config.json: layer {layer} has a window of {spec.length}, the least is {MIN_WINDOW}"
        raise InvalidArgument(text, field="model")


ONE_GROUP = KVLayout((KVGroup(FULL, ()),))
