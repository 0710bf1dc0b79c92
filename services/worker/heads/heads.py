"""Heads of a worker: the sampling head, and the selection of the others for each step, slot by slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from torch import Tensor

from quire.services.worker.device.staging import Staging, upload
from quire.services.worker.heads.alignment import AlignmentHead, AlignmentRows
from quire.services.worker.heads.features import FeaturesHead
from quire.services.worker.heads.late_interaction import LateInteractionScorer
from quire.services.worker.heads.port import Head, HeadLaunch, HeadRows
from quire.services.worker.sampling.accept import ChooseTokens, accept_drafts, choose_coupled
from quire.services.worker.sampling.features.component import Positions, SlotState
from quire.services.worker.sampling.sampler import PlainRows, SampledTokens, Sampler
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.drafts.drafts import DraftRows
from quire.services.worker.step.drafts.tree_rows import NO_TOKEN
from quire.services.worker.step.slot_memory import SlotMemory
from quire.services.worker.step.slots import Rows
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.columns import I32
from quire.shared.errors import InvalidArgument, QuireError


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
        return ready.record_choice(token_ids.clamp(min=NO_TOKEN)).with_tokens(token_ids)


@dataclass(frozen=True, slots=True)
class StepHeads:
    """Heads of a step in addition to sampling."""

    rows: tuple[HeadRows, ...]

    @property
    def reads_all_tokens(self) -> bool:
        """Whether a head reads the hidden states of all tokens; launch() then expects all of them."""
        return any(rows.tokens is None for rows in self.rows)

    @property
    def reads_queries(self) -> bool:
        """Whether a head reads the queries of cross attention, which only layers that run one by one keep."""
        return any(isinstance(rows, AlignmentRows) for rows in self.rows)

    def required_tokens(self, sampling_tokens: I32) -> I32:
        """Returns the indices of tokens whose hidden states are needed unless all are: the sampling ones, then those of
        each head in turn."""
        return np.concatenate([sampling_tokens, *(rows.tokens for rows in self.rows if rows.tokens is not None)])

    def launch(self, hidden: Tensor, num_samples: int, staging: Staging) -> list[HeadLaunch]:
        """Launches the heads and returns their outputs in flight. `hidden`: the states of all tokens if
        `reads_all_tokens`, else of required_tokens(), whose first `num_samples` are for sampling."""
        if self.reads_all_tokens:
            return self.launch_all(hidden, staging)
        ends = accumulate((len(rows.tokens) for rows in self.rows if rows.tokens is not None), initial=num_samples)
        return [rows.launch(hidden[a:b]) for rows, (a, b) in zip(self.rows, pairwise(ends), strict=True)]

    def launch_all(self, hidden: Tensor, staging: Staging) -> list[HeadLaunch]:
        """Launches the heads on `hidden` [num_tokens, hidden_size] of all tokens of the step, selecting the rows of
        heads that read some."""
        return [
            rows.launch(hidden if rows.tokens is None else hidden.index_select(0, staging.upload([rows.tokens])[0]))
            for rows in self.rows
        ]


SAMPLING_ONLY = StepHeads(())  # what most steps end in


class Heads:
    """Owns all heads of a worker. Sampling is separate: steps feed each other with its tokens, and CUDA graphs include
    it."""

    def __init__(
        self,
        sampler: Sampler,
        others: Sequence[Head],
        observers: Sequence[SlotState] = (),
        late: LateInteractionScorer | None = None,
    ) -> None:
        """`observers`: other per-slot state that is notified of admit() and release(); `late`: scores documents against
        cached queries, None if the model does not support it."""
        self._late = late
        self.sampling = SamplingHead(sampler)
        self._sampler = sampler
        self._others = tuple(others)
        self._features: FeaturesHead | None = None
        self._observers = tuple(observers)
        self._heads_of: dict[int, list[Head]] = {}  # by slot: those that its sequence requests

    def use_features(self, features: FeaturesHead) -> None:
        """Makes steps end in `features` as well."""
        self._features = features

    def use_alignment(self, head: AlignmentHead) -> None:
        """Lets sequences ask for their alignment with the output of an encoder."""
        self._others += (head,)

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        """Stores what the sequence's passes end in, in sampler, heads and observers. Raises InvalidArgument after
        releasing it everywhere, also for an alignment without a head for it; the slot is then computed with default
        parameters."""
        asked = admission.parameters
        heads = self._heads_of[slot] = [head for head in self._others if not head.parameters.isdisjoint(asked)]
        try:
            if admission.alignment is not None and not heads:
                text = "alignment: this worker cannot align; it needs Whisper without tensor parallelism"
                raise InvalidArgument(text, field="alignment")
            if not admission.samples_nothing:
                self._sampler.admit(slot, admission)
            for state in (*heads, *self._observers):
                state.admit(slot, admission)
        except QuireError:
            self.release(slot)
            raise

    def release(self, slot: int) -> None:
        """Drops the state of `slot` in sampler, heads and observers."""
        self._sampler.release(slot)
        for state in (*self._heads_of.pop(slot, ()), *self._observers):
            state.release(slot)

    @property
    def num_query_vectors(self) -> int:
        """Capacity for cached query vectors (late interaction)."""
        return self._late.max_query_vectors if self._late is not None else 0

    @property
    def query_bytes(self) -> int:
        """Upper bound of the device memory that cached query vectors take."""
        return self._late.max_query_bytes if self._late is not None else 0

    def drop_queries(self, names: bytes) -> None:
        """Drops cached queries before the next step; `names`: concatenated query names."""
        if self._late is not None:
            self._late.drop_queries(names)

    def clear_queries(self) -> None:
        if self._late is not None:
            self._late.clear_queries()

    def prepare_step(self) -> None:
        """Starts work on the host that a step's sampling waits for (grammar masks), once all of its sequences are
        admitted."""
        masks = self._sampler.grammar_masks
        if masks.admitted:
            masks.build_first_masks()

    def for_step(self, inputs: StepInputs) -> StepHeads:
        """Returns the heads other than sampling that a row of the step ends in, with the hidden states that they read;
        SAMPLING_ONLY if there are none. Called once per step, in order."""
        rows: tuple[HeadRows, ...] = ()
        for head in self._others:
            if head.specs and (head_rows := head.rows(inputs)) is not None:
                rows += (head_rows,)
        if self._features is not None and (features := self._features.rows(inputs)) is not None:
            rows += (features,)
        return StepHeads(rows) if rows else SAMPLING_ONLY
