"""Processors of one model, by modality: the one table that frontends and workers read what a model takes from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quire.shared.media.audio.processor import AttendedProcessor, AudioProcessor
from quire.shared.media.modalities import AUDIO, IMAGE, VIDEO
from quire.shared.media.processor import MediaProcessor
from quire.shared.media.registry import read_audio_processor, read_media_processor, read_video_processor
from quire.shared.media.video import VideoProcessor

ItemProcessor = MediaProcessor | VideoProcessor | AudioProcessor


@dataclass(frozen=True, slots=True)
class MediaProcessors:
    """Processors of the media that a model takes; None for those that it does not take."""

    image: MediaProcessor | None = None
    video: VideoProcessor | None = None
    audio: AudioProcessor | None = None

    @classmethod
    def read(cls, folder: Path) -> MediaProcessors:
        """Returns the processors of a model. Raises InvalidArgument if the files of its folder do not fit together."""
        return cls(read_media_processor(folder), read_video_processor(folder), read_audio_processor(folder))

    @property
    def by_modality(self) -> dict[str, ItemProcessor]:
        """Processor of each modality that the model takes."""
        found = {IMAGE: self.image, VIDEO: self.video, AUDIO: self.audio}
        return {modality: processor for modality, processor in found.items() if processor is not None}

    @property
    def modalities(self) -> tuple[str, ...]:
        """Modalities that the model takes."""
        return tuple(self.by_modality)

    @property
    def attends(self) -> bool:
        """Whether the model is an encoder-decoder, whose decoder attends to exactly one clip."""
        return isinstance(self.audio, AttendedProcessor)

    @property
    def placeholder_ids(self) -> dict[str, int]:
        """Tokens that stand for media in prompts, by modality; none for a clip that a decoder attends to."""
        found = self.by_modality.items()
        return {name: one.placeholder for name, one in found if not isinstance(one, AttendedProcessor)}

    @property
    def of_encoder(self) -> MediaProcessor | AudioProcessor | None:
        """Processor of the media for which the encoder is built; videos are encoded as pictures are."""
        return self.image or self.audio

    @property
    def max_embeddings(self) -> int:
        """Largest number of rows of one item; 0 without media."""
        return max((one.max_embeddings for one in self.by_modality.values()), default=0)
