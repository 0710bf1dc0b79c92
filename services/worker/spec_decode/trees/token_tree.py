"""speculative_token_tree: which guesses are made, as paths of ranks, and which of them are worth a look.

(0, 2) is the third likeliest token behind the likeliest one. All paths are guessed; a step verifies those with the best
chance to be right as a whole (EAGLE-2, arXiv 2406.16858, section 4.2), as many as it may have.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from quire.services.worker.step.drafts.tree_rows import ROOT, TreeRows
from quire.shared.columns import I32

MAX_NODES = 62  # of a step: a mask has 64 bits, for a row and what it may see of its tree (kernels/reference)
MAX_PATHS, MAX_TEXT_LENGTH = 256, 16_384

Path = tuple[int, ...]


@dataclass(frozen=True)
class TokenTree:
    """Parents come before their children, siblings in the order of their ranks."""

    paths: tuple[Path, ...]

    @classmethod
    def parse(cls, text: str) -> TokenTree:
        """From a list of tuples as Python writes it. Raises ValueError."""
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
                raise ValueError(f"{path} is there without {path[:-1]}")
        return cls(tuple(paths))

    @property
    def num_nodes(self) -> int:
        return len(self.paths)

    @cached_property
    def parents(self) -> npt.NDArray[np.intp]:
        """[num_nodes] index of each one's parent, ROOT for the first tokens."""
        index = {(): ROOT} | {path: i for i, path in enumerate(self.paths)}
        return np.array([index[path[:-1]] for path in self.paths], dtype=np.intp)

    @cached_property
    def levels(self) -> tuple[TreeLevel, ...]:
        """By depth, from the first tokens on."""
        found, inner = [], {path[:-1] for path in self.paths}
        above: list[Path] = [()]  # that have children, one level up
        for depth in range(1, max(map(len, self.paths)) + 1):
            here = [path for path in self.paths if len(path) == depth]
            rows = np.array([above.index(path[:-1]) for path in here], dtype=np.intp)
            ranks = np.array([path[-1] for path in here], dtype=np.intp)
            leads = np.array([path in inner for path in here], dtype=np.bool_)
            found.append(TreeLevel(depth, self.paths.index(here[0]), rows, ranks, leads))
            above = [path for path in here if path in inner]
        return tuple(found)

    @property
    def num_inner(self) -> int:
        """Nodes that others stand behind."""
        return len(self._inner_paths)

    @cached_property
    def _inner_paths(self) -> list[Path]:
        return sorted({path[:-1] for path in self.paths} - {()}, key=lambda path: (len(path), path))

    @cached_property
    def inner_rows(self) -> TreeRows:
        """Of the inner nodes alone, behind a first row."""
        index = {(): ROOT} | {path: i for i, path in enumerate(self._inner_paths)}
        parents = np.array([index[path[:-1]] for path in self._inner_paths], dtype=np.int32)
        return TreeRows.of(np.array([len(parents)], dtype=np.int32), np.zeros_like(parents), parents)

    @cached_property
    def inner_masks(self) -> npt.NDArray[np.int64]:
        """[num_inner] what each sees of the others."""
        return self.inner_rows.masks(np.zeros(1 + self.num_inner, dtype=np.intp))[1:]

    def truncate(self, num_inner: int) -> TokenTree:
        """As much of it as has at most so many inner nodes."""
        if self.num_inner <= num_inner:
            return self
        if num_inner not in self._parts:
            kept = {(), *self._inner_paths[:num_inner]}
            self._parts[num_inner] = TokenTree(tuple(path for path in self.paths if path[:-1] in kept))
        return self._parts[num_inner]

    @cached_property
    def _parts(self) -> dict[int, TokenTree]:
        """What truncate() has made, by inner nodes."""
        return {}


@dataclass(frozen=True, slots=True)
class TreeLevel:
    """The nodes of one depth."""

    depth: int  # from 1 on
    first: int  # index of the first of them in the tree
    parents: npt.NDArray[np.intp]  # [num_nodes] which of the inner nodes of the level above each stands behind
    ranks: npt.NDArray[np.intp]  # [num_nodes] how many tokens were likelier there
    inner: npt.NDArray[np.bool_]  # [num_nodes] whether others stand behind it

    @property
    def width(self) -> int:
        """Most likely tokens that are looked for behind each inner node of the level above."""
        return int(self.ranks.max()) + 1

    @property
    def span(self) -> slice:
        return slice(self.first, self.first + len(self.ranks))


def select_best_nodes(scores: npt.NDArray[np.float32], counts: I32) -> npt.NDArray[np.bool_]:
    """[num_slots, num_nodes] the `counts` nodes of each slot with the best `scores`, logarithms of the chance that all
    of a path is right: none is better than its parent's, which comes first among equals."""
    order = np.argsort(-scores, axis=1, kind="stable")
    places = np.empty_like(order)
    np.put_along_axis(places, order, np.arange(scores.shape[1])[None], axis=1)
    best: npt.NDArray[np.bool_] = (places < counts[:, None]) & np.isfinite(scores)
    return best


def _path(value: object) -> Path:
    if isinstance(value, tuple) and value and all(type(rank) is int and 0 <= rank < MAX_PATHS for rank in value):
        return value
    raise ValueError(f"{value!r} is no path: a tuple of ranks from 0 on, one for each token")
