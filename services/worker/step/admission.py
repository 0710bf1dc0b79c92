"""Admission of a sequence: the plan's part and the SequenceParams written by the frontend for the worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from quire.services.worker.step.plan import Admission
from quire.shared import sampling_params
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import pooling_pb2, sampling_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb

NEUTRAL = {"min_tokens": 0, "repetition_penalty": 1.0}  # values without effect, of fields that frontends always send


@dataclass(frozen=True, slots=True)
class SlotAdmission:
    """Parameters of a sequence passed to the heads on admission, decoded from plan and SequenceParams. Columns as in
    worker.proto."""

    token_ids: bytes = b""  # every known token: the prompt, then output so far
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    grammar_id: bytes = b""
    sampling: sampling_pb2.SamplingParams = field(
        default_factory=sampling_pb2.SamplingParams
    )  # with the seed of this sample
    eos_token_ids: bytes = b""
    bad_word_token_ids: Sequence[bytes] = ()
    think_start_token_ids: bytes = b""
    think_end_token_ids: bytes = b""
    samples_nothing: bool = False
    pooling: pooling_pb2.PoolingParams | None = None  # None: the sequence is sampled, not pooled
    tenant: str = ""  # key of the fair share of slow grammar masks
    adapter: str = ""  # empty: no adapter
    adapter_digest: bytes = b""  # digest of its content; empty: any loaded content of that name
    second_text_from: int = 0  # index of the second text's first token; 0: one text
    num_seen_tokens: int = 0  # leading tokens that other tokens attend to; 0: all
    pooled_tokens: bytes = b""  # u32 column: tokens that get a vector each; empty: as the pooler selects
    query_id: bytes = b""  # late interaction: its query, or the query it is scored against; empty: none
    is_query: bool = False
    timestamps: pb.TimestampRules | None = None  # None: no rules for time stamps
    alignment: pb.AlignmentParams | None = None  # None: the sequence is sampled or pooled

    @property
    def parameters(self) -> set[str]:
        """Names of the fields that have an effect: any of `sampling`, and those of one sampling feature or head."""
        names = {field.name for field, value in self.sampling.ListFields() if NEUTRAL.get(field.name) != value}
        own = {
            "bad_word_token_ids": self.bad_word_token_ids,
            "grammar_id": self.grammar_id,
            "pooling": self.pooling,
            "timestamps": self.timestamps,
            "alignment": self.alignment,
        }
        return names | {name for name, value in own.items() if value}

    @property
    def bans(self) -> tuple[str, ...]:
        """Names of the parameters that together may leave no token to sample, allow-lists first; empty if fewer than
        two are used."""
        given = {
            "allowed_token_ids": self.sampling.allowed_token_ids,
            "structured_output": self.grammar_id,
            "min_tokens": self.sampling.min_tokens if self.sampling.allowed_token_ids else 0,
            "bad_words": self.bad_word_token_ids,
        }
        names = tuple(name for name, value in given.items() if value)
        return names if len(names) > 1 else ()

    @classmethod
    def of(cls, admitted: Admission) -> SlotAdmission:
        """Builds the admission from a plan's row and its serialized SequenceParams.

        Raises InvalidArgument for params that cannot be decoded (schedulers pass them on unread) and for params whose
        kind (sampling, or pooling and alignment) differs from the plan.
        """
        try:
            params = pb.SequenceParams.FromString(admitted.params)
        except DecodeError:
            raise InvalidArgument("params: not a serialized SequenceParams", field="params") from None
        pooled, aligned = params.HasField("pooling"), params.HasField("alignment")
        if (pooled or aligned) != admitted.samples_nothing:
            text = "no head for a sequence that samples nothing"
            if not admitted.samples_nothing:
                text = "a sequence that is pooled or aligned samples nothing"
            raise InvalidArgument(f"params: {text}", field="params")
        return cls(
            admitted.token_ids,
            admitted.num_prompt_tokens,
            admitted.num_cached_tokens,
            admitted.grammar_id,
            _adapt_to_sample(params.sampling, admitted),
            params.eos_token_ids,
            params.bad_word_token_ids,
            params.think_start_token_ids,
            params.think_end_token_ids,
            admitted.samples_nothing,
            params.pooling if pooled else None,
            params.tenant,
            params.adapter,
            params.adapter_digest,
            params.second_text_from,
            params.num_seen_tokens,
            params.pooled_tokens,
            admitted.query_id,
            admitted.is_query,
            params.timestamps if params.HasField("timestamps") else None,
            params.alignment if aligned else None,
        )


def _adapt_to_sample(sampling: sampling_pb2.SamplingParams, admitted: Admission) -> sampling_pb2.SamplingParams:
    """Adapts `sampling`, in place, to one sample of a request: derives its seed (wrapping in 64 bits) and keeps only
    the log-probabilities that are still to be reported."""
    sampling.seed = (sampling.seed + admitted.sample + 2**63) % 2**64 - 2**63
    if admitted.prompt_logprobs_from:
        sampling_params.resume_prompt_logprobs_at(sampling, admitted.prompt_logprobs_from, admitted.num_prompt_tokens)
    else:
        sampling_params.clear_prompt_logprobs(sampling)
    if admitted.num_logprobs is not None:
        sampling.logprobs = admitted.num_logprobs
    return sampling
