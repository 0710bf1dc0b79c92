"""speculative_token_tree: the guesses to make, as paths of ranks, and the selection of those to verify.

(0, 2) is the third likeliest token after the likeliest one. All paths are guessed; a step verifies those that are most
likely to be accepted as a whole (EAGLE-2, arXiv 2406.16858, section 4.2), up to its maximum of drafts.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from quire.services.worker.step.drafts.tree_rows import ROOT, TreeRows
from quire.shared.columns import I32

MAX_NODES = 62  # verified per step: a mask has 64 bits, for a row and its visible tree nodes (kernels/reference)
MAX_PATHS, MAX_TEXT_LENGTH = 256, 16_384

Path = tuple[int, ...]


@dataclass(frozen=True)
class TokenTree:
    """Token tree of a drafting configuration as paths of ranks: parents before their children, siblings in the order of
    their ranks."""

    paths: tuple[Path, ...]

    @classmethod
    def parse(cls, text: str) -> TokenTree:
        """Parses a Python list of tuples of ranks and sorts it by depth. Raises ValueError if it is too long, not such
        a list, repeats a path, or lacks a path's parent."""
        if len(text) > MAX_TEXT_LENGTH:
            raise ValueError(f"{len(text)} characters, at most {MAX_TEXT_LENGTH}")
        try:
            values = ast.literal_eval(text.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise ValueError("not a list of paths such as [(0,), (1,), (0, 0)]") from None
        if not isinstance(values, list | tuple) or not 0 < len(values) <= MAX_PATHS:
            raise ValueError(f"must be a list of 1 to {MAX_PATHS} paths such as [(0,), (1,), (0, 0)]")
        paths = sorted({_path(value) for value in values}, key=lambda path: (len(path), path))
        if len(paths) < len(values):
            raise ValueError("a path occurs twice")
        known = {(), *paths}
        for path in paths:
            if path[:-1] not in known:
                raise ValueError(f"{path} has no parent {path[:-1]} in the list")
        return cls(tuple(paths))

    @property
    def num_nodes(self) -> int:
        return len(self.paths)

    @cached_property
    def parents(self) -> npt.NDArray[np.intp]:
        """Index of each node's parent, [num_nodes]; ROOT for first tokens."""
        index = {(): ROOT} | {path: i for i, path in enumerate(self.paths)}
        return np.array([index[path[:-1]] for path in self.paths], dtype=np.intp)

    @cached_property
    def levels(self) -> tuple[TreeLevel, ...]:
        """Nodes by depth, starting with the first tokens."""
        levels, inner = [], {path[:-1] for path in self.paths}
        above: list[Path] = [()]  # inner nodes of the level above
        for depth in range(1, max(map(len, self.paths)) + 1):
            at_depth = [path for path in self.paths if len(path) == depth]
            rows = np.array([above.index(path[:-1]) for path in at_depth], dtype=np.intp)
            ranks = np.array([path[-1] for path in at_depth], dtype=np.intp)
            is_inner = np.array([path in inner for path in at_depth], dtype=np.bool_)
            levels.append(TreeLevel(depth, self.paths.index(at_depth[0]), rows, ranks, is_inner))
            above = [path for path in at_depth if path in inner]
        return tuple(levels)

    @property
    def num_inner(self) -> int:
        """Number of nodes with children."""
        return len(self._inner_paths)

    @cached_property
    def _inner_paths(self) -> list[Path]:
        """Paths of the nodes with children, parents first, without the root."""
        return sorted({path[:-1] for path in self.paths} - {()}, key=lambda path: (len(path), path))

    @cached_property
    def inner_rows(self) -> TreeRows:
        """Tree structure of the inner nodes alone, after a first row for the last known token: 1 + num_inner rows."""
        index = {(): ROOT} | {path: i for i, path in enumerate(self._inner_paths)}
        parents = np.array([index[path[:-1]] for path in self._inner_paths], dtype=np.int32)
        return TreeRows.of(np.array([len(parents)], dtype=np.int32), np.zeros_like(parents), parents)

    @cached_property
    def inner_masks(self) -> npt.NDArray[np.int64]:
        """Visibility masks of the inner nodes among themselves, [num_inner]."""
        return self.inner_rows.masks(np.zeros(1 + self.num_inner, dtype=np.intp))[1:]

    def truncate(self, num_inner: int) -> TokenTree:
        """Returns the largest leading part of the tree with at most `num_inner` inner nodes, cached; their children are
        kept."""
        if self.num_inner <= num_inner:
            return self
        if num_inner not in self._parts:
            kept = {(), *self._inner_paths[:num_inner]}
            self._parts[num_inner] = TokenTree(tuple(path for path in self.paths if path[:-1] in kept))
        return self._parts[num_inner]

    @cached_property
    def _parts(self) -> dict[int, TokenTree]:
        """Cache of truncate(), by number of inner nodes."""
        return {}


@dataclass(frozen=True, slots=True)
class TreeLevel:
    """Nodes of one depth of a token tree."""

    depth: int  # starting at 1
    first: int  # index of the level's first node in the tree
    parents: npt.NDArray[np.intp]  # [num_nodes] parent of each, as index into the inner nodes of the level above
    ranks: npt.NDArray[np.intp]  # [num_nodes] number of likelier tokens with the same parent
    inner: npt.NDArray[np.bool_]  # [num_nodes] whether it has children

    @property
    def width(self) -> int:
        """Number of most likely tokens to compute for each inner node of the level above."""
        return int(self.ranks.max()) + 1

    @property
    def span(self) -> slice:
        return slice(self.first, self.first + len(self.ranks))


def select_best_nodes(scores: npt.NDArray[np.float32], counts: I32) -> npt.NDArray[np.bool_]:
    """Selects the `counts` nodes of each slot with the best `scores`: bool [num_slots, num_nodes].

    `scores`: logarithms of the probability that a whole path is accepted; a node's is never better than its parent's,
    which comes first among equals.
    """
    order = np.argsort(-scores, axis=1, kind="stable")
    places = np.empty_like(order)
    np.put_along_axis(places, order, np.arange(scores.shape[1])[None], axis=1)
    best: npt.NDArray[np.bool_] = (places < counts[:, None]) & np.isfinite(scores)
    return best


def _path(value: object) -> Path:
    """Returns `value` if it is a path: a non-empty tuple of ranks from 0 on. Raises ValueError otherwise."""
    if isinstance(value, tuple) and value and all(type(rank) is int and 0 <= rank < MAX_PATHS for rank in value):
        return value
    raise ValueError(f"{value!r} is not a path: expected a tuple of ranks from 0 on, one for each token")
