"""--speculative-config: the drafting method and its parameters."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.spec_decode.trees.token_tree import MAX_NODES, TokenTree
from quire.shared import plugins
from quire.shared.errors import InvalidArgument
from quire.shared.models.model_identity import read_config

GROUP = "quire.drafters"

# Method -> drafter class, constructed from (SpeculativeConfig, DraftTarget); imported when needed.
METHODS = {
    "ngram": "quire.services.worker.spec_decode.methods.ngram:Ngram",
    "suffix": "quire.services.worker.spec_decode.methods.suffix:Suffix",
    "draft_model": "quire.services.worker.spec_decode.methods.draft_model:DraftModel",
    "eagle": "quire.services.worker.spec_decode.methods.eagle:Eagle",
    "eagle3": "quire.services.worker.spec_decode.methods.eagle3:Eagle3",
    "medusa": "quire.services.worker.spec_decode.methods.medusa:Medusa",
    "mtp": "quire.services.worker.spec_decode.methods.mtp:Mtp",
    "grammar": "quire.services.worker.spec_decode.methods.grammar:GrammarDrafts",
}
WITH_TREES = ("eagle", "eagle3", "medusa")
WITH_WEIGHTS = ("draft_model", "eagle", "eagle3", "medusa")
METHOD_ALIASES = {"deepseek_mtp": "mtp"}
MAX_DRAFT_TOKENS = 128
SETTING = "speculative_config"


class SpeculativeConfig(BaseModel):
    """Parsed value of --speculative-config, with the names of vLLM; unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: str = Field(description="drafting method; detected from the folder's config.json if unset")
    num_speculative_tokens: int = Field(ge=1, le=MAX_DRAFT_TOKENS, description="maximum drafts per sequence and step")
    adaptive_length: bool = Field(
        True, description="shorten drafts that do not pay off, by load and by sequence; otherwise always the maximum"
    )
    model: str = Field("", description="folder of the draft model or of the heads")
    prompt_lookup_min: int = Field(0, ge=0, description="ngram: minimum matching tokens; 0: prompt_lookup_max")
    prompt_lookup_max: int = Field(5, ge=1, description="ngram: maximum tokens that are compared")
    draft_sample_method: Literal["probabilistic", "greedy"] = Field(
        "probabilistic",
        description="models and heads: sample drafts like the model, or take the likeliest token",
    )
    rejection_sample_method: Literal["coupled", "standard"] = Field(
        "coupled", description="coupled: the same text as without drafts; standard: the same distribution"
    )
    speculative_token_tree: str = Field(
        "",
        description="eagle, eagle3, medusa: paths of ranks, e.g. [(0,), (1,), (0, 0)]; the likeliest become drafts",
    )
    suffix_decoding_max_tree_depth: int = Field(24, ge=1, description="suffix: maximum tokens that are compared")
    suffix_decoding_max_cached_requests: int = Field(
        10_000, ge=0, description="suffix: finished outputs to search; 0: only the sequence itself"
    )
    suffix_decoding_max_spec_factor: float = Field(1.0, gt=0, description="suffix: drafts per matching token")
    suffix_decoding_min_token_prob: float = Field(
        0.1, ge=0, le=1, description="suffix: minimum estimated probability of a draft"
    )

    @model_validator(mode="after")
    def _check_consistency(self) -> SpeculativeConfig:
        """Raises ValueError, which pydantic reports, for an unknown method, a missing or superfluous model folder, a
        reversed n-gram range, or a token tree that the method cannot draft."""
        known = plugins.known(GROUP, METHODS)
        if self.method not in known:
            raise ValueError(f"method: {self.method!r} does not exist; available: {', '.join(known)}")
        if self.method in WITH_WEIGHTS and not self.model:
            raise ValueError(f"model: the method {self.method} requires the folder of a draft model")
        if self.method == "mtp" and self.model:
            raise ValueError(
                f"model: {self.model!r}: must be empty for the method mtp, which drafts with layers of the served model"
            )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min: {self.prompt_lookup_min} is more than prompt_lookup_max, {self.prompt_lookup_max}"
            )
        if self.speculative_token_tree:
            self._check_tree()
        return self

    def _check_tree(self) -> None:
        """Raises ValueError for a token tree that does not parse, that method or rejection rule do not support, or that
        has fewer nodes, or more inner nodes, than num_speculative_tokens allows."""
        if self.method not in WITH_TREES:
            methods = ", ".join(WITH_TREES)
            raise ValueError(f"speculative_token_tree: {self.method} does not support trees; use {methods}")
        try:
            tree = TokenTree.parse(self.speculative_token_tree)
        except ValueError as error:
            raise ValueError(f"speculative_token_tree: {error}") from None
        most = min(tree.num_nodes, MAX_NODES)
        if self.num_speculative_tokens > most:
            raise ValueError(
                f"num_speculative_tokens: {self.num_speculative_tokens} drafts of a speculative_token_tree of "
                f"{tree.num_nodes} paths, at most {most}"
            )
        if self.method != "medusa" and tree.num_inner > self.num_speculative_tokens:
            raise ValueError(
                f"speculative_token_tree: {tree.num_inner} paths have children; {self.method} drafts children of "
                f"at most num_speculative_tokens paths, {self.num_speculative_tokens}"
            )
        if self.rejection_sample_method == "standard":
            raise ValueError(
                "rejection_sample_method: standard supports chains only; use coupled with speculative_token_tree"
            )

    @cached_property
    def tree(self) -> TokenTree | None:
        """Token tree of the drafts; None if drafts are chains."""
        return TokenTree.parse(self.speculative_token_tree) if self.speculative_token_tree else None

    @property
    def shortest_match(self) -> int:
        """Least number of matching tokens of an n-gram: prompt_lookup_min, or prompt_lookup_max if that is 0."""
        return self.prompt_lookup_min or self.prompt_lookup_max


def parse_for(model: DecoderConfig, text: str) -> SpeculativeConfig | None:
    """Parses the setting for the served `model`; returns None if it is empty. Raises InvalidArgument for an invalid
    setting, and for method mtp if the model has no layers to draft with."""
    config = parse(text)
    if config is not None and config.method == "mtp" and not model.num_next_layers:
        text = f"{SETTING}.method: mtp: config.json says num_nextn_predict_layers is 0: no layer to draft with"
        raise InvalidArgument(text, field=SETTING)
    return config


def tree_of(drafting: SpeculativeConfig | None) -> TokenTree | None:
    """Returns the token tree of a configuration; None if drafts are chains or there are none."""
    return None if drafting is None else drafting.tree


def detect_method(values: dict[str, Any]) -> str:
    """Detects the drafting method from the `values` of a draft folder's config.json: medusa, eagle3, eagle, else
    draft_model. Raises InvalidArgument for a model of one layer, which may be either of the last two."""
    names = values.get("architectures")
    named = " ".join(map(str, names if isinstance(names, list) else [])).lower()
    if "medusa_num_heads" in values or "medusa" in named or values.get("model_type") == "medusa":
        return "medusa"
    if "eagle3" in named or "draft_vocab_size" in values:
        return "eagle3"
    if "eagle" in named:
        return "eagle"
    if values.get("num_hidden_layers") == 1:
        text = f"{SETTING}.method: config.json says num_hidden_layers is 1: use the method eagle or draft_model"
        raise InvalidArgument(text, field=SETTING)
    return "draft_model"


def parse(text: str) -> SpeculativeConfig | None:
    """Parses the setting's JSON object; returns None if it is empty. Reads the config.json of the draft folder to
    detect a method that is not named. Raises InvalidArgument naming the field."""
    if not text.strip():
        return None
    try:
        values: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidArgument(f"{SETTING}: not JSON: {error} (value: {text!r})", field=SETTING) from None
    if not isinstance(values, dict):
        raise InvalidArgument(f"{SETTING}: must be a JSON object (value: {text!r})", field=SETTING)
    method = values.get("method")
    if isinstance(method, str):
        values["method"] = METHOD_ALIASES.get(method, method)
    if "method" not in values and isinstance(values.get("model"), str):
        values["method"] = detect_method(read_config(Path(values["model"]).expanduser()))
    try:
        return SpeculativeConfig(**values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join([SETTING, *(str(part) for part in first["loc"])])
        message = "unknown setting" if first["type"] == "extra_forbidden" else first["msg"]
        raise InvalidArgument(f"{name}: {message} (value: {first['input']!r})", field=SETTING) from None
