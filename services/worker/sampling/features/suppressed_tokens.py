"""suppress_tokens and begin_suppress_tokens of generation_config.json: tokens that the model's author bans in every
output, or as its first token."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.services.worker.sampling.features.min_tokens import BoundMinTokens
from quire.services.worker.sampling.features.slot_entries import SlotEntries
from quire.services.worker.sampling.vocabulary.vocab_shard import VocabShard
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.slots import Rows
from quire.shared.errors import InvalidArgument
from quire.shared.models.model_identity import read_config

FILE = "generation_config.json"
NEVER = np.iinfo(np.int32).max  # position from which a token is allowed that is always banned


@dataclass(frozen=True, slots=True)
class SuppressedIds:
    """Token ids that the author of a model bans."""

    always: tuple[int, ...] = ()
    first: tuple[int, ...] = ()  # banned as the first token of the output

    @property
    def parameters(self) -> frozenset[str]:
        """Names of sampling parameters that the author's lists give to every sequence; none without a list."""
        return PARAMETERS if self.always or self.first else frozenset()

    @classmethod
    def of_folder(cls, folder: Path) -> SuppressedIds:
        """Reads generation_config.json, or config.json without it, as transformers does. Raises InvalidArgument for
        values that are not lists of token ids."""
        path = folder / FILE
        name, values = "config.json", read_config(folder)
        if path.is_file():
            try:
                name, values = FILE, json.loads(path.read_text())
            except (OSError, ValueError, RecursionError) as error:
                raise InvalidArgument(f"model: {path} is not JSON: {error}", field="model") from None
        return cls(_ids(name, values, "suppress_tokens"), _ids(name, values, "begin_suppress_tokens"))


NOTHING_SUPPRESSED = SuppressedIds()
PARAMETERS = frozenset({"suppress_tokens", "begin_suppress_tokens"})


def _ids(file: str, values: Any, name: str) -> tuple[int, ...]:
    """Returns a list of token ids. Raises InvalidArgument for anything else."""
    given = values.get(name) if isinstance(values, dict) else None
    if given is None:
        return ()
    if not isinstance(given, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in given):
        text = f"model: {file}: {name} must be a list of token ids, got {str(given)[:80]}; correct it or leave it out"
        raise InvalidArgument(text, field="model")
    return tuple(given)


class SuppressedTokens:
    """Sampling feature that bans the ids in each slot, the first ones up to the position of the first output token."""

    def __init__(self, suppressed: SuppressedIds, shard: VocabShard, device: torch.device) -> None:
        """Ids outside of the vocabulary are ignored: they cannot be sampled."""
        always, first = (
            np.array([one for one in dict.fromkeys(ids) if 0 <= one < shard.vocab_size], dtype=np.int32)
            for ids in (suppressed.always, suppressed.first)
        )
        self._ids = np.concatenate((always, first))
        self._num_always = len(always)
        self._entries = SlotEntries(shard, device)

    @property
    def parameters(self) -> frozenset[str]:
        return PARAMETERS

    def admit(self, slot: int, admission: SlotAdmission) -> None:
        """Bans the ids in the output of a sequence."""
        if len(self._ids):
            allowed_from = np.full(len(self._ids), admission.num_prompt_tokens + 1, dtype=np.int32)
            allowed_from[: self._num_always] = NEVER
            self._entries.put(slot, self._ids, allowed_from)

    def release(self, slot: int) -> None:
        self._entries.release(slot)

    def bind(self, slots: Rows) -> BoundMinTokens | None:
        """Joins the banned ids of the rows on the device; None if the model bans nothing."""
        joined = self._entries.join(slots)
        return None if joined is None else BoundMinTokens(joined)
