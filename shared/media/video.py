"""Interface of the processing of videos by model family, beside that of pictures in processor.py.

A frontend reads what a video's file says, asks the family which frames to take, renders these and puts the expansion in
the place of the placeholder. Each frame is one tile of the layout; a worker encodes them as it encodes the tiles of a
picture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    import numpy as np
    import numpy.typing as npt
    from PIL import Image

    from quire.shared.media.processor import Normalization, PlaceholderExpansion, PromptTokenizer, TileLayout


class VideoFacts(NamedTuple):
    """Facts of a video before frames are taken from it."""

    num_frames: int  # at least 1
    fps: float  # frames per second, more than 0
    height: int  # in pixels
    width: int


class Clip(NamedTuple):
    """Frames of a video that the encoder gets."""

    facts: VideoFacts
    indices: tuple[int, ...]  # of the frames in the video, in order

    @property
    def fps(self) -> float:
        """Frames per second of the clip."""
        return len(self.indices) / self.facts.num_frames * self.facts.fps


class VideoProcessor(Protocol):
    """Processing of one model's videos. Made from config.json and the processor files by a function in
    registry.VIDEO_PROCESSORS."""

    @property
    def placeholder(self) -> int:
        """Token that the chat template writes once for each video."""

    @property
    def around(self) -> tuple[int, int] | None:
        """Tokens directly before and after the placeholder that the expansion replaces as well; None: it replaces the
        placeholder alone."""

    @property
    def normalization(self) -> Normalization:
        """Normalization, by the worker, of the rendered pixels."""

    @property
    def max_embeddings(self) -> int:
        """Largest number of rows of one video."""

    def sample(self, facts: VideoFacts, options: Mapping[str, Any]) -> tuple[int, ...]:
        """Returns the indices of the frames to take. `options`: of the request. Raises InvalidArgument for values that
        an option does not allow."""

    def layout(self, clip: Clip, options: Mapping[str, Any]) -> TileLayout:
        """Plans for the frames of a clip. Raises InvalidArgument for frames or options that the family cannot
        process."""

    def render(self, frame: Image.Image, layout: TileLayout) -> npt.NDArray[np.uint8]:
        """Returns the tile of one RGB frame, [height, width, 3]."""

    def expand(self, layout: TileLayout, tokenizer: PromptTokenizer) -> PlaceholderExpansion:
        """Returns the tokens that replace the placeholder of a video with this layout. Raises InvalidArgument if the
        tokenizer lacks one of the family's special tokens."""
