"""Logits equal those of transformers, for any division into steps and blocks.

float32: largest difference 5e-5 at logits of magnitude up to 6 (different order of sums).
bfloat16: 0.15 of the logits' standard deviation (8 bits of mantissa through 3 layers, in both implementations).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.services.worker.checkpoints import FAMILIES, VOCAB_SIZE, Checkpoint
from tests.services.worker.plans import New
from tests.services.worker.replica_internals import runner_of
from tests.services.worker.rig import Rig

MAX_ERROR = 5e-5
MAX_ERROR_BFLOAT16 = 0.15

Make = Callable[[str], Checkpoint]

STATE_SPACES = ["granite-hybrid", "granite-hybrid-experts", "falcon-h1", "falcon-h1-norms"]
families = pytest.mark.parametrize("family", FAMILIES)
block_sizes = pytest.mark.parametrize("block_size", [4, 16])


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def error(rig: Rig, made: Checkpoint, slot: int) -> float:
    """Returns the largest difference of the slot's sampled rows from transformers on the same tokens."""
    return float(errors(rig, made, slot).max())


def errors(rig: Rig, made: Checkpoint, slot: int) -> torch.Tensor:
    """Returns the largest difference of each sampled row."""
    tokens, rows = rig.tokens(slot), torch.stack(rig.logits[slot])
    first = len(tokens) - len(rows)
    expected = made.logits(tokens)[first - 1 : -1]
    return (rows - expected).abs().amax(1)


@families
@block_sizes
def test_prefill_then_decode(checkpoint: Make, family: str, block_size: int) -> None:
    made = checkpoint(family)
    rig = Rig(made.folder, block_size=block_size)
    rig.step([New(0, prompt(21))], {0: 21})
    for _ in range(14):
        rig.step()
    assert len(rig.logits[0]) == 15
    assert error(rig, made, 0) < MAX_ERROR


@families
def test_chunked_prefill(checkpoint: Make, family: str) -> None:
    made = checkpoint(family)
    rig = Rig(made.folder)
    rig.step([New(0, prompt(39))], {0: 10})
    for count in (1, 17, 0, 11):
        rig.step(counts={0: count})
    for _ in range(3):
        rig.step()
    assert len(rig.logits[0]) == 4
    assert error(rig, made, 0) < MAX_ERROR


@families
@block_sizes
def test_mixed_batches(checkpoint: Make, family: str, block_size: int) -> None:
    made = checkpoint(family)
    check_mixed_batches(Rig(made.folder, block_size=block_size), made)


@pytest.mark.parametrize("family", ["llama", "qwen2-windows", "gpt-oss", "deepseek-v2"])
def test_mixed_batches_kernel_by_kernel(checkpoint: Make, family: str) -> None:
    """Attention runs in plain torch, which tapes do not record, as on hosts without the compiled kernels."""
    made = checkpoint(family)
    check_mixed_batches(Rig(made.folder, attention_backend="reference"), made)


def check_mixed_batches(rig: Rig, made: Checkpoint) -> None:
    """Runs prefills, chunks, decodes and skipped slots in the same steps."""
    rig.step([New(2, prompt(9, 2)), New(0, prompt(30, 1))], {0: 12, 2: 9})
    rig.step([New(5, prompt(17, 3))], {0: 12, 5: 17})
    rig.step(counts={0: 6, 2: 0})
    rig.step([New(1, prompt(3, 4))], {1: 3})
    for _ in range(6):
        rig.step()
    assert max(error(rig, made, slot) for slot in (0, 1, 2, 5)) < MAX_ERROR


@families
@block_sizes
def test_prefix_hits(checkpoint: Make, family: str, block_size: int) -> None:
    """A prompt continues another's blocks, one is cached completely, and one hits blocks of the same step."""
    made = checkpoint(family)
    rig = Rig(made.folder, block_size=block_size)
    head = prompt(2 * block_size, 5)
    rig.step([New(0, head + prompt(5, 6))], {0: 2 * block_size + 5})
    shared = rig.blocks(0)[:2]
    tail = prompt(7, 7)
    rig.step([New(1, head + tail, cached_blocks=shared), New(3, head, cached_blocks=shared)], {1: 7})
    rig.step()
    rig.step([New(4, head + tail, cached_blocks=shared)], {4: 7})
    for _ in range(5):
        rig.step()
    assert max(error(rig, made, slot) for slot in (0, 1, 3, 4)) < MAX_ERROR


@pytest.mark.parametrize("family", STATE_SPACES)
def test_states(checkpoint: Make, family: str) -> None:
    """Chunks end within blocks, decodes share their steps, and one prompt resumes from a saved state."""
    made = checkpoint(family)
    rig = Rig(made.folder, block_size=8)
    head = prompt(16, 1)
    rig.step([New(2, prompt(9, 2)), New(0, head + prompt(14, 3))], {0: 13, 2: 9})
    rig.step(counts={0: 9})
    rig.step([New(3, head + prompt(7, 4), cached_blocks=rig.blocks(0)[:2])], {0: 8, 3: 4})
    rig.step(counts={3: 3, 2: 0})
    for _ in range(8):
        rig.step()
    assert max(error(rig, made, slot) for slot in (0, 2, 3)) < MAX_ERROR


def test_two_equal_prompts_of_one_step_share_blocks(checkpoint: Make) -> None:
    """The second prompt reads blocks that the first writes in the same forward pass."""
    made = checkpoint("qwen3-tied")
    rig = Rig(made.folder)
    tokens = prompt(10, 8)
    first_blocks = tuple(rig.scheduler.free[::-1][:2])
    rig.step([New(0, tokens), New(1, tokens, cached_blocks=first_blocks)], {0: 10, 1: 2})
    rig.step()
    assert rig.tokens(0) == rig.tokens(1)
    assert max(error(rig, made, slot) for slot in (0, 1)) < MAX_ERROR


@torch.inference_mode()
def test_a_cached_prompt_does_not_write_to_the_blocks_it_shares(checkpoint: Make) -> None:
    made = checkpoint("qwen3-tied")
    rig = Rig(made.folder)
    tokens = prompt(8, 9)
    rig.step([New(0, tokens)], {0: 8})
    caches = runner_of(rig.replica).caches
    shared = list(rig.blocks(0)[:2])
    for cache in caches:
        cache.k[shared] += 0.5  # a write would restore it
    before = [cache.k[shared].clone() for cache in caches]
    rig.step([New(1, tokens, cached_blocks=tuple(shared))])
    assert all(torch.equal(cache.k[shared], kept) for cache, kept in zip(caches, before, strict=True))


def test_slots_and_blocks_are_used_again(checkpoint: Make) -> None:
    """One plan releases a slot and admits another sequence to it and to its blocks."""
    made = checkpoint("llama")
    rig = Rig(made.folder)
    rig.step([New(0, prompt(14, 10)), New(1, prompt(6, 11))], {0: 14, 1: 6})
    rig.step()
    rig.scheduler.free += rig.blocks(0)
    rig.logits.clear()
    rig.step([New(0, prompt(11, 12))], {0: 11}, released=[0])
    rig.step()
    assert max(error(rig, made, slot) for slot in (0, 1)) < MAX_ERROR


@pytest.mark.parametrize("family", ["llama", "qwen2-moe"])
def test_preempted_sequence_resumes_unchanged(checkpoint: Make, family: str) -> None:
    made = checkpoint(family)
    rig, calm = Rig(made.folder), Rig(made.folder)
    for each in (rig, calm):
        each.step([New(0, prompt(14, 13))], {0: 14})
        each.step()
        each.step()
    so_far = list(rig.tokens(0))
    rig.step(released=[0])
    rig.step([New(3, so_far, num_prompt=14)], {3: 10})
    rig.step(counts={3: len(so_far) - 10})
    for each in (rig, calm):
        each.step()
        each.step()
    calm.step()
    assert rig.tokens(3) == calm.tokens(0)
    assert error(rig, made, 3) < MAX_ERROR


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2-tied", "qwen3-tied"])
def test_bfloat16(checkpoint: Make, family: str) -> None:
    made = checkpoint(family)
    rig = Rig(made.folder, dtype="bfloat16")
    rig.step([New(0, prompt(21))], {0: 13})
    rig.step(counts={0: 8})
    for _ in range(4):
        rig.step()
    spread = float(made.logits(rig.tokens(0)).std())
    assert error(rig, made, 0) < MAX_ERROR_BFLOAT16 * spread


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe", "qwen3-moe-tied"])
def test_bfloat16_in_mixtures_of_experts(checkpoint: Make, family: str) -> None:
    """Experts with similar scores may swap when logits are rounded, which changes the row; most do not."""
    made = checkpoint(family)
    rig = Rig(made.folder, dtype="bfloat16")
    for slot in range(8):
        rig.step([New(slot, prompt(11, slot))], {slot: 11})
    rig.step()
    spread = float(made.logits(rig.tokens(0)).std())
    apart = torch.cat([errors(rig, made, slot) for slot in range(8)])
    assert float(apart.median()) < MAX_ERROR_BFLOAT16 * spread


@torch.inference_mode()
def test_stale_nan_in_used_blocks_does_not_spread(checkpoint: Make) -> None:
    """Blocks of a failed sequence are reused without being cleared."""
    made = checkpoint("llama")
    rig = Rig(made.folder)
    for cache in runner_of(rig.replica).caches:
        cache.k.fill_(float("nan"))
        cache.v.fill_(float("nan"))
    rig.step([New(0, prompt(9, 14)), New(1, prompt(18, 15))], {0: 9, 1: 18})
    rig.step()
    rig.step()
    assert max(error(rig, made, slot) for slot in (0, 1)) < MAX_ERROR
