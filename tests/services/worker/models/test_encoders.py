"""Hidden states, vectors and classes of encoders equal those of transformers, for single prompts and batches.

float32: largest difference 5e-5, as for decoders.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers

from quire.services.worker.models import registry
from quire.services.worker.models.registry import check_config, find_encoder
from quire.services.worker.step.plan_violation import PlanViolation
from quire.shared import columns
from quire.shared.errors import InvalidArgument
from quire.shared.models import encoder_families
from quire.shared.pb.common.v1.pooling_pb2 import (
    POOLER_ALL,
    POOLER_CLS,
    POOLER_LAST,
    POOLER_MEAN,
    POOLER_STEP,
    PoolingParams,
)
from tests.services.worker.encoders import ENCODERS, VOCAB_SIZE, make
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

Vector = npt.NDArray[np.float32]
MAX_ERROR = 5e-5
families = pytest.mark.parametrize("family", ENCODERS)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoints by family, with and without a classifier, created once."""
    found: dict[tuple[str, str], tuple[Path, Any]] = {}

    def get(family: str, ending: str = "Model") -> tuple[Path, Any]:
        if (family, ending) not in found:
            found[family, ending] = make(family, ending, tmp_path_factory.mktemp(family))
        return found[family, ending]

    return get


def prompt(length: int, seed: int = 0) -> list[int]:
    """Draws tokens without the padding token, which transformers would not count as a position."""
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def rig(folder: Path, **settings: Any) -> Rig:
    return Rig(folder, record_logits=False, **settings)


def pooled(at: Rig) -> dict[int, Vector]:
    found = at.last_result.pooled
    sizes = columns.u32(found.sizes)
    vectors = np.split(columns.f32(found.values), np.cumsum(sizes)[:-1])
    return dict(zip(columns.u32(found.slots).tolist(), vectors, strict=bool(len(sizes))))


def hidden(model: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([tokens])).last_hidden_state[0].float()


def close(found: Vector, wanted: torch.Tensor) -> bool:
    return found.shape == tuple(wanted.shape) and float(np.abs(found - wanted.numpy()).max()) < MAX_ERROR


@families
def test_vectors_are_those_of_the_hidden_states(made: Any, family: str) -> None:
    """The batch has long and short prompts and a single token, each with its own pooling."""
    folder, model = made(family)
    at = rig(folder, max_num_batched_tokens=256)
    lengths = (23, 60, 1, 23, 9)
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    poolers = (POOLER_MEAN, POOLER_CLS, POOLER_LAST, POOLER_MEAN, 0)
    asked = [PoolingParams(pooler=pooler, normalize=pooler == 0) for pooler in poolers]
    new = [New(slot, prompts[slot], pooling=asked[slot]) for slot in range(5)]
    at.step(new, {slot: lengths[slot] for slot in range(5)})
    found = pooled(at)
    for slot, pooler in enumerate(poolers):
        states = hidden(model, prompts[slot])
        wanted = {POOLER_MEAN: states.mean(0), POOLER_LAST: states[-1]}.get(pooler, states[0])
        assert close(found[slot], wanted if pooler else wanted / wanted.norm()), pooler


@families
def test_classes_are_those_of_the_classifier(made: Any, family: str) -> None:
    """Includes pairs, whose second text has other token types if the family has them."""
    folder, model = made(family, "ForSequenceClassification")
    at = rig(folder)
    asked = PoolingParams(classify=True)
    first, second = prompt(12, 1), prompt(17, 2)
    has_types = getattr(model.config, "type_vocab_size", 1) > 1
    new = [
        New(0, first, pooling=asked),
        New(3, second, pooling=asked, second_text_from=7 if has_types else 0),
    ]
    at.step(new, {0: 12, 3: 17})
    with torch.inference_mode():
        plain = model(torch.tensor([first])).logits[0]
        types = {"token_type_ids": torch.tensor([[0] * 7 + [1] * 10])} if has_types else {}
        pair = model(torch.tensor([second]), **types).logits[0]
    found = pooled(at)
    assert close(found[0], plain)
    assert close(found[3], pair)


def test_single_tokens_have_a_vector_each(made: Any) -> None:
    """The batch also has prompts with one vector, and classifier scores of each token."""
    folder, model = made("bert", "ForSequenceClassification")
    at, tag = rig(folder), 9
    tokens = prompt(11)
    tokens[2] = tokens[6] = tag
    asked = [
        PoolingParams(pooler=POOLER_ALL, normalize=False),
        PoolingParams(pooler=POOLER_MEAN, normalize=False),
        PoolingParams(pooler=POOLER_STEP, step_tag_id=tag, normalize=False, dimensions=4),
        PoolingParams(pooler=POOLER_STEP, step_tag_id=tag, classify=True),
    ]
    at.step([New(slot, tokens, pooling=one) for slot, one in enumerate(asked)], dict.fromkeys(range(4), 11))
    states = hidden(model.bert, tokens)
    steps = states[[place for place, token in enumerate(tokens) if token == tag]]
    with torch.inference_mode():
        classes = model.classifier(torch.tanh(model.bert.pooler.dense(steps)))
    found = pooled(at)
    for slot, wanted in enumerate((states, states.mean(0), steps[:, :4], classes)):
        assert close(found[slot], wanted.flatten()), slot


def test_token_types_do_not_leak_between_steps(made: Any) -> None:
    folder, model = made("bert")
    at, tokens = rig(folder), prompt(9)
    at.step([New(0, tokens, pooling=PoolingParams(normalize=False), second_text_from=4)], {0: 9})
    at.step([New(0, tokens, pooling=PoolingParams(normalize=False))], {0: 9}, released=[0])
    assert close(pooled(at)[0], hidden(model, tokens)[0])


def test_a_part_of_a_prompt_is_refused(made: Any) -> None:
    """Its intermediate results would be lost after the step."""
    at = rig(made("bert")[0])
    with pytest.raises(PlanViolation, match="compute"):
        at.step([New(0, prompt(9), pooling=PoolingParams())], {0: 4})


def test_sampling_requests_fail_alone(made: Any) -> None:
    folder, model = made("bert")
    at, tokens = rig(folder), prompt(9)
    at.step([New(0, tokens), New(1, tokens, pooling=PoolingParams(normalize=False))], {0: 9, 1: 9})
    (failure,) = at.last_result.failures
    assert (failure.slot, "encoder" in failure.error.message) == (0, True)
    assert close(pooled(at)[1], hidden(model, tokens)[0])


def test_too_many_dimensions_fail_their_prompt_alone(made: Any) -> None:
    at, tokens = rig(made("bert")[0]), prompt(9)
    asked = [PoolingParams(dimensions=5), PoolingParams(dimensions=5000), PoolingParams(classify=True)]
    at.step([New(slot, tokens, pooling=one) for slot, one in enumerate(asked)], dict.fromkeys(range(3), 9))
    assert [failure.slot for failure in at.last_result.failures] == [1, 2]
    vector = pooled(at)[0]
    assert len(vector) == 5
    assert abs(float(np.linalg.norm(vector)) - 1) < 1e-5


def test_a_step_has_room_for_the_longest_prompt(made: Any) -> None:
    folder = made("bert")[0]
    assert rig(folder, max_num_batched_tokens=0).replica.limits.max_num_batched_tokens >= 128
    with pytest.raises(InvalidArgument, match="max_num_batched_tokens: 40 is less than max_model_len, 128"):
        rig(folder, max_num_batched_tokens=40)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("quantization", "fp8"),
        ("lora", {"a": "/x"}),
        ("kv_offloading_size", 1.0),
        ("batch_invariant", True),
        ("model_impl", "transformers"),
    ],
)
def test_options_without_encoder_support_are_rejected_by_name(made: Any, setting: str, value: object) -> None:
    with pytest.raises(InvalidArgument, match=setting):
        rig(made("bert")[0], **{setting: value})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"is_decoder": True}, "is_decoder"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"hidden_act": "mish"}, "hidden_act"),
        ({"num_attention_heads": 5}, "num_attention_heads"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
    ],
)
def test_configs_with_different_results_are_rejected(changes: dict[str, Any], named: str) -> None:
    values = transformers.BertConfig().to_dict() | {"architectures": ["BertModel"]}
    with pytest.raises(InvalidArgument, match=named):
        check_config(values | changes)


def test_frontends_know_the_same_families() -> None:
    assert {*registry.ENCODERS} == {*encoder_families.FAMILIES, *encoder_families.OTHER_NAMES.values()}


@pytest.mark.parametrize("name", ["BertLMHeadModel", "BertForTokenClassification", "T5EncoderModel"])
def test_other_heads_are_not_encoders(name: str) -> None:
    assert find_encoder({"architectures": [name]}) is None


@pytest.mark.gpu
@families
def test_a_gpu_gives_the_same_vectors(made: Any, family: str) -> None:
    folder, model = made(family)
    at = rig(folder, device="cuda", max_num_batched_tokens=256, attention_backend="auto")
    lengths = (23, 60, 1, 9)
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    asked = PoolingParams(pooler=POOLER_MEAN, normalize=False)
    at.step([New(slot, prompts[slot], pooling=asked) for slot in range(4)], dict(enumerate(lengths)))
    for slot, vector in pooled(at).items():
        assert close(vector, hidden(model, prompts[slot]).mean(0)), slot


@families
def test_hidden_tokens_see_other_tokens(made: Any, family: str) -> None:
    """They behave like tokens with an attention mask of 0 in transformers; another prompt has no such tokens."""
    folder, model = made(family)
    at = rig(folder)
    tokens, num_seen = prompt(12, 5), 9
    asked = PoolingParams(pooler=POOLER_ALL, normalize=False)
    other = New(2, prompt(12, 6), pooling=asked)
    at.step([New(0, tokens, pooling=asked, num_seen_tokens=num_seen), other], {0: 12, 2: 12})
    mask = torch.tensor([[1] * num_seen + [0] * (12 - num_seen)])
    with torch.inference_mode():
        wanted = model(torch.tensor([tokens]), attention_mask=mask).last_hidden_state[0]
    found = pooled(at)
    assert close(found[0].reshape(12, -1), wanted)
    assert close(found[2].reshape(12, -1), hidden(model, other.tokens))


def test_chosen_tokens_have_a_vector_each(made: Any) -> None:
    folder, model = made("bert")
    at = rig(folder)
    tokens, asked = prompt(9), PoolingParams(pooler=POOLER_ALL, normalize=False)
    at.step([New(0, tokens, pooling=asked, pooled_tokens=(0, 4, 8))], {0: 9})
    assert close(pooled(at)[0].reshape(3, -1), hidden(model, tokens)[[0, 4, 8]])


@pytest.mark.parametrize("wrong", [(4, 4), (3, 9)])
def test_chosen_tokens_out_of_range_fail_their_prompt_alone(made: Any, wrong: tuple[int, ...]) -> None:
    folder, _ = made("bert")
    at, asked = rig(folder), PoolingParams(pooler=POOLER_ALL, normalize=False)
    new = [New(slot, prompt(9), pooling=asked, pooled_tokens=wrong if slot else ()) for slot in (0, 1)]
    at.step(new, {0: 9, 1: 9})
    (failure,) = at.last_result.failures
    assert (failure.slot, "pooled_tokens" in failure.error.message) == (1, True)
    assert 0 in pooled(at)
