"""Classifier scores equal those of transformers, however prompts are split into steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.services.worker.models.registry import read_model_config
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1.pooling_pb2 import POOLER_ALL, POOLER_MEAN, POOLER_STEP, PoolingParams
from tests.services.worker import checkpoints
from tests.services.worker.checkpoints import SHAPE, Checkpoint
from tests.services.worker.heads.test_pooling import pooled
from tests.services.worker.models.test_logits import prompt
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

CLASSIFY = PoolingParams(classify=True)
VALUES = {"architectures": ["LlamaForSequenceClassification"], **SHAPE}


def scores(made: Checkpoint, tokens: list[int]) -> np.ndarray[Any, Any]:
    with torch.inference_mode():
        found: np.ndarray[Any, Any] = made.model(torch.tensor([tokens])).logits[0].float().numpy()
    return found


@pytest.mark.parametrize(
    ("family", "num_labels"), [("llama", 3), ("qwen2-tied", 1), ("qwen3-tied", 5), ("mistral-window", 2)]
)
def test_scores_are_those_of_transformers(tmp_path: Path, family: str, num_labels: int) -> None:
    made = checkpoints.make(family, tmp_path, classifies=True, num_labels=num_labels, pad_token_id=0)
    rig = Rig(made.folder)
    first, second = prompt(23), prompt(9, 5)
    rig.step([New(0, first, pooling=CLASSIFY), New(1, second, pooling=CLASSIFY)], {0: 11, 1: 9})
    assert np.abs(pooled(rig)[1] - scores(made, second)).max() < 2e-5
    rig.step(counts={0: 12})
    assert np.abs(pooled(rig)[0] - scores(made, first)).max() < 2e-5


def test_a_classifier_also_pools_and_a_model_without_one_reports_it(tmp_path: Path) -> None:
    made = checkpoints.make("llama", tmp_path, classifies=True, num_labels=4, pad_token_id=0)
    rig = Rig(made.folder)
    tokens = prompt(12)
    rig.step([New(0, tokens, pooling=PoolingParams(pooler=POOLER_MEAN, classify=True))], {0: 12})
    with torch.inference_mode():
        mean = made.model.model(torch.tensor([tokens])).last_hidden_state[0].mean(0)
        wanted = (made.model.score.weight @ mean).numpy()
    assert np.abs(pooled(rig)[0] - wanted).max() < 2e-5
    rig.step([New(1, tokens, pooling=PoolingParams())], {1: 12})
    assert len(pooled(rig)[1]) == SHAPE["hidden_size"]


@pytest.mark.parametrize("chunks", [[12], [5, 1, 6]])
def test_every_token_is_classified(tmp_path: Path, chunks: list[int]) -> None:
    """Classifies tokens in chunked steps that also contain other sequences."""
    made = checkpoints.make("llama", tmp_path, classifies=True, num_labels=4, pad_token_id=0)
    rig, tokens, tag = Rig(made.folder), prompt(12), 7
    tokens[2] = tokens[9] = tag
    asked = [
        PoolingParams(pooler=POOLER_ALL, classify=True),
        PoolingParams(pooler=POOLER_STEP, step_tag_id=tag, classify=True),
        PoolingParams(),
    ]
    new = [New(slot, tokens, pooling=params) for slot, params in enumerate(asked)]
    for i, count in enumerate(chunks):
        rig.step(new if i == 0 else [], dict.fromkeys(range(3), count))
    with torch.inference_mode():
        states = made.model.model(torch.tensor([tokens])).last_hidden_state[0]
        wanted = (states @ made.model.score.weight.T).numpy()
    places = [place for place, token in enumerate(tokens) if token == tag]
    assert np.abs(pooled(rig)[0] - wanted.flatten()).max() < 2e-5
    assert np.abs(pooled(rig)[1] - wanted[places].flatten()).max() < 2e-5


def test_generating_models_have_no_classifier(checkpoint: Any) -> None:
    rig = Rig(checkpoint("llama").folder)
    rig.step([New(0, prompt(5), pooling=CLASSIFY)], {0: 5})
    (failure,) = rig.last_result.failures
    assert (failure.slot, failure.error.field) == (0, "pooling.classify")


@pytest.mark.parametrize(
    ("changes", "classes"),
    [({}, 2), ({"num_labels": 3}, 3), ({"id2label": {"0": "bad"}}, 1), ({"id2label": {"1": "b", "0": "a"}}, 2)],
)
def test_classes_are_counted_as_transformers_writes_them(changes: dict[str, Any], classes: int) -> None:
    assert read_model_config({**VALUES, **changes}).num_classes == classes


def test_unsupported_classifiers_are_refused(checkpoint: Any) -> None:
    with pytest.raises(InvalidArgument, match="id2label is"):
        read_model_config({**VALUES, "id2label": {"7": "x"}})
    with pytest.raises(InvalidArgument, match="it scales its hidden states, which is not supported"):
        read_model_config(
            {**VALUES, "architectures": ["GraniteForSequenceClassification"], "embedding_multiplier": 3.0}
        )
    with pytest.raises(InvalidArgument, match="supported: "):
        read_model_config({**VALUES, "architectures": ["T5ForSequenceClassification"], "model_type": "t5"})
