"""Sampling parameters of the Python API."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from typing import TYPE_CHECKING, Any

from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import sampling_pb2 as pb

Json = str | bool | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """Form of the output: exactly one of the first six fields. Schemas and tags are JSON text or Python values."""

    json: Json | None = None  # a JSON Schema
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None  # EBNF or Lark
    structural_tag: Json | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def to_proto(self) -> pb.StructuredOutput:
        """Converts to the message; raises InvalidArgument unless exactly one constraint is set."""
        given = [item.name for item in fields(self)[:6] if getattr(self, item.name) is not None]
        if len(given) != 1:
            text = f"StructuredOutput requires exactly one constraint, got {', '.join(given) or 'none'}"
            raise InvalidArgument(text, field="structured_output")
        return pb.StructuredOutput(
            json_schema=_json_text(self.json),
            json_object=self.json_object,
            regex=self.regex,
            choice=None if self.choice is None else pb.StructuredOutput.Choice(options=self.choice),
            grammar=self.grammar,
            structural_tag=_json_text(self.structural_tag),
            disable_any_whitespace=self.disable_any_whitespace,
            disable_additional_properties=self.disable_additional_properties,
            whitespace_pattern=self.whitespace_pattern or "",
        )


def _json_text(document: Json | None) -> str | None:
    return document if document is None or isinstance(document, str) else json.dumps(document)


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """Ends a sample that ends with `min_count` copies of one pattern of min_ to max_pattern_size tokens."""

    max_pattern_size: int
    min_count: int
    min_pattern_size: int = 1

    def to_proto(self) -> pb.RepetitionDetection:
        return pb.RepetitionDetection(**asdict(self))


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Keeps the `width` most likely sequences instead of sampling; SamplingParams.n is the number returned, best
    first."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool = False

    def to_proto(self) -> pb.BeamSearch:
        return pb.BeamSearch(**asdict(self))


LAST_NAMED = 32  # last field of sampling.proto that is spelled out here; later ones are accepted by their proto names

if TYPE_CHECKING:  # for type checkers only

    @dataclass(frozen=True)
    class _Unnamed:
        top_n_sigma: float | None = field(default=None, kw_only=True)
        logits_processors: Mapping[str, Mapping[str, Any]] | None = field(default=None, kw_only=True)
else:
    _LATER = [one.name for one in pb.SamplingParams.DESCRIPTOR.fields if one.number > LAST_NAMED]
    _Unnamed = make_dataclass(
        "_Unnamed", [(name, Any, field(default=None, kw_only=True)) for name in _LATER], frozen=True, slots=True
    )


@dataclass(frozen=True, slots=True)
class SamplingParams(_Unnamed):
    """Sampling parameters; every field is optional. The cluster validates them: a value out of range raises
    `quire.shared.errors.InvalidArgument` with the field's name. Meanings and ranges are documented in
    protos/quire/common/v1/sampling.proto."""

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    repetition_detection: RepetitionDetection | None = None
    beam_search: BeamSearch | None = None
    logprobs: int | None = None
    logprob_token_ids: Sequence[int] = ()
    prompt_logprobs: int | None = None
    prompt_logprob_start: int | None = None
    prompt_logprob_token_ids: Sequence[Sequence[int]] = ()
    flat_logprobs: bool = False
    thinking_token_budget: int | None = None
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    skip_reading_prefix_cache: bool = False
    structured_output: StructuredOutput | None = None

    def to_proto(self) -> pb.SamplingParams:
        """Converts to the message; fields that are None stay unset, so that the model's defaults apply."""
        message = pb.SamplingParams()
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "stop" and isinstance(value, str):
                value = (value,)
            if value is None:
                continue
            if isinstance(value, StructuredOutput):
                message.structured_output.CopyFrom(value.to_proto())
            elif isinstance(value, Mapping):
                texts = {key: _json_text(one) if isinstance(one, Mapping) else one for key, one in value.items()}
                getattr(message, item.name).update(texts)
            elif isinstance(value, (RepetitionDetection, BeamSearch)):
                getattr(message, item.name).CopyFrom(value.to_proto())
            elif item.name == "prompt_logprob_token_ids":
                message.prompt_logprob_token_ids.extend(pb.NamedTokens(ids=ids) for ids in value)
            elif isinstance(value, Sequence):
                getattr(message, item.name).extend(value)
            else:
                setattr(message, item.name, value)
        return message
