"""What a layer keeps of the tokens before: its KV spec. Workers say it in their hello, schedulers plan by it.

Layers of one spec form groups of as many layers each; a page holds one block of tokens for all layers of a group, so
that all pages of a worker have one size, and a sequence has a block table for each group.
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
    """Keys and values of the last `length` tokens, the present one included: what lies before is never read again."""

    length: int

    def __str__(self) -> str:
        return f"window({self.length})"


@dataclass(frozen=True, slots=True)
class Latent:
    """One compressed vector of every token, and the part of its key that is rotated."""

    rank: int
    rope: int

    def __str__(self) -> str:
        return f"latent({self.rank}, {self.rope})"


@dataclass(frozen=True, slots=True)
class State:
    """A state of fixed size, in bytes a layer, that every token changes.

    A page holds it as it is behind the last token computed in its block, and so, from then on, behind the block's last.
    """

    num_bytes: int

    def __str__(self) -> str:
        return f"state({self.num_bytes})"


@dataclass(frozen=True, slots=True)
class Nothing:
    """No token is read by a later step: a sequence is computed whole, in one step, and has no blocks."""

    def __str__(self) -> str:
        return "nothing"


KVSpec = Full | Window | Latent | State | Nothing
LayerSpec = KVSpec | tuple[KVSpec, ...]  # what a layer keeps; of several, all
FULL, NOTHING = Full(), Nothing()
STATE_REACH = 2  # a token changes what the one before has left, in the page of its own position
ONE_FULL: tuple[KVSpec, ...] = (FULL,)  # specs of the groups of most models


def each(kept: LayerSpec) -> tuple[KVSpec, ...]:
    """The specs of a layer."""
    return kept if isinstance(kept, tuple) else (kept,)


def reach(spec: KVSpec) -> int | None:
    """Positions whose pages a token reads or writes, its own included; None: all before it."""
    if isinstance(spec, Window):
        return spec.length
    return STATE_REACH if isinstance(spec, State) else None


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share their block tables, in ascending order. One that keeps several things is in several groups."""

    spec: KVSpec
    layers: tuple[int, ...]


def form_groups(layers: Sequence[LayerSpec], *, by_turns: bool = False) -> tuple[KVGroup, ...]:
    """Layers of one spec together, cut so that all groups have room for as many layers; full ones first. `by_turns`:
    groups of one spec take its layers by turns, not neighbours.

    Few groups make few block tables, small ones waste few places in their pages: of all sizes that leave at most an
    eighth of the places empty the largest is taken, which is the exact one where the numbers of layers divide.
    """
    kinds: dict[KVSpec, list[int]] = {}
    for layer, kept in enumerate(layers):
        for spec in each(kept):
            kinds.setdefault(spec, []).append(layer)
    places = sum(map(len, kinds.values()))
    size = next(size for size in range(len(layers), 0, -1) if _waste(kinds.values(), size) * 8 <= places)
    ordered = sorted(kinds, key=lambda spec: reach(spec) is not None)
    return tuple(KVGroup(spec, part) for spec in ordered for part in _cut(kinds[spec], size, by_turns=by_turns))


def _cut(layers: Sequence[int], size: int, *, by_turns: bool) -> Iterable[tuple[int, ...]]:
    """Into groups of at most so many."""
    if not by_turns:
        return (tuple(layers[start : start + size]) for start in range(0, len(layers), size))
    num_groups = -(-len(layers) // size)
    return (tuple(layers[first::num_groups]) for first in range(num_groups))


def _waste(kinds: Iterable[Sequence[int]], size: int) -> int:
    """Places of layers that stay empty in pages for `size` of them."""
    return sum(-len(layers) % size for layers in kinds)
