"""Vectors as sentence-transformers folders define them: pooling modes, dense layers, several prompts in a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional

from quire.services.worker.heads.encoder_pooling import EncoderPoolingHead
from quire.services.worker.heads.sentence_head import SentenceHead
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.result import StepResult
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.errors import InvalidArgument
from quire.shared.models.sentence_transformers import SentenceModel
from quire.shared.pb.common.v1.pooling_pb2 import POOLER_LAST, PoolingParams
from tests.shared.models.test_sentence_transformers import DENSE, MEAN, NORMALIZE, TRANSFORMER, write

SIZE, LENGTHS = 8, (5, 1, 3)
PLAIN = SentenceModel(("cls",), normalizes=True)
NONE = np.zeros(0, dtype=np.int32)


def inputs(slots: tuple[int, ...] = (1, 2, 6)) -> StepInputs:
    starts = np.cumsum([0, *LENGTHS]).astype(np.int32)
    total = int(starts[-1])
    return StepInputs(
        np.array(slots), np.zeros(total, np.int32), np.zeros(total, np.int32), np.zeros(total, np.int32),
        starts, np.array(LENGTHS, np.int32), 0, NONE, NONE.astype(np.intp), NONE.astype(np.intp), NONE, NONE,
        rows_changed=True,
    )  # fmt: skip


def states() -> torch.Tensor:
    return torch.randn(sum(LENGTHS), SIZE, generator=torch.Generator().manual_seed(1))


def vectors(head: EncoderPoolingHead, asked: list[PoolingParams]) -> list[torch.Tensor]:
    """Returns the vectors of the three prompts of a step."""
    step = inputs()
    for slot, params in zip(step.slots.tolist(), asked, strict=True):
        head.admit(slot, SlotAdmission(pooling=params))
    rows = head.rows(step)
    assert rows is not None
    hidden = states() if rows.tokens is None else states()[torch.from_numpy(rows.tokens).long()]
    launched = rows.launch(hidden)
    result = StepResult(1, 1, NONE, None, None, [], wait_us=0)
    result = launched.build_result([tensor.numpy() for tensor in launched.tensors]).merge_into(result)
    assert result.pooled is not None
    assert result.pooled.slots.tolist() == step.slots.tolist()
    sizes, values = result.pooled.sizes, result.pooled.values.copy()
    return [torch.from_numpy(part) for part in np.split(values, np.cumsum(sizes)[:-1])]


def weighted(part: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1, len(part) + 1).unsqueeze(1)
    return (part * weights).sum(0) / weights.sum()


MODES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cls": lambda part: part[0],
    "last": lambda part: part[-1],
    "mean": lambda part: part.mean(0),
    "max": lambda part: part.amax(0),
    "mean_sqrt": lambda part: part.sum(0) / len(part) ** 0.5,
    "weighted": weighted,
}


@pytest.mark.parametrize("modes", [*((mode,) for mode in MODES), ("cls", "max", "mean")])
def test_pooling_modes(modes: tuple[str, ...]) -> None:
    head = EncoderPoolingHead(SIZE, SentenceHead(modes, False), None)
    for found, part in zip(vectors(head, [PoolingParams()] * 3), states().split(LENGTHS), strict=True):
        assert torch.allclose(found, torch.cat([MODES[mode](part) for mode in modes]), atol=1e-6)


def test_prompts_of_a_step_may_ask_for_different_vectors() -> None:
    head = EncoderPoolingHead(SIZE, SentenceHead(("mean",), True), None)
    asked = [PoolingParams(), PoolingParams(pooler=POOLER_LAST, normalize=False), PoolingParams(dimensions=3)]
    found, parts = vectors(head, asked), states().split(LENGTHS)
    assert torch.allclose(found[0], functional.normalize(parts[0].mean(0), dim=0), atol=1e-6)
    assert torch.allclose(found[1], parts[1][-1])
    assert torch.allclose(found[2], functional.normalize(parts[2].mean(0)[:3], dim=0), atol=1e-6)


def test_dense_layers_apply_to_the_folders_own_pooling_only(tmp_path: Path) -> None:
    write(tmp_path, TRANSFORMER, MEAN, ("Dense", DENSE), NORMALIZE)
    weight = torch.randn(4, SIZE)
    save_file({"linear.weight": weight}, tmp_path / "2_Dense" / "model.safetensors")
    default = SentenceHead.from_folder(tmp_path, PLAIN, torch.device("cpu"))
    head = EncoderPoolingHead(SIZE, default, None)
    found, parts = (
        vectors(head, [PoolingParams(), PoolingParams(dimensions=2), PoolingParams(pooler=POOLER_LAST)]),
        states().split(LENGTHS),
    )
    assert torch.allclose(found[0], functional.normalize(weight @ parts[0].mean(0), dim=0), atol=1e-6)
    assert torch.allclose(found[1], functional.normalize((weight @ parts[1].mean(0))[:2], dim=0), atol=1e-6)
    assert torch.allclose(found[2], functional.normalize(parts[2][-1], dim=0), atol=1e-6)
    with pytest.raises(InvalidArgument, match="5 is more than the model's 4"):
        head.admit(3, SlotAdmission(pooling=PoolingParams(dimensions=5)))


def test_a_dense_layer_without_its_tensors_is_refused(tmp_path: Path) -> None:
    write(tmp_path, TRANSFORMER, MEAN, ("Dense", DENSE))
    with pytest.raises(InvalidArgument, match=r"contains neither model\.safetensors"):
        SentenceHead.from_folder(tmp_path, PLAIN, torch.device("cpu"))
    save_file({"linear.weight": torch.zeros(8, 4)}, tmp_path / "2_Dense" / "model.safetensors")
    with pytest.raises(InvalidArgument, match=r"does not contain linear\.weight"):
        SentenceHead.from_folder(tmp_path, PLAIN, torch.device("cpu"))
