"""Equal results on CUDA: logits of transformers, tokens of the CPU. Run on a GPU machine: pytest -m gpu."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quire.services.worker.codec.step_codec import decode_plan
from quire.shared import columns
from quire.shared.pb.common.v1 import sampling_pb2
from tests.services.worker import checkpoints
from tests.services.worker.checkpoints import FAMILIES, Checkpoint
from tests.services.worker.lora import peft_folders
from tests.services.worker.models.test_logits import error, prompt
from tests.services.worker.plans import New
from tests.services.worker.replica_internals import chunk_graphs_of, decode_graphs_of
from tests.services.worker.rig import Rig
from tests.services.worker.step.test_beam_moves import Search, check

pytestmark = pytest.mark.gpu

MAX_ERROR = 2e-4  # float32, sums in yet another order
SINGLE_ROW_SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 32, "num_attention_heads": 8}

Make = Callable[[str], Checkpoint]

SAMPLINGS = [
    sampling_pb2.SamplingParams(temperature=0.0, logprobs=3),
    sampling_pb2.SamplingParams(temperature=0.8, seed=5),
    sampling_pb2.SamplingParams(temperature=1.2, seed=-6, top_k=30, top_p=0.9, min_p=0.01, logprobs=1),
    sampling_pb2.SamplingParams(temperature=0.9, seed=7, presence_penalty=0.5, frequency_penalty=0.3),
    sampling_pb2.SamplingParams(temperature=0.0, repetition_penalty=1.5, logit_bias={7: 2.0, 9: -3.0}),
    sampling_pb2.SamplingParams(temperature=1.0, seed=8, min_tokens=20, allowed_token_ids=list(range(40, 90))),
]


WAYS = {
    "reference": {"attention_backend": "reference", "cuda_graphs": False},
    "eager": {"attention_backend": "auto", "cuda_graphs": False},
    "graphs": {"attention_backend": "auto", "cuda_graph_chunks": False},
    "chunks in graphs": {"attention_backend": "triton"},
}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, object]:
    return request.param


def cuda_rig(made: Checkpoint, **settings: object) -> Rig:
    return Rig(made.folder, device="cuda", **settings)


def relative_error(rig: Rig, made: Checkpoint, slot: int) -> float:
    """Error measure for 8 bits: with random weights logits are small compared with the terms of their sums."""
    tokens, rows = rig.tokens(slot), torch.stack(rig.logits[slot])
    first = len(tokens) - len(rows)
    want = made.logits(tokens)[first - 1 : -1]
    return float((rows - want).norm() / want.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits(checkpoint: Make, family: str, way: dict[str, object]) -> None:
    """Chunks, prefix hits and mixed batches in one run."""
    made = checkpoint(family)
    rig = cuda_rig(made, **way)
    head = prompt(8, 5)
    rig.step([New(0, head + prompt(31, 6))], {0: 20})
    rig.step([New(1, [*head, 3, 4], cached_blocks=rig.blocks(0)[:2])], {0: 19, 1: 2})
    rig.step([New(2, head, cached_blocks=rig.blocks(0)[:2])])
    for _ in range(6):
        rig.step()
    assert max(error(rig, made, slot) for slot in (0, 1, 2)) < MAX_ERROR


@pytest.mark.parametrize("family", ["qwen3-tied", "phi3-partial", "mixtral"])
def test_adapters_with_recorded_steps(checkpoint: Make, tmp_path: Path, family: str, way: dict[str, object]) -> None:
    """Two adapters and a sequence without one share steps; later the latter continues as if alone."""
    made = checkpoint(family)
    first = peft_folders.save(made, tmp_path / "first", seed=1)
    second = peft_folders.save(made, tmp_path / "second", seed=2, rank=7, use_rslora=True)
    rig = cuda_rig(made, lora={"one": str(first.folder), "two": str(second.folder)}, **way)
    new = [New(0, prompt(11, 1), adapter="one"), New(2, prompt(9, 2)), New(3, prompt(14, 3), adapter="two")]
    rig.step(new, {0: 11, 2: 9, 3: 6})
    rig.step(counts={3: 8})
    for _ in range(3):
        rig.step()
    assert error(rig, first, 0) < MAX_ERROR
    assert error(rig, second, 3) < MAX_ERROR
    rig.step(released=[0, 3])
    for _ in range(3):
        rig.step()
    assert error(rig, made, 2) < MAX_ERROR


@pytest.mark.parametrize("family", ["llama", "deepseek-v3"])
@torch.inference_mode()
def test_chunks_in_graphs_give_the_same_tokens(checkpoint: Make, family: str) -> None:
    """Chunks of many sizes mixed with decodes, recorded sampling, reused slots."""
    made = checkpoint(family)
    rigs = [
        cuda_rig(made, record_logits=False, max_num_seqs=16, num_blocks=600, **WAYS[way])
        for way in ("chunks in graphs", "eager")
    ]
    assert chunk_graphs_of(rigs[0].replica).count > 0
    for slot in range(12):
        sampling, count = SAMPLINGS[slot % 2], 7 * slot + 3
        for rig in rigs:
            rig.step([New(slot, prompt(count, slot), sampling=sampling)], {slot: min(count, 20)})
            if count > 20:
                rig.step(counts={slot: count - 20})
            rig.step()
    for rig in rigs:
        rig.step(released=[3, 4])
        rig.step([New(3, prompt(40, 99)), New(4, prompt(1, 98))], {3: 40, 4: 1})
        rig.step()
    assert [rigs[0].tokens(slot) for slot in range(12)] == [rigs[1].tokens(slot) for slot in range(12)]
    assert chunk_graphs_of(rigs[0].replica).count > 0


@pytest.mark.parametrize("family", ["qwen3-tied", "qwen3-moe-tied", "qwen3-moe-some-layers"])
def test_a_single_row_in_its_own_chain(tmp_path: Path, family: str) -> None:
    """Sizes that the fused chain accepts; one sequence, then two, then one."""
    made = checkpoints.make(family, tmp_path, **SINGLE_ROW_SIZES)
    rig, recording = cuda_rig(made, record_logits=False, **WAYS["graphs"]), cuda_rig(made, **WAYS["graphs"])
    calm = Rig(made.folder)
    for each in (rig, recording, calm):
        each.step([New(0, prompt(9))], {0: 9})
        for _ in range(5):
            each.step()
        each.step([New(1, prompt(5, 2), sampling=SAMPLINGS[1])], {0: 0, 1: 5})
        for _ in range(3):
            each.step()
        each.step(released=[0])
        for _ in range(8):
            each.step()
    assert rig.tokens(1) == recording.tokens(1) == calm.tokens(1)
    assert error(recording, made, 1) < MAX_ERROR


def test_the_load_of_experts_comes_from_the_device(checkpoint: Make) -> None:
    """A reading returns what had arrived at the previous one."""
    rig = cuda_rig(checkpoint("qwen3-moe-tied"), **WAYS["eager"])
    before = {layer: int(counts.sum()) for layer, counts in rig.replica.experts.read_load().items()}
    rig.step([New(0, prompt(11))], {0: 11})
    torch.cuda.synchronize()
    rig.replica.experts.read_load()
    torch.cuda.synchronize()
    found = {layer: int(counts.sum()) for layer, counts in rig.replica.experts.read_load().items()}
    assert set(found) == set(before) == {0, 1, 2}
    through = {0: 11, 1: 11, 2: 1}  # the last layer feeds forward only the token that is sampled behind
    assert all(count >= before[layer] + through[layer] * 3 for layer, count in found.items())


def test_rows_sharing_one_prefix(tmp_path: Path) -> None:
    """Enough rows that the prefix is read once for all."""
    made = checkpoints.make("llama", tmp_path, max_position_embeddings=2048, head_dim=32)
    rig = cuda_rig(made, block_size=16, max_num_seqs=16, num_blocks=600, **WAYS["graphs"])
    head = prompt(1200, 3)
    rig.step([New(0, [*head, 5])], {0: 1201})
    later = [New(i, [*head, *prompt(3 * i, i)], cached_blocks=rig.blocks(0)[:75]) for i in range(1, 12)]
    rig.step(later, {i: 3 * i for i in range(1, 12)})
    for _ in range(4):
        rig.step()
    assert any(shared for _, shared, _ in decode_graphs_of(rig.replica)._graphs)
    assert max(error(rig, made, slot) for slot in (0, 1, 11)) < MAX_ERROR


@pytest.mark.parametrize("family", ["llama", "deepseek-v2"])
def test_a_cache_of_8_bits(checkpoint: Make, family: str, way: dict[str, object]) -> None:
    """Close to a cache in the model's dtype, in chunks and in decodes."""
    made = checkpoint(family)
    rig = cuda_rig(made, kv_cache_dtype="fp8", **way)
    rig.step([New(0, prompt(30, 1)), New(1, prompt(6, 2))], {0: 20, 1: 6})
    rig.step(counts={0: 10})
    for _ in range(6):
        rig.step()
    assert 0.01 < max(relative_error(rig, made, slot) for slot in (0, 1)) < 0.15


@pytest.mark.parametrize("quantization", ["fp8", "fp8_block"])
def test_linear_layers_in_8_bits(tmp_path: Path, quantization: str, way: dict[str, object]) -> None:
    """In the fused chain of a single row, and in products of several rows."""
    made = checkpoints.make("qwen3-tied", tmp_path, **SINGLE_ROW_SIZES)
    rig = cuda_rig(made, quantization=quantization, **way)
    rig.step([New(0, prompt(9))], {0: 9})
    for _ in range(4):
        rig.step()
    rig.step([New(1, prompt(20, 2))], {0: 0, 1: 20})
    for _ in range(4):
        rig.step()
    assert 0.01 < max(relative_error(rig, made, slot) for slot in (0, 1)) < 0.25


def test_choices_are_those_of_the_cpu(checkpoint: Make, way: dict[str, object]) -> None:
    made = checkpoint("qwen3-tied")
    rigs = [cuda_rig(made, **way), Rig(made.folder)]
    for rig in rigs:
        bad_words = ((1,), (2, 3), (50, 51, 52))
        new = [New(i, prompt(9, i), sampling=s, eos=(3,), bad_words=bad_words) for i, s in enumerate(SAMPLINGS)]
        rig.step(new, dict.fromkeys(range(len(new)), 9))
        for _ in range(30):
            rig.step()
    on_cuda, on_cpu = (rig.last_result for rig in rigs)
    for slot in range(len(SAMPLINGS)):
        assert rigs[0].tokens(slot) == rigs[1].tokens(slot)
    assert on_cuda.logprobs.token_ids == on_cpu.logprobs.token_ids
    assert on_cuda.logprobs.ranks == on_cpu.logprobs.ranks
    found, expected = (torch.tensor(columns.f32(r.logprobs.logprobs).tolist()) for r in (on_cuda, on_cpu))
    assert (found - expected).abs().max() < MAX_ERROR


@pytest.mark.parametrize("length", [8, 10])
def test_beams_take_each_others_places(checkpoint: Make, way: dict[str, object], length: int) -> None:
    """Block tables and last tokens of slots move on the device, between steps whose graphs read them."""
    made = checkpoint("qwen3-tied")
    search = Search(cuda_rig(made, record_logits=False, **way), prompt(length))
    for parents in ((0, 0, 2), (1, 1, 2), (0, 1, 2), (2, 2, 2), (0, 0, 0), (0, 1, 1)):
        search.go_on(list(enumerate(parents)))
        check(search, made, MAX_ERROR)


@torch.inference_mode()
def test_steps_overlap(checkpoint: Make, way: dict[str, object]) -> None:
    """Many steps are launched before the first is waited for; slots and blocks are reused meanwhile."""
    made = checkpoint("llama")
    rig, calm = cuda_rig(made, record_logits=False, **way), Rig(made.folder)
    new = [New(0, prompt(17, 1)), New(1, prompt(6, 2))]
    plans = [rig.scheduler.plan(new, {0: 17, 1: 6}), *(rig.scheduler.plan() for _ in range(20))]
    rig.scheduler.free += rig.blocks(1)
    first = list(rig.scheduler.sampling)
    plans.append(rig.scheduler.plan([New(1, prompt(9, 3))], {1: 9}, released=[1]))
    plans += [rig.scheduler.plan() for _ in range(10)]
    flights = [rig.replica.launch(decode_plan(plan)) for plan in plans]
    tokens: dict[int, list[int]] = {0: [], 1: []}
    for flight, slots in zip(flights, first + rig.scheduler.sampling[len(first) :], strict=True):
        outcome = flight.launch.wait()
        rig.replica.record(flight, outcome)
        for slot, token in zip(slots, outcome.token_ids.tolist(), strict=True):
            tokens[slot].append(token)
    calm.step([New(0, prompt(17, 1)), New(1, prompt(6, 2)), New(2, prompt(9, 3))], {0: 17, 1: 6, 2: 9})
    for _ in range(31):
        calm.step()
    assert tokens[0] == calm.tokens(0)[17:][: len(tokens[0])]
    assert tokens[1][:21] == calm.tokens(1)[6:][:21]
    assert tokens[1][21:] == calm.tokens(2)[9:][: len(tokens[1]) - 21]


def test_memory_is_measured(checkpoint: Make) -> None:
    """Nearly the whole requested share becomes blocks, and later steps fit as well."""
    made = checkpoint("llama")
    total = torch.cuda.get_device_properties(0).total_memory
    rig = cuda_rig(
        made, num_blocks=0, gpu_memory_utilization=0.5, block_size=64, max_num_batched_tokens=512, **WAYS["reference"]
    )
    used = total - torch.cuda.mem_get_info()[0]
    assert 0.4 * total < used < 0.52 * total
    rig.scheduler.free = list(range(rig.replica.limits.num_blocks - 1, 0, -1))
    rig.step([New(0, prompt(200))], {0: 200})
    rig.step()
    assert error(rig, made, 0) < MAX_ERROR


def test_a_lost_row_does_not_stop_the_device(checkpoint: Make, way: dict[str, object]) -> None:
    made = checkpoint("llama")
    rig = cuda_rig(made, **way)
    banned = sampling_pb2.SamplingParams(temperature=0.0, allowed_token_ids=[5])
    rig.step([New(0, prompt(5), sampling=banned, bad_words=((5,),)), New(1, prompt(7, 1))], {0: 5, 1: 7})
    assert [failure.slot for failure in rig.last_result.failures] == [0]
    rig.step()
    assert error(rig, made, 1) < MAX_ERROR
