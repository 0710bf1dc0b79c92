"""Conversations of coding assistants, replayed against real processes: every turn is answered, every event in order."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from quire.cluster import Cluster
from tests.coding_clients.events import Answered
from tests.coding_clients.replay import NAMES, replay


def replayed(cluster: Cluster, name: str, salt: str = "") -> list[Answered]:
    async def run() -> list[Answered]:
        async with httpx.AsyncClient(base_url=f"http://{cluster.http_address}", timeout=120) as http:
            return await replay(name, http, salt=salt, model="quire-tiny", temperature=0)

    return asyncio.run(run())


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_is_answered_to_its_end(cluster: Cluster, name: str) -> None:
    answers = replayed(cluster, name)
    assert len(answers) >= 2
    assert any(answered.text for answered in answers)
    assert name == "aider" or any(answered.calls for answered in answers)


def test_a_billing_header_that_changes_leaves_the_prefix_in_the_cache(cluster: Cluster) -> None:
    """Each request of Claude Code has another hash in its first line (vllm#36829, llama.cpp#20623, ollama#14918)."""
    replayed(cluster, "claude_code", "first")
    answers = replayed(cluster, "claude_code", "second")
    shares = [answered.num_cached_tokens / answered.num_prompt_tokens for answered in answers]
    print("share of prompt tokens from the cache:", [f"{share:.3f}" for share in shares])
    assert min(shares) > 0.9
