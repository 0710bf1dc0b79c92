"""KV specs: what a layer keeps of past tokens. Workers report them in their hello; schedulers plan by them.

Layers with the same spec form groups of equal size. A page holds one block of tokens for all layers of a group, so
that all pages of a worker have the same size, and a sequence has one block table per group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Full:
    """Keys and values of every token."""

    def __str__(self) -> str:
        return "full"


@dataclass(frozen=True, slots=True)
class Window:
    """Keys and values of the last `length` tokens, the current one included; older ones are never read again."""

    length: int

    def __str__(self) -> str:
        return f"window({self.length})"


@dataclass(frozen=True, slots=True)
class Latent:
    """One compressed vector of every token, and the rotary part of its key (MLA)."""

    rank: int
    rope: int

    def __str__(self) -> str:
        return f"latent({self.rank}, {self.rope})"


@dataclass(frozen=True, slots=True)
class State:
    """A recurrent state of fixed size (bytes per layer) that every token updates.

    A page holds the state after the last token computed in its block, and thus finally the state after the block's
    last token.
    """

    num_bytes: int

    def __str__(self) -> str:
        return f"state({self.num_bytes})"


@dataclass(frozen=True, slots=True)
class Cross:
    """Keys and values of an encoder's output, at most `length` rows. They are written once for each item that is
    encoded, never grow, and are shared by all sequences with the item."""

    length: int

    def __str__(self) -> str:
        return f"cross({self.length})"


@dataclass(frozen=True, slots=True)
class Nothing:
    """No KV: a sequence is computed completely in one step and has no blocks."""

    def __str__(self) -> str:
        return "nothing"


KVSpec = Full | Window | Latent | State | Cross | Nothing
LayerSpec = KVSpec | tuple[KVSpec, ...]  # one spec, or several that apply together
FULL, NOTHING = Full(), Nothing()
STATE_REACH = 2  # a token reads the state of the previous position and writes its own
ONE_FULL: tuple[KVSpec, ...] = (FULL,)  # specs of the groups of most models


def without_cross(specs: Sequence[KVSpec]) -> tuple[KVSpec, ...]:
    """Returns the specs of the groups whose blocks grow with the sequence."""
    return tuple(spec for spec in specs if not isinstance(spec, Cross))


def cross_length(specs: Iterable[KVSpec]) -> int:
    """Returns the most rows of an encoder's output that a sequence attends to; 0 for models without cross attention."""
    return max((spec.length for spec in specs if isinstance(spec, Cross)), default=0)


def each(kept: LayerSpec) -> tuple[KVSpec, ...]:
    """Returns the specs of a layer as a tuple."""
    return kept if isinstance(kept, tuple) else (kept,)


def reach(spec: KVSpec) -> int | None:
    """Returns the number of positions whose pages a token reads or writes, its own included; None: all earlier ones."""
    if isinstance(spec, Window):
        return spec.length
    return STATE_REACH if isinstance(spec, State) else None


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share their block tables, ascending. A layer with several specs is in several groups."""

    spec: KVSpec
    layers: tuple[int, ...]


def form_groups(layers: Sequence[LayerSpec], *, by_turns: bool = False) -> tuple[KVGroup, ...]:
    """Groups the layers by spec into groups of equal capacity, full attention first and encoder outputs last.
    `by_turns`: groups of one spec take its layers round-robin instead of consecutively.

    Fewer groups mean fewer block tables; smaller groups waste less space in their pages. Chooses the largest size
    that leaves at most an eighth of the places empty, which is exact where the numbers of layers divide evenly.
    """
    kinds: dict[KVSpec, list[int]] = {}
    for layer, kept in enumerate(layers):
        for spec in each(kept):
            kinds.setdefault(spec, []).append(layer)
    places = sum(map(len, kinds.values()))
    size = next(size for size in range(len(layers), 0, -1) if _waste(kinds.values(), size) * 8 <= places)
    ordered = sorted(kinds, key=lambda spec: (isinstance(spec, Cross), reach(spec) is not None))
    return tuple(KVGroup(spec, part) for spec in ordered for part in _cut(kinds[spec], size, by_turns=by_turns))


def _cut(layers: Sequence[int], size: int, *, by_turns: bool) -> Iterable[tuple[int, ...]]:
    """Splits layers into groups of at most `size`: consecutive layers, or with `by_turns` round-robin."""
    if not by_turns:
        return (tuple(layers[start : start + size]) for start in range(0, len(layers), size))
    num_groups = -(-len(layers) // size)
    return (tuple(layers[first::num_groups]) for first in range(num_groups))


def _waste(kinds: Iterable[Sequence[int]], size: int) -> int:
    """Returns the number of unused layer places with `size` layers per page."""
    return sum(-len(layers) % size for layers in kinds)
