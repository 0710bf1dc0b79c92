"""Model family from a plugin: Llama with negated logits, so that its likeliest token is the least likely one."""

from __future__ import annotations

from typing import Any

from quire.services.worker.models.families.llama import LlamaForCausalLM


class BackwardsLlamaForCausalLM(LlamaForCausalLM):
    """Loads Llama checkpoints."""

    def logits(self, hidden: Any) -> Any:
        return -super().logits(hidden)
