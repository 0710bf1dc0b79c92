"""Draft trees: their notation, the selected nodes, the accepted path, and refused configurations."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
import torch

from quire.services.worker.sampling.accept import accept_drafts
from quire.services.worker.sampling.features.output_tails import BoundTails, OutputTails
from quire.services.worker.spec_decode.config import parse
from quire.services.worker.spec_decode.methods.grammar import _with_trees
from quire.services.worker.spec_decode.trees.token_tree import TokenTree, select_best_nodes
from quire.services.worker.step.drafts.drafts import REJECTED, DraftRows, Drafts
from quire.services.worker.step.drafts.tree_rows import NO_TOKEN, ROOT, TokenMoves, TreeRows
from quire.shared.errors import InvalidArgument
from tests.spec_decode.methods import METHODS, TREES
from tests.spec_decode.pair import Pair, build
from tests.spec_decode.questions import questions

WORKED = TokenTree.parse("[(0, 0), (0,), (1, 0, 2), (1,), (1, 0)]")


def test_a_tree_is_parsed_in_order_of_depth() -> None:
    assert WORKED.paths == ((0,), (1,), (0, 0), (1, 0), (1, 0, 2))
    assert WORKED.parents.tolist() == [ROOT, ROOT, 0, 1, 3]
    assert WORKED.num_inner == 3
    assert [level.span for level in WORKED.levels] == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert [level.parents.tolist() for level in WORKED.levels] == [[0, 0], [0, 1], [1 - 1]]
    assert [level.inner.tolist() for level in WORKED.levels] == [[True, True], [False, True], [False]]
    assert [level.width for level in WORKED.levels] == [2, 1, 3]
    assert WORKED.truncate(1).paths == ((0,), (1,), (0, 0))
    assert WORKED.truncate(3) is WORKED


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"speculative_token_tree": "[(0,), (1, 0)]"}, r"\(1, 0\) has no parent \(1,\)"),
        ({"speculative_token_tree": "[(0,), (0,)]"}, "a path occurs twice"),
        ({"speculative_token_tree": "[(0,), (-1,)]"}, r"\(-1,\) is not a path"),
        ({"speculative_token_tree": "[(0,), 1]"}, "1 is not a path"),
        ({"speculative_token_tree": "[(0,), (True,)]"}, "is not a path"),
        ({"speculative_token_tree": "[]"}, "must be a list of 1 to 256 paths"),
        ({"speculative_token_tree": "[(0,), (1)"}, "not a list of paths"),
        ({"speculative_token_tree": "[" * 9000}, "not a list of paths"),
        ({"speculative_token_tree": "[(0,)" + " " * 17_000 + "]"}, "17006 characters, at most 16384"),
        (
            {"speculative_token_tree": "[(0,)]"},
            "num_speculative_tokens: 2 drafts of a speculative_token_tree of 1 paths",
        ),
        ({"speculative_token_tree": str([(i,) for i in range(80)]), "num_speculative_tokens": 63}, "at most 62"),
        ({"speculative_token_tree": "[(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)]"}, "3 paths have children"),
        ({"speculative_token_tree": "[(0,), (1,)]", "rejection_sample_method": "standard"}, "a rule for chains"),
        (
            {"speculative_token_tree": "[(0,), (1,)]", "method": "ngram"},
            "ngram drafts no trees; eagle, eagle3, medusa do",
        ),
    ],
)
def test_invalid_trees_are_refused(changes: dict[str, Any], text: str) -> None:
    config = {"method": "eagle", "num_speculative_tokens": 2, "model": "somewhere"} | changes
    with pytest.raises(InvalidArgument, match=text) as caught:
        parse(json.dumps(config))
    assert caught.value.field == "speculative_config"


@pytest.mark.parametrize(
    ("config", "settings", "text"),
    [
        ("eagle_tree", {"batch_invariant": True}, "with batch_invariant drafts are chains"),
        ("eagle_tree", {"tensor_parallel_size": 2}, "num_ranks is 2"),
        ("medusa_tree", {}, "a path of 5 tokens, and 4 heads guess one each"),
    ],
)
def test_settings_without_tree_support_are_refused_at_start(config: str, settings: dict[str, Any], text: str) -> None:
    deep = {"speculative_token_tree": str([(0,) * depth for depth in range(1, 6)]), "num_speculative_tokens": 5}
    with pytest.raises(InvalidArgument, match=text):
        build(TREES[config] | ({} if settings else deep), **settings)


def random_parents(draw: np.random.Generator, count: int) -> list[int]:
    return [int(draw.integers(-1, node)) for node in range(count)]


def test_the_selected_nodes_form_a_tree() -> None:
    draw = np.random.default_rng(5)
    for _ in range(200):
        parents = random_parents(draw, 12)
        scores = np.zeros((3, 12), dtype=np.float32)
        for node, parent in enumerate(parents):
            chance = draw.choice([0.0, -0.5, -2.0, -np.inf], 3)
            scores[:, node] = chance + (0 if parent == ROOT else scores[:, parent])
        counts = np.array([1, 5, 12], dtype=np.int32)
        taken = select_best_nodes(scores, counts)
        for slot in range(3):
            assert taken[slot].sum() == min(counts[slot], np.isfinite(scores[slot]).sum())
            assert all(
                parent == ROOT or taken[slot, parent] for node, parent in enumerate(parents) if taken[slot, node]
            )
            left = scores[slot][~taken[slot] & np.isfinite(scores[slot])]
            assert not len(left) or scores[slot][taken[slot]].min() >= left.max()


def said_of(tokens: list[int], parents: list[int], chosen: list[int]) -> list[int]:
    """Returns the rows of the accepted path in order, by the rule of sequential sampling."""
    path, row = [0], 0
    while True:
        behind = [n + 1 for n, parent in enumerate(parents) if parent + 1 == row and tokens[n] == chosen[row]]
        if not behind:
            return path
        row = behind[0]
        path.append(row)


def test_the_accepted_path_is_kept_and_compacted() -> None:
    """Compares many slots at once, some without drafts, with the rule applied token by token."""
    draw = np.random.default_rng(1)
    for _ in range(50):
        counts = draw.integers(0, 7, 5).astype(np.int32)
        counts[2] = 6
        trees = [random_parents(draw, count) for count in counts]
        tokens = [[0] * count for count in counts]
        for parents, of_slot in zip(trees, tokens, strict=True):
            for node, parent in enumerate(parents):  # siblings differ
                of_slot[node] = sum(other == parent for other in parents[:node])
        slots = np.array([0, 2, 3, 5, 8])
        some = counts > 0
        drafts = Drafts(
            slots[some],
            counts[some],
            np.array([*itertools.chain(*tokens)], dtype=np.int32),
            parents=np.array([*itertools.chain(*trees)], dtype=np.int32),
        )
        rows = DraftRows.of(slots, counts, drafts)
        chosen = torch.from_numpy(draw.integers(0, 3, int((counts + 1).sum())).astype(np.int32))
        last = torch.full((11,), -7, dtype=torch.int32)
        found = accept_drafts(chosen, rows, last, scratch_slot=10).numpy()
        of_slots = np.split(found, rows.first_rows[1:])
        said = np.split(chosen.numpy(), rows.first_rows[1:])
        paths = [said_of(*given) for given in zip(tokens, trees, [c.tolist() for c in said], strict=True)]
        for slot, path, got, of_slot in zip(slots, paths, of_slots, said, strict=True):
            assert np.flatnonzero(got != REJECTED).tolist() == path
            assert got[path].tolist() == of_slot[path].tolist()
            assert last[slot] == of_slot[path[-1]]
        assert rows.counted(found).tolist() == [len(path) for path in paths]
        moved = TokenMoves.of(np.flatnonzero(found != REJECTED), rows.first_rows, rows.counted(found))
        places = np.arange(len(found))
        if moved is not None:
            places[moved.targets] = moved.sources
        for first, path in zip(rows.first_rows, paths, strict=True):
            assert (places[first : first + len(path)] - first).tolist() == path


def test_rows_see_their_own_path_only() -> None:
    rows = TreeRows.of(np.array([4, 0, 2], dtype=np.int32), np.arange(10, 16), np.array([ROOT, ROOT, 0, 2, ROOT, 0]))
    assert rows.depths.tolist() == [0, 1, 1, 2, 3, 0, 0, 1, 2]
    assert rows.preceding_drafts.tolist() == [
        [NO_TOKEN] * 3,
        [10, NO_TOKEN, NO_TOKEN],
        [11, NO_TOKEN, NO_TOKEN],
        [10, 12, NO_TOKEN],
        [10, 12, 13],
        [NO_TOKEN] * 3,
        [NO_TOKEN] * 3,
        [14, NO_TOKEN, NO_TOKEN],
        [14, 15, NO_TOKEN],
    ]
    masks = rows.masks(np.array([0, 0, 0, 0, 0, 5, 6, 6, 6]))
    hidden = [[bit for bit in range(64) if not int(mask) >> bit & 1] for mask in masks]
    assert hidden == [[], [], [1], [1], [2], [], [], [], []]


def test_tails_collect_a_path_from_scattered_rows() -> None:
    tails = OutputTails(2, torch.device("cpu"))
    tails.start_slot(0, np.array([1, 2, 3], dtype=np.int32), 3)
    tails.start_slot(1, np.array([7], dtype=np.int32), 3)
    bound = BoundTails(tails, np.arange(6), np.array([0, 0, 0, 0, 1, 1]), torch.device("cpu"))
    bound.sampled(torch.tensor([4, -1, -1, 5, 8, -1], dtype=torch.int32))
    assert tails.tokens.tolist() == [[3, 4, 5], [-2, 7, 8]]


def test_forced_tokens_are_chains_among_trees() -> None:
    trees = Drafts(np.array([1]), np.array([3], dtype=np.int32), np.array([5, 6, 7]), parents=np.array([ROOT, ROOT, 1]))
    found = {0: np.array([8, 9]), 1: np.array([5, 6, 7]), 4: np.array([3, 3])}
    drafts = _with_trees(found, trees)
    assert drafts is not None
    assert drafts.parents is not None
    assert drafts.parents.tolist() == [ROOT, 0, ROOT, ROOT, 1, ROOT, 0]


def test_a_chain_written_as_a_tree_drafts_what_a_chain_drafts() -> None:
    chain = METHODS["eagle"]
    counts = []
    for config in (chain, chain | {"speculative_token_tree": str([(0,) * depth for depth in range(1, 5)])}):
        pair = Pair(build(config))
        for seed, prompt in enumerate(questions()):
            pair.ask(prompt, 30, temperature=0.08 * seed, seed=seed)
        pair.run()
        found = pair.core.speculation.counts
        counts.append((found.drafts, found.draft_tokens, found.accepted_tokens))
    assert counts[0] == counts[1]
