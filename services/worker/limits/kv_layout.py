"""KV groups of a model: which layers share block tables and pages (shared/kv/kv_specs.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from quire.shared.errors import InvalidArgument
from quire.shared.kv.kv_specs import (
    FULL,
    NOTHING,
    Cross,
    Full,
    KVGroup,
    KVSpec,
    Latent,
    LayerSpec,
    State,
    Window,
    cross_length,
    each,
    form_groups,
    reach,
)

MIN_WINDOW = 2  # a token and its predecessor


@dataclass(frozen=True)
class KVLayout:
    """KV groups of a model. A page holds a block of positions for all layers of one group; all groups' pages have the
    same size."""

    groups: tuple[KVGroup, ...]

    @classmethod
    def of(cls, layers: Sequence[LayerSpec], max_model_len: int, *, num_stages: int = 1) -> KVLayout:
        """Builds the layout of a model's layers from their specs. A window at least as long as max_model_len becomes
        full attention. With several stages each gets about as many layers of every group. Raises InvalidArgument for
        unsupported, mixed or repeated specs."""
        kept = [tuple(_effective_spec(spec, max_model_len) for spec in each(specs)) for specs in layers]
        first = each(layers[0])[0]
        for layer, specs in enumerate(layers):
            for spec in each(specs):
                _check(layer, spec, first)
            if len(set(kept[layer])) < len(kept[layer]):
                text = f"config.json: layer {layer} needs {', '.join(map(str, kept[layer]))}; each spec may occur once"
                raise InvalidArgument(text, field="model")
        return cls(form_groups(kept, by_turns=num_stages > 1))

    @cached_property
    def has_no_kv(self) -> bool:
        """Whether sequences have no blocks and are computed in one step."""
        return any(group.spec == NOTHING for group in self.groups)

    @cached_property
    def num_groups(self) -> int:
        """Number of groups whose blocks grow with a sequence: all but that of an encoder's output, which is the
        last."""
        return sum(not isinstance(group.spec, Cross) for group in self.groups)

    @cached_property
    def cross_length(self) -> int:
        """Most rows of an encoder's output that a sequence attends to; 0 without cross attention."""
        return cross_length(group.spec for group in self.groups)

    def cross_blocks(self, block_size: int) -> int:
        """Returns the blocks of the longest output of an encoder."""
        return -(-self.cross_length // block_size)

    @cached_property
    def layers_per_page(self) -> int:
        return max(len(group.layers) for group in self.groups)

    @cached_property
    def windows(self) -> tuple[tuple[int, int], ...]:
        """(group, length) of the groups that release blocks while a sequence grows; a state has length 1, the previous
        token."""
        reaches = ((i, reach(group.spec)) for i, group in enumerate(self.groups))
        return tuple((group, length) for group, length in reaches if length is not None)

    @cached_property
    def has_states(self) -> bool:
        return any(isinstance(group.spec, State) for group in self.groups)

    @cached_property
    def places(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """(group, place in the group's pages) of everything a layer stores, by layer, in the order of groups."""
        found: dict[int, list[tuple[int, int]]] = {}
        for i, group in enumerate(self.groups):
            for place, layer in enumerate(group.layers):
                found.setdefault(layer, []).append((i, place))
        return tuple(tuple(found[layer]) for layer in range(len(found)))

    def for_layers(self, layers: range) -> KVLayout:
        """Returns the layout of a stage that owns only `layers`: the same groups, possibly empty, with pages sized for
        its layers."""
        first = layers.start
        return KVLayout(
            tuple(
                KVGroup(group.spec, tuple(layer - first for layer in group.layers if layer in layers))
                for group in self.groups
            )
        )

    def max_positions(self, num_pages: int, block_size: int) -> int:
        """Returns the positions that a sequence can have with `num_pages` pages, windows releasing theirs. The
        scheduler computes it more precisely."""
        num_pages -= self.cross_blocks(block_size)
        in_windows = sum(-(-length // block_size) + 3 for _, length in self.windows)
        num_full = self.num_groups - len(self.windows)
        without_release = num_pages // self.num_groups
        with_release = (num_pages - in_windows) // num_full if num_full else (1 << 40) * (num_pages >= in_windows)
        return max(without_release, with_release) * block_size


def _effective_spec(spec: KVSpec, max_model_len: int) -> KVSpec:
    """Returns the spec for sequences of at most `max_model_len` tokens: full attention for a window that never ends."""
    return FULL if isinstance(spec, Window) and spec.length >= max_model_len else spec


def _check(layer: int, spec: KVSpec, first: KVSpec) -> None:
    """Validates the spec of a layer. `first`: spec of layer 0. Raises InvalidArgument for specs that are not supported,
    latent layers mixed with other layers, and windows that are too short."""
    if not isinstance(spec, Full | Window | Latent | State | Cross):
        raise InvalidArgument(f"config.json: layer {layer} needs {spec}, which is not supported", field="model")
    if spec != first and Latent in (type(spec), type(first)):
        text = f"config.json: layer {layer} keeps {spec} where layer 0 keeps {first}: pages have one size"
        raise InvalidArgument(text, field="model")
    if isinstance(spec, Window) and spec.length < MIN_WINDOW:
        text = f"config.json: layer {layer} has a window of {spec.length}, the least is {MIN_WINDOW}"
        raise InvalidArgument(text, field="model")


ONE_GROUP = KVLayout((KVGroup(FULL, ()),))
