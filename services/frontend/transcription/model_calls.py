"""Calls of Whisper: outputs and alignments for prompts that consist of tokens and a piece of sound."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from quire.services.frontend.request.media import MediaPart, PartOrigin
from quire.services.frontend.request.request import Alignment, Pooling, Request, Sampling, TokenPrompt
from quire.shared.media.audio.wav import float_wav
from quire.shared.media.modalities import AUDIO

if TYPE_CHECKING:
    from quire.services.frontend.generation.generator import Generator
    from quire.services.frontend.output_processor.delta import SampleDelta
    from quire.services.frontend.transcription.work import TranscriptionWork
    from quire.shared.columns import F32
    from quire.shared.transcription.silence import Piece

ORIGIN = PartOrigin("file", "", "file")


class ModelCalls:
    """Calls the served model on behalf of a transcription; each call's prompts run in parallel."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def generate(
        self, work: TranscriptionWork, prompts: Sequence[tuple[Piece, Sequence[int]]], sampling: Sampling
    ) -> list[SampleDelta]:
        """Returns the output after the tokens of each prompt, given its piece of sound. Raises QuireError."""
        request = _request(work, prompts, sampling, None)
        async with self._generator.start(request, work.call) as generation:
            return await generation.collect()

    async def align(
        self, work: TranscriptionWork, prompts: Sequence[tuple[Piece, Sequence[int]]], alignment: Alignment
    ) -> list[F32]:
        """Returns how the tokens of each prompt attend to its piece of sound, float32 [num_aligned, num_rows]. Raises
        QuireError."""
        request = _request(work, prompts, Sampling(), Pooling(alignment=alignment))
        async with self._generator.start(request, work.call) as generation:
            await generation.collect()
            columns = [np.frombuffer(column, dtype="<f4") for column in generation.vectors]
        counts = [len(tokens) - alignment.first_position for _, tokens in prompts]
        return [column.reshape(count, -1) for column, count in zip(columns, counts, strict=True)]


def _request(
    work: TranscriptionWork,
    prompts: Sequence[tuple[Piece, Sequence[int]]],
    sampling: Sampling,
    pooling: Pooling | None,
) -> Request:
    """Returns the request of a transcription for these prompts."""
    return Request(
        request_id=work.sent.request_id or uuid.uuid4().hex,
        model=work.form.model,
        prompts=[
            TokenPrompt(
                list(tokens),
                [MediaPart(content=float_wav(work.sound(piece), work.rate), origin=ORIGIN, modality=AUDIO)],
            )
            for piece, tokens in prompts
        ],
        sampling=sampling,
        pooling=pooling,
        arrival_s=work.sent.arrival_s,
        deadline_s=work.sent.deadline_s,
        tenant=work.sent.tenant,
        final_only=True,
    )
