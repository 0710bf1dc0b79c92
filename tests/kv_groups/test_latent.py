"""Models with latent attention, scheduler and worker together: the text equals transformers', and the cache is a
fraction of full keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.services.scheduler.core.sequences.sequence import SampleGroup
from quire.services.worker.building.build import build_replica
from quire.services.worker.limits.kv_layout import KVLayout
from quire.shared.errors import InvalidArgument, QuireError
from quire.shared.kv.kv_specs import FULL, Latent, Window
from quire.shared.settings import WorkerSettings
from tests.kernels.cpu.closeness import needs_library
from tests.kv_groups import models
from tests.kv_groups.models import Make, greedy
from tests.kv_groups.test_windows import pair, prompt
from tests.services.worker.replica_internals import runner_of
from tests.spec_decode.pair import Pair

FAMILIES = ("deepseek-v2-groups", "deepseek-v3", "deepseek-v3-yarn")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive_length": False}
families = pytest.mark.parametrize("family", FAMILIES)


@families
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_text_is_that_of_transformers_though_prompts_come_in_chunks(made: Make, family: str, backend: str) -> None:
    checkpoint = made(family)
    run = pair(checkpoint, attention_backend=backend)
    asked = [run.ask(prompt(length, seed), max_tokens=16, eos=()) for seed, length in enumerate((50, 3, 23, 9, 37))]
    run.run()
    again = run.ask(asked[0].prompt + asked[0].tokens + prompt(5, 9), max_tokens=12, eos=())
    run.run()
    assert run.core.counts.cached_tokens >= 64, "whole blocks of the first"
    assert [a.tokens for a in (*asked, again)] == [greedy(checkpoint, a.prompt, len(a.tokens)) for a in (*asked, again)]
    assert run.core.use.used == 0


def test_preempted_sequences_have_the_same_text(made: Make) -> None:
    checkpoint = made("deepseek-v3")
    run = pair(checkpoint)
    answers = [run.ask(prompt(20 + seed, seed), max_tokens=20, eos=()) for seed in range(4)]
    for turn in range(50):
        run.plan()
        live = np.flatnonzero(run.core.running.live)
        if turn % 7 == 3 and len(live):
            run.core.preempt(int(live[turn % len(live)]))
        if run.results:
            run.result()
    run.run()
    assert run.core.counts.preemptions > 3
    assert [a.tokens for a in answers] == [greedy(checkpoint, a.prompt, 20) for a in answers]


def test_samples_of_one_prompt_copy_the_block_it_ends_in(made: Make) -> None:
    checkpoint = made("deepseek-v3")
    run, tokens, family = pair(checkpoint), prompt(30, 4), SampleGroup()
    answers = [run.ask(tokens, max_tokens=12, eos=(), family=family) for _ in range(3)]
    run.run()
    assert [a.tokens for a in answers] == [greedy(checkpoint, tokens, 12)] * 3
    assert run.core.counts.cached_tokens >= 2 * 29


def test_drafts_change_no_text(made: Make) -> None:
    checkpoint = made("deepseek-v3")
    run = pair(checkpoint, NGRAM)
    answers = [run.ask(tokens, max_tokens=60, eos=()) for tokens in (prompt(6, 1) * 6, prompt(4, 2) * 5)]
    run.run()
    assert [a.tokens for a in answers] == [greedy(checkpoint, a.prompt, 60) for a in answers]
    assert run.core.speculation.counts.accepted_tokens > 0


def test_a_scheduler_that_restarts_finds_what_the_worker_holds(made: Make) -> None:
    checkpoint = made("deepseek-v3")
    run, first = pair(checkpoint), prompt(60, 1)
    said = run.ask(first, max_tokens=20, eos=())
    run.run()
    later = Pair(run.replica)
    later.adopt(run.replica.end_epoch())
    answer = later.ask(first + said.tokens, max_tokens=12, eos=())
    later.run()
    assert answer.tokens == greedy(checkpoint, answer.prompt, 12)
    assert later.core.counts.cached_tokens >= 76


def test_cache_has_one_latent_vector_per_token(made: Make) -> None:
    """Six heads with keys of 18 and values of 14 elements would take 192 elements per layer; a latent vector takes 24 +
    8."""
    replica = pair(made("deepseek-v3")).replica
    layout = replica.limits.layout
    assert [(group.spec, group.layers) for group in layout.groups] == [(Latent(24, 8), (0, 1, 2))]
    caches = runner_of(replica).caches
    tokens = replica.limits.num_blocks * replica.limits.block_size
    assert sum(part.nbytes for cache in caches for part in cache.parts) == tokens * 3 * (24 + 8) * 4


def test_the_same_memory_holds_as_many_more_blocks(made: Make, tmp_path: Path) -> None:
    """The comparison is a model that caches every head's keys and values."""
    sizes = {"num_blocks": 0, "cpu_kv_cache_gib": 1 / 1024, "block_size": 4, "max_model_len": 64}
    latent = pair(made("deepseek-v3"), **sizes).replica.limits.num_blocks
    own = models.checkpoints.make("llama", tmp_path, num_key_value_heads=6, head_dim=16)
    full = pair(own, **sizes).replica.limits.num_blocks
    assert latent == 2**20 // (4 * 3 * (24 + 8) * 4)
    assert full == 2**20 // (4 * 3 * 6 * (16 + 16) * 4)
    assert latent == 6 * full + 4


def test_pages_of_two_sizes_are_refused() -> None:
    for specs in ([Latent(8, 4), FULL], [Window(8), Latent(8, 4)], [Latent(8, 4), Latent(16, 4)]):
        with pytest.raises(InvalidArgument, match=r"layer 1 keeps .* where layer 0 keeps .*: pages have one size"):
            KVLayout.of(specs, 100)


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        (
            {"attention_backend": "flash_attn_2"},
            InvalidArgument,
            "flash_attn_2 does not support .*: does not support latent attention",
        ),
        ({"batch_invariant": True, "dtype": "float16"}, InvalidArgument, "batch_invariant: dtype float16"),
    ],
)
@pytest.mark.skipif(**needs_library)
def test_unsupported_options_are_rejected_by_name(
    made: Make, settings: dict[str, Any], error: type[QuireError], text: str
) -> None:
    with pytest.raises(error, match=text):
        build_replica(WorkerSettings(model=str(made("deepseek-v3").folder), num_blocks=20, **settings))


def test_adapters_of_absorbed_projections_are_rejected(made: Make, tmp_path: Path) -> None:
    from tests.services.worker.lora import peft_folders

    adapter = peft_folders.save(
        made("deepseek-v3"),
        tmp_path / "a",
        seed=1,
        wanted=lambda n: n.endswith("kv_b_proj"),
        without=("lm_head", ".gate"),
    )
    with pytest.raises(InvalidArgument, match=r"self_attn\.kv_b_proj is not a linear layer, .* can be adapted"):
        build_replica(WorkerSettings(model=str(made("deepseek-v3").folder), lora={"a": str(adapter.folder)}))
