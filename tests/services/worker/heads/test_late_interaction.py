"""Late interaction: cached query vectors and document scores equal those of a direct computation."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from quire.services.worker.heads import max_sim
from quire.services.worker.heads.max_sim import TokenVectors
from quire.shared import columns
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1.pooling_pb2 import POOLER_ALL, POOLER_LAST, PoolingParams
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.heads.test_pooling import pooled
from tests.services.worker.models.test_logits import prompt
from tests.services.worker.plans import New
from tests.services.worker.replica_internals import runner_of
from tests.services.worker.rig import Rig

Make = Callable[[str], Checkpoint]
SIZE = 6  # elements of a token's vector
VECTORS = PoolingParams(pooler=POOLER_ALL)
MAX_ERROR = 2e-5


def texts(lengths: list[int], size: int = 5) -> TokenVectors:
    ends = np.cumsum([0, *lengths])
    vectors = torch.randn(int(ends[-1]), size, generator=torch.Generator().manual_seed(len(lengths)))
    return TokenVectors(vectors, ends[:-1], np.array(lengths))


def plain(query: torch.Tensor, document: torch.Tensor) -> float:
    return float((query @ document.T).amax(1).sum())


def parts(made: TokenVectors) -> list[torch.Tensor]:
    return list(made.vectors.split(made.lengths.tolist()))


@pytest.mark.parametrize("most", [1 << 24, 60, 1])
@pytest.mark.parametrize(
    ("of_queries", "of_documents", "asked"),
    [
        ([4], [1], [0]),
        ([4], [3, 9, 1, 200, 7, 7, 90], [0] * 7),
        ([1, 5, 2], [3, 9, 1, 40, 7], [2, 0, 1, 1, 0]),
        ([2, 30], [64] * 5, [0, 1, 0, 1, 1]),
    ],
)
def test_batched_scores_equal_those_of_single_pairs(
    of_queries: list[int], of_documents: list[int], asked: list[int], most: int
) -> None:
    """Covers batches that hold one document only, or a part of its query's vectors."""
    queries, documents = texts(of_queries), texts(of_documents)
    found = max_sim.max_sim(queries.select(np.array(asked)), documents, most)
    wanted = [plain(parts(queries)[query], one) for query, one in zip(asked, parts(documents), strict=True)]
    assert torch.allclose(found, torch.tensor(wanted), atol=1e-5)


# A decoder with late interaction.


def comparing(made: Checkpoint, folder: Path, **named: Any) -> torch.Tensor:
    """Writes a model as PyLate publishes it and returns its projection."""
    shutil.copytree(made.folder, folder, dirs_exist_ok=True)
    hidden = made.model.config.hidden_size
    projection = torch.randn(SIZE, hidden, generator=torch.Generator().manual_seed(3))
    (folder / "1_Dense").mkdir()
    dense = {"in_features": hidden, "out_features": SIZE, "bias": False, "activation_function": "nn.Identity"}
    (folder / "1_Dense" / "config.json").write_text(json.dumps(dense))
    save_file({"linear.weight": projection}, folder / "1_Dense" / "model.safetensors")
    types = {"sentence_transformers.models.Transformer": "", "pylate.models.Dense.Dense": "1_Dense"}
    (folder / "modules.json").write_text(json.dumps([{"type": kind, "path": path} for kind, path in types.items()]))
    values = {"query_length": 32, "document_length": 64, "do_query_expansion": False, **named}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(values))
    return projection


class Comparing:
    """A rig with such a model, and a direct computation of its vectors."""

    def __init__(self, made: Checkpoint, folder: Path, **settings: Any) -> None:
        self.projection = comparing(made, folder)
        self.model = made.model
        self.rig = Rig(folder, record_logits=False, **settings)

    def vectors(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            states = self.model.model(torch.tensor([tokens])).last_hidden_state[0].float()
        return torch.nn.functional.normalize(states @ self.projection.T, dim=1)

    def score(self, query: list[int], document: list[int]) -> float:
        return plain(self.vectors(query), self.vectors(document))


def name(number: int) -> bytes:
    return hashlib.sha256(bytes([number])).digest()


def query(slot: int, tokens: list[int], number: int = 0, **fields: Any) -> New:
    return New(slot, tokens, pooling=VECTORS, query_id=name(number), is_query=True, **fields)


def document(slot: int, tokens: list[int], number: int = 0, **fields: Any) -> New:
    return New(slot, tokens, **{"pooling": VECTORS, "query_id": name(number), **fields})


def scores(rig: Rig) -> dict[int, float]:
    found = pooled(rig)
    assert all(len(values) == 1 for values in found.values())
    return {slot: float(values[0]) for slot, values in found.items()}


def close(found: dict[int, float], wanted: dict[int, float]) -> bool:
    return found == pytest.approx(wanted, abs=MAX_ERROR)


def run_beside(rig: Rig, query_tokens: list[int], documents: list[list[int]]) -> dict[int, float]:
    """Runs slots 0 and 5 that generate, 3 with a query in chunks, and 1, 2 and 4 with documents."""
    rig.step([New(0, prompt(7, seed=1)), query(3, query_tokens)], {0: 7, 3: 4})
    assert not rig.last_result.HasField("pooled")
    rig.step([document(1, documents[0]), document(2, documents[1])], {1: 9, 2: 6, 3: len(query_tokens) - 4})
    found = scores(rig)
    rig.step([New(5, prompt(5, seed=2)), document(4, documents[2])], {1: 4, 4: 3, 5: 5}, released=[2, 3])
    found |= scores(rig)
    rig.step(counts={4: 8}, released=[1])
    return found | scores(rig)


def test_documents_are_scored_in_steps_that_also_generate(
    checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores documents computed in chunked steps, after the query's slot was reused."""
    made = checkpoint("qwen3-tied")
    both = Comparing(made, tmp_path)
    asked, documents = prompt(9, seed=3), [prompt(13, seed=4), prompt(6, seed=5), prompt(11, seed=6)]
    found = run_beside(both.rig, asked, documents)
    assert close(found, {slot: both.score(asked, one) for slot, one in zip((1, 2, 4), documents, strict=True)})
    calm = Rig(tmp_path, record_logits=False)
    calm.step([New(0, prompt(7, seed=1))], {0: 7})
    for _ in range(3):
        calm.step()
    assert both.rig.tokens(0) == calm.tokens(0)


def test_a_step_may_hold_several_queries_and_documents(checkpoint: Make, tmp_path: Path) -> None:
    """Mixes in requests for vectors; documents may precede their query in slot order."""
    both = Comparing(checkpoint("llama"), tmp_path, max_num_batched_tokens=256)
    asked, documents = [prompt(5, seed=1), prompt(8, seed=2)], [prompt(9 + i, seed=3 + i) for i in range(3)]
    new = [document(0, documents[0], 1), query(1, asked[0], 0), document(2, documents[1], 0)]
    new += [query(3, asked[1], 1), New(4, documents[0], pooling=VECTORS), document(5, documents[2], 1)]
    both.rig.step(new, {one.slot: len(one.tokens) for one in new})
    found = pooled(both.rig)
    assert sorted(found) == [0, 2, 4, 5]
    wanted = {0: (1, 0), 2: (0, 1), 5: (1, 2)}
    for slot, (of_query, of_document) in wanted.items():
        assert found[slot].tolist() == pytest.approx(
            [both.score(asked[of_query], documents[of_document])], abs=MAX_ERROR
        )
    assert np.allclose(found[4], both.vectors(documents[0]).flatten().numpy(), atol=MAX_ERROR)


def test_tokens_without_a_vector_do_not_count(checkpoint: Make, tmp_path: Path) -> None:
    both = Comparing(checkpoint("llama"), tmp_path)
    asked, tokens, shown = prompt(5), prompt(9, seed=2), (0, 2, 3, 7)
    both.rig.step([query(0, asked), document(1, tokens, pooled_tokens=shown)], {0: 5, 1: 9})
    assert close(scores(both.rig), {1: plain(both.vectors(asked), both.vectors(tokens)[list(shown)])})


def refusals(rig: Rig) -> dict[int, str]:
    return {failure.slot: failure.error.message for failure in rig.last_result.failures}


def test_a_missing_query_fails_its_documents_alone(checkpoint: Make, tmp_path: Path) -> None:
    """Covers queries that were never sent, were dropped, or belong to an earlier attachment."""
    both = Comparing(checkpoint("llama"), tmp_path)
    rig, asked, tokens = both.rig, prompt(5), prompt(7, seed=2)
    rig.step([query(0, asked), document(1, tokens), document(2, tokens, 1)], {0: 5, 1: 7, 2: 7})
    assert close(scores(rig), {1: both.score(asked, tokens)})
    assert refusals(rig) == {2: f"query_id: the vectors of query {name(1).hex()} are not cached"}
    plan = rig.scheduler.plan([document(3, tokens)], {3: 7})
    plan.dropped_queries = name(0)
    rig.last_result = rig.execute(plan)
    assert list(refusals(rig)) == [3]
    rig.scheduler.take(rig.last_result)
    for forget in (rig.replica.reset_cache, rig.end_epoch):
        rig.end_epoch()
        rig.step([query(0, asked), document(1, tokens)], {0: 5, 1: 7})
        assert close(scores(rig), {1: both.score(asked, tokens)})
        forget()
        new = document(2, tokens)
        rig.step([new], {2: 7})
        assert list(refusals(rig)) == [2]


def test_queries_beyond_the_cache_capacity_are_refused(checkpoint: Make, tmp_path: Path) -> None:
    """The worker counts tokens like the scheduler, from admission until the query is dropped or cancelled."""
    both = Comparing(checkpoint("llama"), tmp_path, query_cache_mb=1)
    rig, late = both.rig, runner_of(both.rig.replica).heads._late  # type: ignore[attr-defined]
    assert rig.replica.num_query_vectors == (1 << 20) // (4 * SIZE)
    late.max_query_vectors = 12
    rig.step([query(0, prompt(5)), query(1, prompt(6), 1)], {0: 5, 1: 2})
    rig.step([query(2, prompt(4), 2)], {2: 4})
    assert (
        refusals(rig)[2]
        == "query_id: a query of 4 tokens in addition to 11 of other queries exceeds the capacity of 12"
    )
    rig.step([query(2, prompt(7), 2)], {2: 7}, released=[1, 2])  # the second one was not computed: its capacity is free
    assert not refusals(rig)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"query_id": b"short"}, "query_id: 5 bytes, expected 32"),
        ({"pooling": PoolingParams(pooler=POOLER_LAST)}, "needs a vector per token"),
        (
            {"pooling": PoolingParams(pooler=POOLER_ALL, dimensions=3)},
            "3 elements cannot be compared with the query's 6",
        ),
        ({"pooling": PoolingParams(pooler=POOLER_ALL, dimensions=7)}, "7 is more than the model's 6"),
        ({"pooled_tokens": (0, 7)}, "pooled_tokens must ascend below 7"),
    ],
)
def test_incompatible_requests_fail_alone(checkpoint: Make, tmp_path: Path, fields: dict[str, Any], text: str) -> None:
    both = Comparing(checkpoint("llama"), tmp_path)
    asked, tokens = prompt(5), prompt(7, seed=2)
    new = [query(0, asked), document(1, tokens, **fields), document(2, tokens)]
    both.rig.step(new, {0: 5, 1: 7, 2: 7})
    assert text in refusals(both.rig)[1]
    assert close(scores(both.rig), {2: both.score(asked, tokens)})


def test_models_without_late_interaction_report_it(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("llama")
    rig = Rig(made.folder)
    assert rig.replica.num_query_vectors == 0
    rig.step([query(0, prompt(5))], {0: 5})
    assert refusals(rig) == {0: "query_id: this model does not support late interaction"}
    comparing(made, tmp_path, do_query_expansion=True)
    with pytest.raises(InvalidArgument, match="which only encoders support"):
        Rig(tmp_path)


def test_a_worker_reports_its_query_capacity(checkpoint: Make, tmp_path: Path) -> None:
    """Plans of workers without late interaction are unchanged."""
    made = checkpoint("llama")
    plan = Rig(made.folder).scheduler.plan([New(0, prompt(5))], {0: 5})
    admitted = pb.StepPlan.FromString(plan.SerializeToString()).admitted[0]
    assert not {field.name for field, _ in admitted.ListFields()} & {"query_id", "is_query"}
    assert columns.i32(admitted.token_ids).tolist() == prompt(5)
