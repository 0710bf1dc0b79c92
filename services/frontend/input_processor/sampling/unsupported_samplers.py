"""Fields by which clients of other servers change the sampling in ways that are not supported here.

Ignoring them would silently change the text: each is refused unless its value requests nothing. Fields that only adjust
one of them (mirostat_tau, xtc_threshold) are ignored: without the other they have no effect.

They are omitted from the OpenAPI document, since schemathesis cannot handle a schema of more than a hundred fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.services.frontend.request.scalar_parameters import PROBABILITY_FILTERS

UNSET_VALUES: tuple[Any, ...] = (None, False, 0, "", [], {})
OFF: tuple[Any, ...] = (None, False, 0)
ONE: tuple[Any, ...] = (None, 1)

# By name: the values with which the sampler has no effect.
UNSUPPORTED_SAMPLERS: Mapping[str, Sequence[Any]] = {
    "adaptive_target": (None, -1),
    "banned_strings": UNSET_VALUES,
    "banned_tokens": UNSET_VALUES,
    "ban_eos_token": OFF,
    "control_vectors": UNSET_VALUES,
    "custom_logit_processor": UNSET_VALUES,
    "do_sample": (None, True),
    "dry_multiplier": OFF,
    "dynamic_temperature": OFF,
    "dynatemp_range": OFF,
    "ebnf": UNSET_VALUES,
    "encoder_repetition_penalty": ONE,
    "epsilon_cutoff": OFF,
    "eta_cutoff": OFF,
    "grammar": UNSET_VALUES,
    "guidance_scale": ONE,
    "json_schema": UNSET_VALUES,
    "lora": UNSET_VALUES,
    "lora_path": UNSET_VALUES,
    "mirostat": OFF,
    "mirostat_mode": OFF,
    "negative_prompt": UNSET_VALUES,
    "no_repeat_ngram_size": OFF,
    "num_beams": ONE,
    "penalty_alpha": OFF,
    "penalty_range": (None, 0, -1),
    "regex": UNSET_VALUES,
    "repeat_last_n": (None, -1),
    "repeat_penalty": ONE,
    "repetition_decay": OFF,
    "repetition_penalty_range": (None, 0, -1),
    "sampler_order": UNSET_VALUES,
    "sampler_priority": UNSET_VALUES,
    "samplers": UNSET_VALUES,
    "skew": OFF,
    "smoothing_factor": OFF,
    "stop_regex": UNSET_VALUES,
    "temperature_last": OFF,
    "tfs": ONE,
    "tfs_z": ONE,
    "token_healing": OFF,
    "top_a": OFF,
    "typical": ONE,
    "typical_p": ONE,
    "xtc_probability": OFF,
}
# Number of tokens that penalties consider: without effect where no penalty is requested.
PENALTY_WINDOWS = frozenset({"penalty_range", "repeat_last_n", "repetition_penalty_range"})
SIMILAR_FILTERS = " or ".join(PROBABILITY_FILTERS)
# Equivalent field here, by the name of the unsupported one.
REPLACEMENTS: Mapping[str, str] = {
    "ban_eos_token": "ignore_eos",
    "banned_strings": "bad_words",
    "banned_tokens": "bad_words",
    "do_sample": "temperature=0",
    "ebnf": "structured_outputs.grammar",
    "grammar": "structured_outputs.grammar",
    "json_schema": "response_format",
    "lora": "the adapter's name as model",
    "lora_path": "the adapter's name as model",
    "num_beams": "use_beam_search and n",
    "regex": "structured_outputs.regex",
    "repeat_last_n": "-1, since penalties count the whole text,",
    "repeat_penalty": "repetition_penalty",
    "tfs": SIMILAR_FILTERS,
    "tfs_z": SIMILAR_FILTERS,
    "top_a": PROBABILITY_FILTERS[-1],
    "typical": SIMILAR_FILTERS,
    "typical_p": SIMILAR_FILTERS,
}
# Adjustments of samplers that are off.
IGNORED_SAMPLER_FIELDS = (
    "adaptive_decay", "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_range", "dry_sequence_breakers",
    "dynatemp_exponent", "dynatemp_high", "dynatemp_low", "mirostat_eta", "mirostat_tau", "smoothing_curve",
    "xtc_threshold",
)  # fmt: skip
