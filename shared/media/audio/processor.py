"""Interface of the processing of sound by model family; that of pictures is in shared/media/processor.py.

A frontend decodes a file to the family's sampling rate, asks the family for the layout, renders the features that the
encoder gets, and puts the expansion in the place of the placeholder token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quire.shared.media.audio.waveform import F32
    from quire.shared.media.processor import PlaceholderExpansion, PromptTokenizer, TileLayout

MESSAGES = "messages"


@runtime_checkable
class AudioProcessor(Protocol):
    """Processing of one model's sound. Made from config.json and the processor files by a function in
    registry.AUDIO_PROCESSORS."""

    @property
    def placeholder(self) -> int:
        """Token that the chat template writes once for each clip."""

    @property
    def rate(self) -> int:
        """Samples a second that the family takes."""

    @property
    def max_samples(self) -> int:
        """Largest number of samples of one clip, at `rate`."""

    @property
    def max_embeddings(self) -> int:
        """Largest number of rows of one item."""

    def sound_layout(self, num_samples: int, options: Mapping[str, Any]) -> TileLayout:
        """Plans for a clip of `num_samples` samples: clips of the encoder, frequency bins and frames. `options`: the
        request's mm_processor_kwargs. Raises InvalidArgument for a clip that is too short or too long, and for options
        that the family does not have."""

    def features(self, samples: F32, layout: TileLayout) -> F32:
        """Returns the features of a clip, [num_tiles, height, width] of its layout."""

    def expand(self, layout: TileLayout, tokenizer: PromptTokenizer) -> PlaceholderExpansion:
        """Returns the tokens that replace the placeholder of an item with this layout."""


@runtime_checkable
class AttendedProcessor(Protocol):
    """Extension of the processors of encoder-decoder models: the decoder attends to the rows of a clip, and no token
    stands for it."""

    @property
    def is_attended(self) -> bool:
        """Returns True; the attribute alone tells these processors from the others (runtime_checkable)."""


def check_samples(num_samples: int, least: int, most: int, rate: int) -> None:
    """Raises InvalidArgument for a clip of less than `least` or more than `most` samples."""
    if num_samples < least:
        raise InvalidArgument(
            f"Failed to load audio: it lasts {num_samples / rate:.3f} s, and this model needs at least "
            f"{least / rate:.3f} s. Send a longer clip.",
            field=MESSAGES,
        )
    if num_samples > most:
        raise InvalidArgument(
            f"Failed to load audio: it lasts {num_samples / rate:.1f} s, and this model takes at most "
            f"{most / rate:g} s of sound in one part. Cut it into several parts.",
            field=MESSAGES,
        )
