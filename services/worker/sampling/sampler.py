"""Runs sampling in order: raw log-probabilities, then every feature, then the choice of tokens."""

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
from quire.services.worker.sampling.features.component import Bound, Component, ParameterState, Positions
from quire.services.worker.sampling.features.grammar_masks import BoundGrammarMasks, GrammarMasks
from quire.services.worker.sampling.features.logit_bias import LogitBias
from quire.services.worker.sampling.features.min_tokens import MinTokens
from quire.services.worker.sampling.features.penalties import Penalties
from quire.services.worker.sampling.features.suppressed_tokens import (
    NOTHING_SUPPRESSED,
    SuppressedIds,
    SuppressedTokens,
)
from quire.services.worker.sampling.features.thinking_budget import ThinkingBudget
from quire.services.worker.sampling.features.timestamp_rules import TimestampOrder
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
    """Sampled tokens of the rows of a step and their log-probabilities, on the device."""

    token_ids: Tensor  # int32 [num_rows], -1 where nothing could be chosen
    logprobs: RowLogprobs | None
    masked: StepMasks | None = None  # None if no row has a grammar

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors to copy to the host: token ids, then the three of RowLogprobs if there are any."""
        logprobs = self.logprobs
        return [self.token_ids] + ([logprobs.token_ids, logprobs.logprobs, logprobs.ranks] if logprobs else [])

    def with_tokens(self, token_ids: Tensor) -> SampledTokens:
        """Returns a copy with other token ids, which keeps log-probabilities and masks."""
        return replace(self, token_ids=token_ids)

    def faults(self) -> dict[int, QuireError]:
        """Returns the errors of sequences that cannot continue, by slot; waits for the masks. Thread-safe."""
        return {} if self.masked is None else self.masked.faults()


@dataclass(frozen=True, slots=True)
class _Bindings:
    """Features, masks, log-probabilities and choice as bound to one set of rows."""

    slots: Rows
    logprobs: BoundLogprobs | None
    features: list[Bound]
    masks: BoundGrammarMasks | None  # also an element of `features`
    choice: BoundChoice

    @property
    def masks_alone(self) -> bool:
        return self.masks is not None and len(self.features) == 1

    @property
    def masked(self) -> StepMasks | None:
        return None if self.masks is None else self.masks.step


@step_value
class PlainRows:
    """Rows that use nothing but temperature, seed and a grammar, so that a CUDA graph can sample them; their grammar
    masks are applied before it, to logits in the model's dtype."""

    choice: BoundChoice
    _masks: BoundGrammarMasks | None

    def mask(self, logits: Tensor) -> None:
        """Applies the rows' grammar masks, if any, to `logits` in place, before the graph is replayed."""
        if self._masks is not None:
            self._masks.apply_alone(logits)

    def record_choice(self, token_ids: Tensor) -> SampledTokens:
        """Wraps the rows' tokens for the host, after advancing their grammars by them, which starts building the next
        masks."""
        if self._masks is None:
            return SampledTokens(token_ids, None)
        self._masks.sampled(token_ids)
        return SampledTokens(token_ids, None, masked=self._masks.step)


@step_value
class ProcessedRows:
    """Rows with every feature applied, before their tokens are chosen."""

    logits: Tensor  # [num_rows, shard.size], before temperature and filters; a choice may overwrite them
    positions: Positions
    vocabulary: Vocabulary  # of the logits
    _bindings: _Bindings
    _logprob_source: Tensor | None  # values that log-probabilities are taken from; None: no row asked for any

    def choose(self) -> Tensor:
        """Samples one token per row: int32 [num_rows], -1 where no logit is finite."""
        return self._bindings.choice.choose(self.logits, self.positions)

    @property
    def choice(self) -> BoundChoice:
        """Temperature, filters and seeds of the rows."""
        return self._bindings.choice

    def record_choice(self, token_ids: Tensor) -> SampledTokens:
        """Passes the rows' tokens, -1 where a row has none, to the features, which update their state by them, and
        collects log-probabilities. Called once per step."""
        for feature in self._bindings.features:
            feature.sampled(token_ids)
        bound_logprobs = self._bindings.logprobs
        source = self._logprob_source
        logprobs = bound_logprobs.collect(source, token_ids) if bound_logprobs and source is not None else None
        return SampledTokens(token_ids, logprobs, masked=self._bindings.masked)


class Sampler:
    """Owns the sampling state of all slots: parameters, the features' buffers, and the bindings of the last step."""

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
        suppressed: SuppressedIds = NOTHING_SUPPRESSED,
    ) -> None:
        """`grammars`: None if no output is constrained; `processors`: factories of installed logits processors by name;
        `vocabulary`: shard that the logits cover, None for all tokens; `suppressed`: ids banned in every output."""
        self._all_tokens = WholeVocabulary(vocab_size, ops)
        self.vocabulary: Vocabulary = vocabulary or self._all_tokens
        shard = self.vocabulary.shard
        mode = LogprobsMode.from_name(logprobs_mode, self.vocabulary, ties_by_id=batch_invariant)
        self.logprobs = SlotLogprobs(num_slots, max_logprobs, device, mode)
        self.grammar_masks = GrammarMasks(num_slots, shard, grammars, ops, device)
        built = {name: make(num_slots, vocab_size, device) for name, make in processors.items()}
        self._features: list[Component] = [
            AllowedTokenIds(shard, device),
            BadWords(num_slots, shard, device),
            MinTokens(shard, device),
            SuppressedTokens(suppressed, shard, device),
            LogitBias(shard, device),
            LogitsProcessors(built, self.vocabulary, device),
            Penalties(shard, device),
            ThinkingBudget(num_slots, shard, device),
            TimestampOrder(num_slots, self.vocabulary, device),  # compares the tokens that are still allowed
            self.grammar_masks,  # may have to allow tokens again that earlier features banned
            TopNSigma(self.vocabulary, device),  # its statistics cover the tokens that are still allowed
        ]
        self._model_parameters = suppressed.parameters
        self._states: list[ParameterState] = [self.logprobs, *self._features]
        self._states_of: dict[int, list[ParameterState]] = {}  # by slot: those that its sequence uses
        self._choice = SlotChoice(num_slots, vocab_size, device, few=0 if batch_invariant else FEW_TOKENS)
        self._bindings: _Bindings | None = None
        self._bound_slots: Rows = NO_SLOTS  # the array that the last step passed

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        """Stores the sampling parameters of a new sequence in the features that it uses. Raises InvalidArgument
        (FailedPrecondition for an unprepared grammar) after releasing the features' state; the slot then samples with
        temperature and filters alone."""
        self._bindings = None
        self._choice.admit(slot, admission)
        asked = admission.parameters | self._model_parameters
        used = self._states_of[slot] = [state for state in self._states if not state.parameters.isdisjoint(asked)]
        try:
            for state in used:
                state.admit(slot, admission)
        except QuireError:
            self.release(slot)
            raise

    def release(self, slot: int) -> None:
        """Drops the state of `slot` in the features that it uses; temperature and filters stay until the next
        admission overwrites them."""
        self._bindings = None
        for state in self._states_of.pop(slot, ()):
            state.release(slot)

    def sample(self, logits: Tensor, slots: Rows, positions: Positions) -> SampledTokens:
        """Samples one token for each row of `logits` [num_rows, shard.size] of `slots` [num_rows], ascending, and
        updates the features by them: process(), choose() and finish() in one call. May overwrite the logits."""
        ready = self.process(logits, slots, positions)
        return ready.record_choice(ready.choose())

    def process(self, logits: Tensor, slots: Rows, positions: Positions) -> ProcessedRows:
        """Applies every feature and returns the rows before their tokens are chosen; a slot may have several rows (see
        Positions). Takes raw log-probabilities before the features and processed ones after them; may overwrite
        `logits`."""
        bindings = self._bind(slots)
        if bindings.features or bindings.logprobs or not self.vocabulary.accepts_16_bit:
            logits = logits.float()
        bound_logprobs = bindings.logprobs
        source = None
        if bound_logprobs and not bound_logprobs.mode.is_processed:
            source = bound_logprobs.mode.values(logits[bound_logprobs.rows])
        if bindings.masks is not None and bindings.masks_alone and positions.drafts is None:
            bindings.masks.apply_alone(logits)
        else:
            for feature in bindings.features:
                feature.apply(logits, positions)
        if bound_logprobs and bound_logprobs.mode.is_processed:
            source = bound_logprobs.mode.values(bindings.choice.filtered(logits, bound_logprobs.rows))
        if bound_logprobs and source is not None:
            bound_logprobs.replace_beam_rows(source, logits)
        return ProcessedRows(logits, positions, self.vocabulary, bindings, source)

    @property
    def device(self) -> torch.device:
        return self._choice.device

    def bind_choice(self, slots: Rows) -> BoundChoice:
        """Returns temperature, filters and seeds of `slots` alone, for logits of all tokens."""
        return self._choice.bind(slots, self._all_tokens)

    def plain(self, slots: Rows) -> PlainRows | None:
        """Returns the rows of `slots` [num_rows] if they ask for nothing but temperature, seed and a grammar, else
        None."""
        bindings = self._bind(slots)
        if bindings.logprobs or not bindings.choice.is_plain:
            return None
        return PlainRows(bindings.choice, bindings.masks) if not bindings.features or bindings.masks_alone else None

    def _bind(self, slots: Rows) -> _Bindings:
        """Returns the bindings of `slots`, reused from the last step if the same sequences sample again."""
        last = self._bindings
        if last is None or not (slots is self._bound_slots or np.array_equal(slots, last.slots)):
            used = {state for slot in slots.tolist() for state in self._states_of.get(slot, ())}
            bound = (feature.bind(slots) for feature in self._features if feature in used)
            features = [feature for feature in bound if feature is not None]
            logprobs = self.logprobs.bind(slots) if self.logprobs in used else None
            choice = self._choice.bind(slots, self.vocabulary)
            masks = next((feature for feature in features if isinstance(feature, BoundGrammarMasks)), None)
            last = _Bindings(slots, logprobs, features, masks, choice)
            self._bindings = last
        self._bound_slots = slots
        return last
