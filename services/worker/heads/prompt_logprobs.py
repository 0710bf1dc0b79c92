"""prompt_logprobs: log-probabilities of prompt tokens given the tokens before them, from the chunks that
compute them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.device.staging import Array, upload
from quire.services.worker.sampling.features.component import check_token_ids
from quire.services.worker.sampling.logprobs import RowLogprobs, SlotLogprobs, entries, named_or_best
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.result import PromptLogprobColumns, StepResult
from quire.services.worker.step.slots import Rows
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared import columns
from quire.shared.columns import I32
from quire.shared.errors import InvalidArgument

MAX_ROWS_AT_ONCE = 128  # rows of logits: 78 MB in float32 with a vocabulary of 152k


@dataclass(frozen=True, slots=True)
class PromptLogprobsSpec:
    """Prompt log-probabilities that a slot requested, until its prompt is computed."""

    prompt: I32
    first: int  # first position, at least 1
    count: int  # number of most likely tokens per position
    named: list[I32]  # requested token ids instead of these, by position from `first` on


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Tokens of a step that precede a prompt position with requested log-probabilities."""

    tokens: I32  # [num_rows] indices into the step's tokens
    targets: I32  # [num_rows] the prompt's token at the position
    counts: I32  # [num_rows] number of further entries
    names: I32 | None  # [num_rows, max_named] requested ids, padded with -1; None: no row has any
    slots: list[int]
    positions: list[int]  # number of rows of each of `slots`


@dataclass(frozen=True, slots=True)
class PromptLogprobsResult:
    """Log-probabilities of a step's prompt positions, on the host."""

    columns: PromptLogprobColumns

    def merge_into(self, result: StepResult) -> StepResult:
        return result._replace(prompt_logprobs=self.columns)


@dataclass(frozen=True, slots=True)
class PromptLogprobsLaunch:
    """Log-probabilities of a step's prompt positions, on the device."""

    rows: PromptRows
    entries: RowLogprobs

    @property
    def tensors(self) -> list[Tensor]:
        return [self.entries.token_ids, self.entries.logprobs, self.entries.ranks]

    def build_result(self, arrays: list[Array]) -> PromptLogprobsResult:
        return PromptLogprobsResult(
            PromptLogprobColumns(
                np.array(self.rows.slots, dtype=np.uint32),
                np.array(self.rows.positions, dtype=np.uint32),
                self.entries.columns(*arrays),
            )
        )


@dataclass(frozen=True, slots=True)
class PromptLogprobRows:
    """Head input: the rows of a step whose log-probabilities are computed."""

    rows: PromptRows
    _head: PromptLogprobsHead

    @property
    def tokens(self) -> I32:
        """[num_rows] indices of the step's tokens whose hidden states the head reads."""
        return self.rows.tokens

    def launch(self, hidden: Tensor) -> PromptLogprobsLaunch:
        return self._head.collect(hidden, self.rows)


class PromptLogprobsHead:
    """Head that computes prompt log-probabilities, keeping the request of a slot until its prompt is computed."""

    parameters = frozenset({"prompt_logprobs", "prompt_logprob_token_ids"})

    def __init__(
        self, vocab_size: int, settings: SlotLogprobs, device: torch.device, logits_of: Callable[[Tensor, Rows], Tensor]
    ) -> None:
        """`settings`: limit and logprobs mode; processed and raw values are the same, since no feature changes a
        prompt's logits. `logits_of`: the model's output head, for hidden states and their slots, over the shard of the
        settings' vocabulary."""
        self._vocab_size = vocab_size
        self._settings = settings
        self._device = device
        self._logits_of = logits_of
        self.specs: dict[int, PromptLogprobsSpec] = {}

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        """Stores the requested positions and entries; does nothing if none are requested or the prompt ends before the
        first. Raises InvalidArgument for too many entries, ids outside of the vocabulary, and positions within cached
        tokens, which are not computed."""
        sampling = admission.sampling
        named = [columns.i32(columns.u32_bytes(position.ids)) for position in sampling.prompt_logprob_token_ids]
        if not named and not sampling.HasField("prompt_logprobs"):
            return
        for ids in named:
            check_token_ids(ids, self._vocab_size, "prompt_logprob_token_ids")
        first = max(1, sampling.prompt_logprob_start)
        if min(admission.num_cached_tokens, len(admission.token_ids) // 4 - 1) >= first:
            text = f"prompt_logprob_start: {first} lies within the {admission.num_cached_tokens} cached tokens"
            raise InvalidArgument(text, field="prompt_logprob_start")
        count = 0 if named else self._settings.count(sampling.prompt_logprobs, "prompt_logprobs")
        prompt = columns.i32(admission.token_ids)[: admission.num_prompt_tokens]
        if first < len(prompt):
            # Lists begin at prompt_logprob_start; position 0 has no log-probability.
            self.specs[slot] = PromptLogprobsSpec(prompt, first, count, named[first - sampling.prompt_logprob_start :])

    def release(self, slot: int) -> None:
        self.specs.pop(slot, None)

    def rows(self, inputs: StepInputs) -> PromptLogprobRows | None:
        """Returns the step's tokens that precede a requested position, None if there are none; forgets requests that
        this step completes."""
        rows = self._rows(inputs)
        return None if rows is None else PromptLogprobRows(rows, self)

    def _rows(self, inputs: StepInputs) -> PromptRows | None:
        """Returns the rows of a step, None if it computes no requested position."""
        parts = [self._part(inputs, row, slot) for row, slot in enumerate(inputs.slots.tolist()) if slot in self.specs]
        parts = [part for part in parts if len(part.tokens)]
        if not parts:
            return None
        return PromptRows(
            np.concatenate([part.tokens for part in parts]),
            np.concatenate([part.targets for part in parts]),
            np.concatenate([part.counts for part in parts]),
            _stack_names(parts),
            [slot for part in parts for slot in part.slots],
            [len(part.tokens) for part in parts],
        )

    def _part(self, inputs: StepInputs, row: int, slot: int) -> PromptRows:
        """Returns one slot's rows in this step, possibly none; deletes the slot's request if the step reaches the last
        prompt token."""
        spec = self.specs[slot]
        start, end = (int(at) for at in inputs.query_start[row : row + 2])
        begin = int(inputs.positions[start])
        reached = begin + end - start  # position after these tokens
        positions = np.arange(max(begin + 1, spec.first), min(reached, len(spec.prompt) - 1) + 1, dtype=np.int32)
        if reached >= len(spec.prompt) - 1:
            del self.specs[slot]
        tokens = positions - (begin + 1) + start
        names = _named_ids(spec.named, positions - spec.first) if spec.named else None
        counts = np.full(len(positions), spec.count) if names is None else (names >= 0).sum(axis=1)
        targets = spec.prompt[positions]
        return PromptRows(tokens.astype(np.int32), targets, counts.astype(np.int32), names, [slot], [len(tokens)])

    def collect(self, hidden: Tensor, rows: PromptRows) -> PromptLogprobsLaunch:
        """Computes log-probabilities from `hidden` [num_rows, hidden_size] of the rows' tokens, MAX_ROWS_AT_ONCE rows
        of logits at a time; stays on the device."""
        slots = np.repeat(np.array(rows.slots, dtype=np.int64), rows.positions)
        pieces = [
            self._collect(
                self._logits_of(hidden[at : at + MAX_ROWS_AT_ONCE], slots[at : at + MAX_ROWS_AT_ONCE]).float(),
                rows,
                slice(at, at + MAX_ROWS_AT_ONCE),
            )
            for at in range(0, len(rows.tokens), MAX_ROWS_AT_ONCE)
        ]
        entries = RowLogprobs(
            rows.counts,
            torch.cat([piece.token_ids for piece in pieces]),
            torch.cat([piece.logprobs for piece in pieces]),
            torch.cat([piece.ranks for piece in pieces]),
        )
        return PromptLogprobsLaunch(rows, entries)

    def _collect(self, logits: Tensor, rows: PromptRows, piece: slice) -> RowLogprobs:
        """Returns the entries of the rows `piece` from their float32 logits [num_rows, shard.size]: the prompt's token,
        then the most likely or the named ones."""
        values = self._settings.mode.values(logits)
        targets = upload(rows.targets[piece], self._device, np.int64).unsqueeze(1)
        most = int(rows.counts.max())
        others = self._settings.mode.most_likely(values, most)
        if rows.names is not None:
            others = named_or_best(upload(rows.names[piece], self._device, np.int64), others)
        return entries(self._settings.mode.vocabulary, values, targets, others, rows.counts[piece])


def _named_ids(named: list[I32], at: Rows | I32) -> I32:
    """Returns the ids requested at the positions `at` (counted from the first requested one), [num_positions,
    max_named], padded with -1; none beyond the lists."""
    lists = [named[i] if i < len(named) else named[0][:0] for i in at.tolist()]
    out = np.full((len(lists), max(map(len, lists), default=0)), -1, dtype=np.int32)
    for row, ids in zip(out, lists, strict=True):
        row[: len(ids)] = ids
    return out


def _stack_names(parts: list[PromptRows]) -> I32 | None:
    """Returns the requested ids of all parts, [num_rows, max_entries], padded with -1; None if no part has any."""
    if all(part.names is None for part in parts):
        return None
    out = np.full((sum(len(part.tokens) for part in parts), max(int(part.counts.max()) for part in parts)), -1)
    at = 0
    for part in parts:
        if part.names is not None:
            out[at : at + len(part.tokens), : part.names.shape[1]] = part.names
        at += len(part.tokens)
    return out.astype(np.int32)
