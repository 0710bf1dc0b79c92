"""Sampling head: processes logits, chooses tokens, and stores each slot's token for the next step."""

from __future__ import annotations

from torch import Tensor

from quire.services.worker.device.staging import upload
from quire.services.worker.sampling.accept import ChooseTokens, accept_drafts, choose_coupled
from quire.services.worker.sampling.features.component import Positions
from quire.services.worker.sampling.sampler import PlainRows, SampledTokens, Sampler
from quire.services.worker.step.drafts.drafts import DraftRows
from quire.services.worker.step.drafts.tree_rows import NO_TOKEN
from quire.services.worker.step.slot_memory import SlotMemory
from quire.services.worker.step.slots import Rows
from quire.services.worker.step.step_inputs import StepInputs


class SamplingHead:
    """Head that samples the tokens of a step and stores each slot's last token in device memory, where the next step
    reads it."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.choose_tokens: ChooseTokens = choose_coupled

    def plain(self, slots: Rows) -> PlainRows | None:
        """Returns the rows of `slots` [num_rows] if a CUDA graph can sample them, else None."""
        return self.sampler.plain(slots)

    def launch(
        self, logits: Tensor, inputs: StepInputs, memory: SlotMemory, *, slots: Tensor, positions: Tensor
    ) -> SampledTokens:
        """Samples from `logits` [num_samples, vocab_size], which may be overwritten.

        `slots` and `positions`, int32 [num_samples], are the inputs' sampling_slots and sample_positions on the device.
        Rows from which no token can be sampled store -1 as last token; the next step embeds it as 0.
        """
        if inputs.drafts is not None:
            return self._verify(logits, inputs, inputs.drafts, memory, positions)
        sampled = self.sampler.sample(logits, inputs.sampling_slots, Positions(inputs.sample_positions, positions))
        memory.last_tokens.index_copy_(0, slots.long(), sampled.token_ids)
        return sampled

    def _verify(
        self, logits: Tensor, inputs: StepInputs, drafts: DraftRows, memory: SlotMemory, positions: Tensor
    ) -> SampledTokens:
        """Samples a row per draft and one more for each slot, accepts drafts and stores the last tokens: int32
        [num_rows] with REJECTED in the rows after a slot's last accepted one."""
        ahead = upload(drafts.preceding_drafts, logits.device)
        ready = self.sampler.process(
            logits, inputs.sampling_slots, Positions(inputs.sample_positions, positions, ahead)
        )
        requested_places = self.choose_tokens(ready, drafts)
        token_ids = accept_drafts(requested_places, drafts, memory.last_tokens, memory.scratch_slot)
        return ready.finish(token_ids.clamp(min=NO_TOKEN)).with_tokens(token_ids)
