"""Decoding of videos to the tiles of chosen frames, in all forms that are accepted: files of videos, animated pictures,
arrays (.npy) and lists of encoded pictures.

Runs in a decoder process (decoder_process.py). Frames are scaled as they are decoded, so that no more than one is kept
in its own size.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from PIL import Image, ImageFile

from quire.services.frontend.media import pictures, sources
from quire.services.frontend.media.policy import MediaBounds
from quire.services.frontend.media.tiles import MediaTiles
from quire.services.frontend.media.video_container import ContainerVideo
from quire.services.frontend.request.media import VideoMetadata
from quire.shared.errors import InvalidArgument
from quire.shared.media.video import Clip, VideoFacts, VideoProcessor
from quire.shared.media.video_sampling import MOST_FRAMES

if TYPE_CHECKING:
    import numpy.typing as npt

NPY = b"\x93NUMPY"
PICTURES = re.compile(
    rb"\xff\xd8\xff|\x89PNG|GIF8|RIFF....WEBP|BM|II\*\0|MM\0\*|....ftypavi[fs]", re.DOTALL
)  # first bytes of the files that Pillow reads
BASE64 = re.compile(rb"\s*(/9j/|iVBORw|UklGR|R0lGOD)[A-Za-z0-9+/]{32}")  # first bytes of a list of pictures in base64
FRAMES_FPS = 2.0  # of frames without times, as qwen-vl-utils has it
FRAME_S = 0.1  # of a frame of an animated picture that says none, as browsers show it
SAMPLES = "do_sample_frames"
RGB = 3


class VideoSource(Protocol):
    """Video whose frames can be decoded."""

    @property
    def facts(self) -> VideoFacts: ...

    @property
    def given(self) -> tuple[int, ...] | None:
        """Indices in the video of the frames that there are, if a client chose them; None: all frames are there."""

    def frames(self, positions: Sequence[int]) -> Iterator[Image.Image]:
        """Yields RGB frames by ascending positions among those that there are; equal positions may repeat. Raises
        InvalidArgument for damaged files."""


def decode(
    content: bytes, options: Mapping[str, Any], metadata: VideoMetadata, bounds: MediaBounds, processor: VideoProcessor
) -> MediaTiles:
    """Decodes a video and renders the frames that the model's processor takes from it. `options`: of the request;
    `metadata`: of frames that a client chose. Raises InvalidArgument for other formats, damaged files, sizes beyond the
    bounds and wrong options; its text never repeats the decoder's own."""
    samples = options.get(SAMPLES, True)
    if not isinstance(samples, bool):
        raise InvalidArgument(f"{SAMPLES} is {samples!r}; true or false is needed", field="media_io_kwargs")
    options = {name: value for name, value in options.items() if name != SAMPLES}
    source = open_video(content, metadata, bounds, options)
    if source.given is not None:
        options.pop("fps", None)  # of the frames that were sent, not to be taken from them
    positions = _positions(source, options, processor, is_sampled=samples)
    numbers = positions if source.given is None else tuple(source.given[position] for position in positions)
    layout = processor.layout(Clip(source.facts, numbers), options)
    pixels = np.empty((layout.num_tiles, layout.height, layout.width, RGB), dtype=np.uint8)
    for index, frame in enumerate(source.frames(positions)):
        pixels[index] = processor.render(frame, layout)
    return MediaTiles(layout, pixels.tobytes())


def _positions(
    source: VideoSource, options: Mapping[str, Any], processor: VideoProcessor, *, is_sampled: bool
) -> tuple[int, ...]:
    """Returns the positions of the frames to take. Frames that a client chose are all taken, unless num_frames asks for
    fewer. Raises InvalidArgument for more than MOST_FRAMES."""
    if source.given is None and is_sampled:
        return processor.sample(source.facts, options)
    count = source.facts.num_frames if source.given is None else len(source.given)
    if is_sampled and options.get("num_frames") is not None:
        return processor.sample(source.facts._replace(num_frames=count), options)
    if count > MOST_FRAMES:
        raise refused(f"{count} frames are to be taken, of at most {MOST_FRAMES}; set media_io_kwargs.video.num_frames")
    return tuple(range(count))


def open_video(content: bytes, metadata: VideoMetadata, bounds: MediaBounds, options: Mapping[str, Any]) -> VideoSource:
    """Returns the video in `content`, whose first bytes say what it is. Raises InvalidArgument."""
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    Image.MAX_IMAGE_PIXELS = None  # pictures.check_dimensions() bounds them instead
    if content.startswith(NPY):
        array = _read_array(content, bounds)
        return ChosenFrames(_chosen_facts(array.shape[0], array.shape[1:3], metadata, options), array)
    if BASE64.match(content):
        files = [sources.base64_bytes(one.decode("ascii")) for one in content.split(b",") if one.strip()]
        size = pictures.decode(files[0], bounds).size
        return ChosenFrames(_chosen_facts(len(files), size[::-1], metadata, options), _Encoded(files, bounds))
    return AnimatedPicture(content, bounds) if PICTURES.match(content) else ContainerVideo(content, bounds)


@dataclass(frozen=True, slots=True)
class _ChosenFacts:
    """Facts of a video of which a client sent some frames."""

    video: VideoFacts
    numbers: tuple[int, ...]  # of the frames that were sent


def _chosen_facts(
    count: int, size: tuple[int, ...], metadata: VideoMetadata, options: Mapping[str, Any]
) -> _ChosenFacts:
    """Returns the facts of `count` frames of `size` (height, width), as far as the client said them. Raises
    InvalidArgument for facts that do not fit the frames."""
    numbers = tuple(range(count)) if metadata.frames_indices is None else metadata.frames_indices
    if len(numbers) != count or list(numbers) != sorted(numbers) or numbers[0] < 0:
        raise refused(
            f"frames_indices has {len(numbers)} numbers for {count} frames; one for each, ascending from 0 on, is "
            "needed"
        )
    total = metadata.total_num_frames or max(numbers[-1] + 1, count)
    if total <= numbers[-1]:
        raise refused(f"total_num_frames is {total}, and frames_indices has {numbers[-1]}; it must be larger")
    fps = metadata.fps or options.get("fps") or (total / metadata.duration if metadata.duration else FRAMES_FPS)
    if not isinstance(fps, (int, float)) or not 0 < fps < 1e6:
        raise refused(f"fps is {fps!r}; a number above 0 is needed")
    return _ChosenFacts(VideoFacts(total, float(fps), *size), numbers)


class ChosenFrames:
    """Frames that a client took from a video: arrays or pictures."""

    def __init__(self, facts: _ChosenFacts, frames: Sequence[Any] | npt.NDArray[np.uint8]) -> None:
        self.facts, self.given, self._frames = facts.video, facts.numbers, frames

    def frames(self, positions: Sequence[int]) -> Iterator[Image.Image]:
        """Yields RGB frames by position. Raises InvalidArgument for damaged ones."""
        for position in positions:
            frame = self._frames[position]
            yield frame if isinstance(frame, Image.Image) else Image.fromarray(frame)


class _Encoded(Sequence[Image.Image]):
    """Files of pictures, decoded one at a time."""

    def __init__(self, files: Sequence[bytes], bounds: MediaBounds) -> None:
        self._files, self._bounds = files, bounds

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: Any) -> Any:
        return pictures.decode(self._files[index], self._bounds)


def _read_array(content: bytes, bounds: MediaBounds) -> npt.NDArray[np.uint8]:
    """Reads frames [num_frames, height, width, 3] of 8-bit RGB from a .npy file, without copying. Raises
    InvalidArgument for others."""
    try:
        stream = io.BytesIO(content)
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(stream)
        data = memoryview(content)[stream.tell() :]
        if len(shape) != 4 or shape[3] != RGB or dtype != np.uint8 or is_fortran or not all(shape):
            needed = "[num_frames, height, width, 3] of type uint8 is needed"
            raise refused(f"it is an array of shape {shape} and type {dtype}; {needed}")
        pictures.check_dimensions(shape[2], shape[1], bounds)
        return np.frombuffer(data, np.uint8).reshape(shape)
    except (ValueError, SyntaxError, EOFError):
        raise refused("the array is damaged or cut off; send the complete file") from None


class AnimatedPicture:
    """Video in a file that Pillow reads: GIF, WebP, APNG; other pictures are videos of one frame."""

    given = None

    def __init__(self, content: bytes, bounds: MediaBounds) -> None:
        """Reads size, number and times of the frames. Raises InvalidArgument."""
        self._content, self._bounds = content, bounds
        seconds, count = 0.0, 0
        for image in self._opened():
            count = max(count, getattr(image, "n_frames", 1))
            seconds += (image.info.get("duration") or 0) / 1000 or FRAME_S
            if count > bounds.frames:
                raise too_many_frames(count, bounds)
            height, width = image.height, image.width
        self.facts = VideoFacts(count, count / seconds, height, width)

    def frames(self, positions: Sequence[int]) -> Iterator[Image.Image]:
        """Yields the frames at `positions`. Raises InvalidArgument for damaged ones."""
        wanted = list(positions)
        for number, image in enumerate(self._opened()):
            while wanted and wanted[0] == number:
                yield pictures.to_rgb(image.copy(), pictures.PLAIN)
                wanted.pop(0)

    def _opened(self) -> Iterator[Image.Image]:
        """Yields the file at each of its frames. Raises InvalidArgument for damaged files and too large frames."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with Image.open(io.BytesIO(self._content), formats=pictures.FORMATS) as image:
                    pictures.check_dimensions(*image.size, self._bounds)
                    for number in range(getattr(image, "n_frames", 1)):
                        image.seek(number)
                        image.load()
                        yield image
            except (Image.DecompressionBombError, *pictures.FAILURES):
                raise refused("the file is damaged or cut off; send the complete file") from None


def too_many_frames(count: int, bounds: MediaBounds) -> InvalidArgument:
    """Returns the refusal of a video with more frames than are read."""
    return refused(f"it has {count} frames or more; at most {bounds.frames} are read. Send a shorter one")


def refused(reason: str) -> InvalidArgument:
    return InvalidArgument(f"Failed to load video: {reason}", field="messages")
