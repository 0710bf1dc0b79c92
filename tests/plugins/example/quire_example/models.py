"""A family that Quire does not know: Llama whose likeliest token is the least likely one."""

from __future__ import annotations

from typing import Any

from quire.services.worker.models.families.llama import LlamaForCausalLM


class BackwardsLlamaForCausalLM(LlamaForCausalLM):
    """Reads what Llama reads."""

    def logits(self, hidden: Any) -> Any:
        return -super().logits(hidden)
