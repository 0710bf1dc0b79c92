"""Option batch_invariant: bits of logits in every model family, and the settings it excludes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.services.worker.attention import backends
from quire.services.worker.attention.port import AttentionSpec
from quire.services.worker.sampling.ranking import largest_by_packed_keys, largest_with_ties
from quire.shared.errors import FailedPrecondition, InvalidArgument, QuireError
from quire.shared.pb.common.v1 import pooling_pb2
from quire.shared.settings import WorkerSettings
from tests.kernels.cpu.closeness import needs_library
from tests.services.worker.checkpoints import FAMILIES, Checkpoint
from tests.services.worker.heads.test_pooling import pooled
from tests.services.worker.heads.test_prompt_logprobs import asking, found
from tests.services.worker.models.test_logits import prompt
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

Make = Callable[[str], Checkpoint]
WAYS = [
    pytest.param({}, id="cpu", marks=pytest.mark.skipif(**needs_library)),
    pytest.param({"device": "cuda"}, id="cuda", marks=pytest.mark.gpu),
]
STANDARD = {"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "standard"}


@pytest.fixture(params=WAYS)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"batch_invariant": True, "attention_backend": "auto", **request.param}


GELU = {"gemma-tied", "gemma2", "gemma2-caps-off", "gemma3-tied", "gpt2", "starcoder2"}  # activations computed by torch
LATENT = {family for family in FAMILIES if family.startswith("deepseek")}  # rejected on a GPU
OTHERS = {"gpt-neox", "phi", "stablelm", "olmo3", "seed-oss"}  # run by transformers


@pytest.mark.skipif(**needs_library)
@pytest.mark.parametrize("family", sorted(OTHERS))
def test_code_of_transformers_is_refused(checkpoint: Make, family: str) -> None:
    with pytest.raises(InvalidArgument, match="batch_invariant: not supported with the code of transformers"):
        Rig(checkpoint(family).folder, batch_invariant=True, attention_backend="auto")


@pytest.mark.skipif(**needs_library)
@pytest.mark.parametrize("family", sorted(GELU))
def test_torch_activations_on_a_cpu_are_rejected(checkpoint: Make, family: str) -> None:
    with pytest.raises(InvalidArgument, match=r"batch_invariant: gelu.* is computed by torch on the CPU"):
        Rig(checkpoint(family).folder, batch_invariant=True, attention_backend="auto")


def test_ranks_use_one_all_reduce_algorithm() -> None:
    assert WorkerSettings(model="tiny", tensor_parallel_size=2).use_custom_all_reduce
    assert not WorkerSettings(model="tiny", tensor_parallel_size=2, batch_invariant=True).use_custom_all_reduce


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in GELU | OTHERS | LATENT])
def test_logits_are_the_same_bits_in_any_batch_and_any_chunks(
    checkpoint: Make, options: dict[str, Any], family: str, dtype: str
) -> None:
    same_bits(Rig(checkpoint(family).folder, dtype=dtype, num_blocks=1500, **options))


@pytest.mark.skipif(**needs_library)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", sorted(LATENT))
def test_latent_vectors_on_a_cpu_are_the_same_bits(checkpoint: Make, family: str, dtype: str) -> None:
    folder = checkpoint(family).folder
    same_bits(Rig(folder, dtype=dtype, batch_invariant=True, attention_backend="auto", num_blocks=1500))


@pytest.mark.gpu
def test_latent_vectors_on_a_gpu_are_refused(checkpoint: Make) -> None:
    with pytest.raises(InvalidArgument, match="batch_invariant: latent attention on a GPU"):
        Rig(checkpoint("deepseek-v2").folder, device="cuda", batch_invariant=True, attention_backend="auto")


@pytest.mark.skipif(**needs_library)
@pytest.mark.parametrize("family", ["qwen3-next-narrow", "falcon-h1"])
def test_states_on_a_cpu_are_the_same_bits_in_any_batch_and_any_chunks(checkpoint: Make, family: str) -> None:
    """States on a GPU depend on the batch, so that the option is rejected there."""
    folder = checkpoint(family).folder
    same_bits(Rig(folder, batch_invariant=True, attention_backend="auto", num_blocks=1500))


def same_bits(rig: Rig) -> None:
    tokens = prompt(70, 1)
    rig.step([New(3, tokens)], {3: 70})
    for _ in range(6):
        rig.step()
    expected, said = torch.stack(rig.logits[3]), rig.tokens(3)
    rig.step(released=[3])
    for seed in range(5):
        rig.logits.clear()
        run_with_others(rig, tokens, random.Random(seed), len(expected))
        assert rig.tokens(3) == said
        assert torch.equal(torch.stack(rig.logits[3]), expected)
        rig.step(released=list(rig.scheduler.rows))


def run_with_others(rig: Rig, tokens: list[int], draw: random.Random, num_sampled: int) -> None:
    """Computes `tokens` in slot 3 in chunks and samples, while other slots run prompts or sample."""
    left, pending = len(tokens), {}
    others = draw.sample([0, 1, 2, 4, 5, 6, 7], draw.randrange(1, 8))
    new = [New(3, tokens), *(New(slot, prompt(draw.randrange(1, 60), 10 + slot)) for slot in others)]
    pending = {sequence.slot: len(sequence.tokens) for sequence in new if sequence.slot != 3}
    while len(rig.logits[3]) < num_sampled:
        counts = {slot: min(count, draw.randrange(1, 40)) for slot, count in pending.items()}
        pending = {slot: count - counts[slot] for slot, count in pending.items() if count > counts[slot]}
        if left:
            counts[3] = min(left, draw.choice([1, 2, 5, 16, 40, 64]))
            left -= counts[3]
        rig.step(new, counts)
        new = []


@pytest.mark.parametrize("chunks", [[1, 22], [5, 5, 13], [22, 1]])
def test_log_probabilities_of_a_prompt(checkpoint: Make, options: dict[str, Any], chunks: list[int]) -> None:
    folder, tokens = checkpoint("qwen3-tied").folder, prompt(23)
    rig = Rig(folder, dtype="bfloat16", **options)
    asked = New(0, tokens, sampling=asking(prompt_logprobs=3))
    rig.step([asked], {0: 23})
    expected = found(rig)
    company = [New(1, prompt(30, 5), sampling=asking(prompt_logprobs=9)), New(2, prompt(4, 6))]
    rig.step([New(0, tokens, sampling=asked.sampling), *company], {0: chunks[0], 1: 30, 2: 4}, released=[0])
    together = found(rig)[: chunks[0]]
    for count in chunks[1:]:
        rig.step(counts={0: count})
        together += found(rig)
    assert [(ids[:4], values[:4], rank) for ids, values, rank in together] == expected


@pytest.mark.parametrize("pooler", [pooling_pb2.POOLER_LAST, pooling_pb2.POOLER_MEAN])
def test_vectors_of_whole_texts(checkpoint: Make, options: dict[str, Any], pooler: pooling_pb2.Pooler) -> None:
    """Texts are pooled alone, beside others of the same kind, and beside those of another kind."""
    rig = Rig(checkpoint("qwen3-tied").folder, dtype="bfloat16", max_num_batched_tokens=256, **options)
    tokens, asked = prompt(23), pooling_pb2.PoolingParams(pooler=pooler)
    vectors = []
    for beside in ([], [asked] * 7, [asked, pooling_pb2.PoolingParams(dimensions=5), asked]):
        new = [New(0, tokens, pooling=asked)]
        new += [New(slot, prompt(30, slot), pooling=other) for slot, other in enumerate(beside, 1)]
        rig.step(new, {one.slot: len(one.tokens) for one in new})
        vectors.append(pooled(rig)[0].tobytes())
        rig.step(released=[one.slot for one in new])
    assert len(set(vectors)) == 1


@pytest.mark.parametrize("largest", [largest_with_ties, largest_by_packed_keys])
def test_top_logprobs_do_not_depend_on_other_requests(largest: Callable[..., torch.Tensor]) -> None:
    """With a mantissa of 8 bits, ties among logits are common."""
    values = torch.randn(4, 3000, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    values[0, :500] = values[0].max()
    values[1] = 0.0
    values[2, ::2] = -float("inf")
    ranked = values.sort(dim=1, descending=True, stable=True).indices
    for count in (0, 1, 2, 7, 20, 64, 1000, 3000):
        assert torch.equal(largest(values, count), ranked[:, :count])


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"dtype": "float16"}, InvalidArgument, "batch_invariant: dtype float16 is computed by torch"),
        ({"speculative_config": json.dumps(STANDARD)}, InvalidArgument, "batch_invariant: .* standard .*use coupled"),
        (
            {"attention_backend": "reference"},
            InvalidArgument,
            "attention_backend: results of reference depend on the other rows",
        ),
    ],
)
@pytest.mark.skipif(**needs_library)
def test_incompatible_options_are_rejected(
    checkpoint: Make, settings: dict[str, Any], error: type[QuireError], text: str
) -> None:
    with pytest.raises(error, match=text):
        Rig(checkpoint("llama").folder, **{"batch_invariant": True, "attention_backend": "auto", **settings})


def test_without_compiled_kernels_it_is_refused(checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.kernels.cpu.unavailable", lambda: "the library is not built")
    with pytest.raises(FailedPrecondition, match=r"batch_invariant: .* they are missing: the library"):
        Rig(checkpoint("llama").folder, batch_invariant=True, attention_backend="auto")


def test_batch_dependent_attention_is_skipped() -> None:
    spec = AttentionSpec("cpu", "float32", "float16", 16, 2, 1, 4, has_window=False, batch_invariant=True)
    with pytest.raises(
        FailedPrecondition, match=r"attention_backend: no backend supports .*: cpu does not support .* CUDA"
    ):
        backends.choose_attention("auto", spec)
