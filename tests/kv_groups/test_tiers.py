"""Models of several KV groups with KV in host memory and on disk, scheduler and worker together: prompts are restored,
and the text equals transformers'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.services.scheduler.core.limits import TierLimits
from quire.services.worker.replica.replica import Replica
from quire.services.worker.replica.retained_state import RetainedState
from quire.shared.kv.block_hash import page_of
from tests.kv_groups.models import confirmed
from tests.kv_groups.test_windows import prompt
from tests.services.worker import checkpoints
from tests.services.worker.checkpoints import Checkpoint
from tests.spec_decode.pair import Answer, Pair, build

Make = Callable[[str], Checkpoint]
# Name -> (family, block size, configuration, blocks on a device that holds about two of the prompts)
MODELS: dict[str, tuple[str, int, dict[str, Any], int]] = {
    "gemma3": ("gemma3-tied", 4, {}, 64),
    "chunks": ("llama4", 4, {"attention_chunk_size": 9, "tie_word_embeddings": True, "intermediate_size": 40}, 96),
    "all-windows": ("mistral-window", 4, {"sliding_window": 9}, 20),
    "qwen3-next": ("qwen3-next", 8, {}, 50),
    "falcon-h1": ("falcon-h1", 8, {}, 40),
}
COUNT = 10  # tokens of each answer
models = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    found: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in found:
            family, _, config, _ = MODELS[name]
            found[name] = checkpoints.make(family, tmp_path_factory.mktemp(name), **config)
        return found[name]

    return get


def replica_of(made: Make, name: str, /, **settings: Any) -> Replica:
    _, block_size, _, num_blocks = MODELS[name]
    sizes = {"block_size": block_size, "max_num_batched_tokens": 16, "max_num_seqs": 4, "num_blocks": num_blocks}
    return build(None, made(name).folder, **{**sizes, "kv_offloading_size": 0.001, **settings})


def pair(replica: Replica, num_host_blocks: int = 1000) -> Pair:
    tiers = TierLimits(min(replica.transfers.num_host_blocks, num_host_blocks), replica.transfers.num_disk_blocks)
    return Pair(replica, tiers=tiers)


def check(checkpoint: Checkpoint, answers: list[Answer]) -> None:
    assert {len(answer.tokens) for answer in answers} == {COUNT}
    assert [answer.tokens for answer in answers] == [confirmed(checkpoint, a.prompt, a.tokens) for a in answers]


def generate_all(run: Pair, prompts: list[list[int]]) -> list[Answer]:
    """Answers the prompts one after the other."""
    answers = []
    for tokens in prompts:
        answers.append(run.ask(tokens, max_tokens=COUNT, eos=()))
        run.run()
    return answers


@models
def test_prompts_evicted_from_the_device_are_restored(made: Make, name: str) -> None:
    run = pair(replica_of(made, name))
    prompts = [prompt(50, seed) for seed in range(4)]
    first = generate_all(run, prompts)
    cached = run.core.counts.cached_tokens
    assert cached == 0
    again = generate_all(run, prompts)
    size = run.core.limits.block_size
    assert run.core.counts.cached_tokens >= 4 * (49 // size * size), "all but what lies behind the last whole block"
    assert run.core.counts.fetched_blocks > 0
    longer = generate_all(run, [answer.prompt + answer.tokens + prompt(3, 7) for answer in first])
    assert run.core.counts.cached_tokens >= 4 * (49 // size + 59 // size) * size, "answers as well"
    check(made(name), [*first, *again, *longer])
    assert run.core.use.used == 0
    assert run.core.kv.num_unowned() == 0


@models
def test_state_is_saved_where_prompts_diverge(made: Make, name: str) -> None:
    run = pair(replica_of(made, name))
    head = prompt(32, 1)
    flood = [prompt(50, seed) for seed in range(20, 23)]
    found = []
    answers = []
    for seed in range(3):
        before = run.core.counts.cached_tokens
        answers += generate_all(run, [[*head, *prompt(9, 100 + seed)]])
        found.append(run.core.counts.cached_tokens - before)
        answers += generate_all(run, [[*tokens, seed] for tokens in flood])
    assert found[2] == 32, "the second has left it, the third starts there"
    check(made(name), answers)


@models
def test_preempted_sequences_of_full_tiers_have_the_same_text(made: Make, name: str) -> None:
    run = pair(replica_of(made, name))
    prompts = [prompt(20 + 3 * seed, seed) for seed in range(8)]
    answers = [run.ask(tokens, max_tokens=COUNT, eos=()) for tokens in prompts]
    run.preempt_often(60)
    answers += [run.ask(tokens, max_tokens=COUNT, eos=()) for tokens in prompts]
    run.run()
    assert run.core.counts.preemptions > 3
    assert run.core.counts.fetched_blocks > 0
    check(made(name), answers)
    assert run.core.use.used == 0


def close(replica: Replica) -> None:
    disk = replica.transfers.tiers.disk
    assert disk is not None
    disk.close(5.0)


def adopt(run: Pair, held: RetainedState) -> None:
    assert run.core.host_blocks is not None
    run.core.host_blocks.tier.adopt(held.in_host_memory.items())
    if run.core.host_blocks.disk is not None:
        run.core.host_blocks.disk.tier.adopt(held.on_disk.items())


@pytest.mark.parametrize("name", ["gemma3", "qwen3-next"])
def test_restarted_scheduler_learns_the_contents_of_lower_tiers(made: Make, name: str) -> None:
    run = pair(replica_of(made, name))
    prompts = [prompt(50, seed) for seed in range(4)]
    generate_all(run, prompts)
    held = run.replica.end_epoch()
    groups = {page_of(page)[0] for page in held.in_host_memory.values()}
    assert groups == set(range(run.core.kv.num_groups)), "pages of each group"
    later = pair(run.replica)
    adopt(later, held)
    check(made(name), generate_all(later, prompts[:2]))
    assert later.core.counts.cached_tokens >= 2 * 48


@pytest.mark.parametrize("name", ["gemma3", "qwen3-next", "falcon-h1"])
def test_restarted_worker_reads_the_disk_and_recomputes_damaged_blocks(made: Make, name: str, tmp_path: Path) -> None:
    settings = {"kv_offloading_disk": str(tmp_path), "kv_offloading_disk_size": 0.01}
    replica = replica_of(made, name, **settings)
    prompts = [prompt(50, seed) for seed in range(4)]
    run = pair(replica, num_host_blocks=60)
    generate_all(run, prompts)
    assert run.core.counts.disk_stored_blocks > 0
    close(replica)
    second = replica_of(made, name, **settings)
    held = second.end_epoch()
    assert {page_of(page)[0] for page in held.on_disk.values()} == set(range(run.core.kv.num_groups))
    later = pair(second, num_host_blocks=60)
    adopt(later, held)
    check(made(name), generate_all(later, prompts[:1]))
    assert later.core.counts.cached_tokens >= 48
    assert later.core.counts.disk_fetched_blocks > 0
    for path in [*tmp_path.rglob("*.kv")][::2]:
        content = bytearray(path.read_bytes())
        content[-100] ^= 4
        path.write_bytes(content)
    check(made(name), generate_all(later, prompts[::-1]))
    assert later.core.counts.disk_lost_blocks > 0
    close(second)
