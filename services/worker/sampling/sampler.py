"""The order of sampling: log-probabilities as the model gave them, then every feature in turn, then the choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from quire.kernels import Ops
from quire.services.worker.sampling.choice import FEW_TOKENS, BoundChoice, SlotChoice
from quire.services.worker.sampling.features.allowed_token_ids import AllowedTokenIds
from quire.services.worker.sampling.features.bad_words import BadWords
from quire.services.worker.sampling.features.component import Bound, Component, Positions, SlotState
from quire.services.worker.sampling.features.grammar_masks import BoundGrammarMasks, GrammarMasks
from quire.services.worker.sampling.features.logit_bias import LogitBias
from quire.services.worker.sampling.features.min_tokens import MinTokens
from quire.services.worker.sampling.features.penalties import Penalties
from quire.services.worker.sampling.features.thinking_budget import ThinkingBudget
from quire.services.worker.sampling.features.top_n_sigma import TopNSigma
from quire.services.worker.sampling.logits_processors import LogitsProcessors, MakeProcessor
from quire.services.worker.sampling.logprobs import BoundLogprobs, RowLogprobs, SlotLogprobs
from quire.services.worker.sampling.logprobs_mode import LogprobsMode
from quire.services.worker.sampling.vocabulary.port import Vocabulary
from quire.services.worker.sampling.vocabulary.whole_vocabulary import WholeVocabulary
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.slots import NO_SLOTS, Rows
from quire.services.worker.structured.compile_pool import CompilePool
from quire.services.worker.structured.mask_builder import StepMasks
from quire.shared.errors import QuireError
from quire.shared.step_value import step_value

NO_PROCESSORS: Mapping[str, MakeProcessor] = MappingProxyType({})


@step_value
class SampledTokens:
    """What the rows of a step got, on the device."""

    token_ids: Tensor  # int32 [num_rows], -1 where nothing could be chosen
    logprobs: RowLogprobs | None
    masked: StepMasks | None = None  # where rows have a grammar

    @property
    def tensors(self) -> list[Tensor]:
        """What is to be copied to the host: token ids, then the three of RowLogprobs if there are any."""
        found = self.logprobs
        return [self.token_ids, found.token_ids, found.logprobs, found.ranks] if found else [self.token_ids]

    def with_tokens(self, token_ids: Tensor) -> SampledTokens:
        return replace(self, token_ids=token_ids)

    def faults(self) -> dict[int, QuireError]:
        """Sequences that cannot go on, by slot; waits until that is known. Any thread may ask."""
        return {} if self.masked is None else self.masked.faults()


@dataclass(frozen=True, slots=True)
class _Bindings:
    """Everything prepared for the same rows."""

    slots: Rows
    logprobs: BoundLogprobs | None
    features: list[Bound]
    masks: BoundGrammarMasks | None  # one of the features
    choice: BoundChoice

    @property
    def masks_alone(self) -> bool:
        return self.masks is not None and len(self.features) == 1

    @property
    def masked(self) -> StepMasks | None:
        return None if self.masks is None else self.masks.step


@step_value
class PlainRows:
    """Rows whose choice is recorded: what a grammar bans is banned before it, in logits as they come."""

    choice: BoundChoice
    _masks: BoundGrammarMasks | None

    def mask(self, logits: Tensor) -> None:
        if self._masks is not None:
            self._masks.apply_alone(logits)

    def finish(self, token_ids: Tensor) -> SampledTokens:
        """These are the rows' tokens."""
        if self._masks is None:
            return SampledTokens(token_ids, None)
        self._masks.sampled(token_ids)
        return SampledTokens(token_ids, None, masked=self._masks.step)


@step_value
class ProcessedRows:
    """Rows before their choice."""

    logits: Tensor  # [num_rows, shard.size], temperature and filters still to come; a choice may overwrite them
    positions: Positions
    vocabulary: Vocabulary  # that they are of
    _bindings: _Bindings
    _logprob_source: Tensor | None  # what log-probabilities are taken from; None: no row asked for any

    def choose(self) -> Tensor:
        """int32 [num_rows]; -1 where nothing can be chosen."""
        return self._bindings.choice.choose(self.logits, self.positions)

    @property
    def choice(self) -> BoundChoice:
        """Temperature, filters and seeds of the rows."""
        return self._bindings.choice

    def finish(self, token_ids: Tensor) -> SampledTokens:
        """These are the rows' tokens, -1 where a row gave none."""
        for feature in self._bindings.features:
            feature.sampled(token_ids)
        asked = self._bindings.logprobs
        source = self._logprob_source
        logprobs = asked.collect(source, token_ids) if asked and source is not None else None
        return SampledTokens(token_ids, logprobs, masked=self._bindings.masked)


class Sampler:
    """Owns the sampling state of all slots."""

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        max_logprobs: int,
        ops: Ops,
        device: torch.device,
        *,
        logprobs_mode: str = "raw_logprobs",
        grammars: CompilePool | None = None,
        batch_invariant: bool = False,
        processors: Mapping[str, MakeProcessor] = NO_PROCESSORS,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        """`grammars`: None where no output is constrained; `processors`: of other packages, by name; `vocabulary`: what
        the logits are of that it will see, None for all tokens."""
        self._all_tokens = WholeVocabulary(vocab_size, ops)
        self.vocabulary: Vocabulary = vocabulary or self._all_tokens
        shard = self.vocabulary.shard
        mode = LogprobsMode.from_name(logprobs_mode, self.vocabulary, ties_by_id=batch_invariant)
        self.logprobs = SlotLogprobs(num_slots, max_logprobs, device, mode)
        self.grammar_masks = GrammarMasks(num_slots, shard, grammars, ops, device)
        made = {name: make(num_slots, vocab_size, device) for name, make in processors.items()}
        self._features: list[Component] = [
            AllowedTokenIds(shard, device),
            BadWords(num_slots, shard, device),
            MinTokens(shard, device),
            LogitBias(shard, device),
            LogitsProcessors(made, self.vocabulary, device),
            Penalties(shard, device),
            ThinkingBudget(num_slots, shard, device),
            self.grammar_masks,  # what a grammar leaves may have to be allowed again
            TopNSigma(self.vocabulary, device),  # of what can be chosen at all
        ]
        self._slot_states: list[SlotState] = [self.logprobs, *self._features]
        self._choice = SlotChoice(num_slots, vocab_size, device, few=0 if batch_invariant else FEW_TOKENS)
        self._bindings: _Bindings | None = None
        self._bound_slots: Rows = NO_SLOTS  # the array that the last step named their slots by

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        """Raises InvalidArgument; the slot then samples as if it had asked for nothing special."""
        self._bindings = None
        self._choice.admit(slot, admission)
        try:
            for state in self._slot_states:
                state.admit(slot, admission)
        except QuireError:
            self.release(slot)
            raise

    def prepare_step(self) -> None:
        """All sequences of the step that comes have been admitted."""
        self.grammar_masks.build_first_masks()

    def release(self, slot: int) -> None:
        self._bindings = None
        for state in self._slot_states:
            state.release(slot)

    def sample(self, logits: Tensor, slots: Rows, positions: Positions) -> SampledTokens:
        """`logits` [num_rows, shard.size] of `slots` [num_rows]; may overwrite them."""
        ready = self.process(logits, slots, positions)
        return ready.finish(ready.choose())

    def process(self, logits: Tensor, slots: Rows, positions: Positions) -> ProcessedRows:
        """The rows with every feature applied, before their choice; a slot may have several (see Positions)."""
        bindings = self._bind(slots)
        if bindings.features or bindings.logprobs or not self.vocabulary.accepts_16_bit:
            logits = logits.float()
        asked = bindings.logprobs
        source = None
        if asked and not asked.mode.is_processed:
            source = asked.mode.values(logits[asked.rows])
        if bindings.masks is not None and bindings.masks_alone and positions.drafts is None:
            bindings.masks.apply_alone(logits)
        else:
            for feature in bindings.features:
                feature.apply(logits, positions)
        if asked and asked.mode.is_processed:
            source = asked.mode.values(bindings.choice.filtered(logits, asked.rows))
        if asked and source is not None:
            asked.replace_beam_rows(source, logits)
        return ProcessedRows(logits, positions, self.vocabulary, bindings, source)

    @property
    def device(self) -> torch.device:
        return self._choice.device

    def bind_choice(self, slots: Rows) -> BoundChoice:
        """Temperature, filters and seeds of `slots` alone, for logits of all tokens."""
        return self._choice.bind(slots, self._all_tokens)

    def plain(self, slots: Rows) -> PlainRows | None:
        """What `slots` [num_rows] ask for, if that is nothing but temperature, seed and a grammar."""
        bindings = self._bind(slots)
        if bindings.logprobs or not bindings.choice.is_plain:
            return None
        return PlainRows(bindings.choice, bindings.masks) if not bindings.features or bindings.masks_alone else None

    def _bind(self, slots: Rows) -> _Bindings:
        """As for the step before, when the same sequences sample again."""
        last = self._bindings
        if last is None or not (slots is self._bound_slots or np.array_equal(slots, last.slots)):
            bound = (feature.bind(slots) for feature in self._features)
            features = [feature for feature in bound if feature is not None]
            choice = self._choice.bind(slots, self.vocabulary)
            masks = next((feature for feature in features if isinstance(feature, BoundGrammarMasks)), None)
            last = _Bindings(slots, self.logprobs.bind(slots), features, masks, choice)
            self._bindings = last
        self._bound_slots = slots
        return last
