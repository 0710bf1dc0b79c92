"""Converts submissions of frontends to sequences."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator

from quire.services.scheduler.core.sequences.beam_search import BeamRules, BeamSearchState
from quire.services.scheduler.core.sequences.media import MediaItem
from quire.services.scheduler.core.sequences.repetition import RepetitionRule
from quire.services.scheduler.core.sequences.sequence import LateQuery, SampleGroup, Sequence
from quire.services.scheduler.core.sequences.tokens import SequenceTokens
from quire.services.scheduler.kv_cache.kv_priority import KVPriority
from quire.services.scheduler.values.payload import MediaSource, Payload
from quire.shared.columns import u32
from quire.shared.kv import block_hash
from quire.shared.models.adapter_ids import AdapterId
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb

_KV_PRIORITIES = {pb.KV_PRIORITY_LOW: KVPriority.LOW, pb.KV_PRIORITY_HIGH: KVPriority.HIGH}


class SequenceFactory:
    """Creates the sequences of submissions, with keys that are unique in this process."""

    def __init__(self) -> None:
        self._keys = itertools.count(1)

    def sequences(
        self, submission: pb.Submission, owner: int, now: float, media_address: str = ""
    ) -> Iterator[Sequence]:
        """Yields the sequences of a submission; for a beam search only its root. Block hashes may be incomplete: see
        complete_block_hashes(). `media_address`: the frontend's MediaService, which has the pixels of its media."""
        samples = self._samples(submission, owner, now, media_of(submission, media_address))
        if submission.HasField("beam_search"):
            yield _root(list(samples), submission)
        else:
            yield from samples

    def _samples(
        self, submission: pb.Submission, owner: int, now: float, media: tuple[MediaItem, ...]
    ) -> Iterator[Sequence]:
        """Yields one sequence for each requested sample, with consecutive ids; several samples of a prompt share a
        SampleGroup, and only the first one asks for prompt log-probabilities. `now`: seconds, for deadline and
        arrival."""
        hashes = block_hash.split(submission.block_hashes)
        grammar_id = hashlib.sha256(submission.grammar).digest() if submission.grammar else b""
        eos = tuple(u32(submission.eos_token_ids).tolist())
        stops = tuple(u32(submission.stop_token_ids).tolist())
        arrival = now - submission.age_ms / 1000
        deadline = now + submission.timeout_ms / 1000 if submission.timeout_ms else math.inf
        sample_group = SampleGroup() if submission.num_sequences > 1 else None
        query = _late_query(submission) if submission.HasField("late_query") else None
        for i in range(submission.num_sequences):
            yield Sequence(
                key=next(self._keys),
                owner=owner,
                sequence_id=submission.first_sequence_id + i,
                tokens=SequenceTokens(submission.token_ids),
                num_prompt_tokens=submission.num_prompt_tokens,
                max_total_tokens=submission.num_prompt_tokens + submission.max_tokens,
                stop_token_ids=stops,
                eos_token_ids=eos,
                root_hash=submission.root_hash,
                block_hashes=list(hashes),
                skip_reading_prefix_cache=submission.skip_reading_prefix_cache,
                asks_logprobs=submission.asks_logprobs,
                samples_nothing=submission.samples_nothing,
                prompt_logprobs_from=0 if i else submission.prompt_logprobs_from,
                repetition=_repetition(submission),
                min_output_tokens=submission.min_tokens,
                grammar_id=grammar_id,
                grammar_bytes=len(submission.grammar),
                media=media,
                query=query,
                adapter=adapter_of(submission),
                sample_group=sample_group,
                payload=Payload(submission.params, submission.first_sample + i, submission.grammar),
                request_id=submission.request_id,
                priority=submission.priority,
                kv_priority=_KV_PRIORITIES.get(submission.kv_priority, KVPriority.NORMAL),
                tenant=submission.tenant,
                arrival=arrival,
                queued_at=now,
                deadline=deadline,
            )


def adapter_of(submission: pb.Submission) -> AdapterId | None:
    return AdapterId(submission.adapter, submission.adapter_digest) if submission.adapter else None


def media_of(submission: pb.Submission, address: str) -> tuple[MediaItem, ...]:
    """Returns the media items of a submission. `address`: MediaService that has their pixels."""
    return tuple(
        MediaItem(item.identifier, item.offset, item.length, item.num_embeddings, MediaSource(address, item))
        for item in submission.media
    )


def _late_query(submission: pb.Submission) -> LateQuery:
    """Returns the query, named by everything that its vectors depend on and by its tenant, so that no tenant shares the
    cached query of another."""
    query = submission.late_query
    parts = (
        submission.root_hash,
        submission.tenant.encode(),
        submission.adapter.encode(),
        submission.adapter_digest,
        query.params,
        query.token_ids,
    )
    name = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()
    return LateQuery(name, query.token_ids, Payload(query.params))


def _root(outputs: list[Sequence], submission: pb.Submission) -> Sequence:
    """Returns the first of `outputs` as the root of a beam search, which represents all of them while the search
    runs."""
    root, search = outputs[0], submission.beam_search
    rules = BeamRules(
        width=max(search.width, len(outputs)),
        num_outputs=len(outputs),
        max_output_tokens=submission.max_tokens,
        end_token_ids=frozenset((*root.eos_token_ids, *root.stop_token_ids)),
        length_penalty=search.length_penalty if search.HasField("length_penalty") else 1.0,
        early_stopping=search.early_stopping,
    )
    root.num_logprobs = submission.num_logprobs if submission.HasField("num_logprobs") else None
    root.payload = Payload(submission.params, num_logprobs=rules.num_candidates)
    root.search, root.outputs, root.sample_group = BeamSearchState(rules), outputs, None
    return root


def _repetition(submission: pb.Submission) -> RepetitionRule | None:
    """Returns the submission's rule for repetitive output; None if it has none."""
    if not submission.HasField("repetition_detection"):
        return None
    rule = submission.repetition_detection
    return RepetitionRule(rule.min_pattern_size, rule.max_pattern_size, rule.min_count)


def complete_block_hashes(sequence: Sequence, block_size: int) -> None:
    """Appends the hashes of full blocks that the frontend did not send to the sequence; computes all of them again
    if there are more than full blocks, because they were hashed with another block size."""
    missing_from = len(sequence.block_hashes) * block_size
    if sequence.num_tokens // block_size == len(sequence.block_hashes):
        return
    if sequence.num_tokens < missing_from:  # hashed with another block size
        sequence.block_hashes.clear()
        missing_from = 0
    parent = sequence.block_hashes[-1] if sequence.block_hashes else sequence.root_hash
    rest = sequence.tokens.column(missing_from, sequence.num_tokens)
    sequence.block_hashes += block_hash.chain_with_media(parent, rest, block_size, sequence.media, missing_from)
