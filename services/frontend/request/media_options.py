"""Options of media in bodies: mm_processor_kwargs and media_io_kwargs, as clients of vLLM send them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.services.frontend.request.media import DEFAULT_MEDIA_OPTIONS, WHITE, MediaOptions
from quire.services.frontend.request.video_options import read_video_io
from quire.shared.errors import InvalidArgument
from quire.shared.media.modalities import IMAGE, MODALITIES, VIDEO

MODES = ("RGB", "L", "1")
IMAGE_FIELDS = ("image_mode", "rgba_background_color")
MAX_BYTE = 255
# Groups of processor options by modality, in Hugging Face's names.
IMAGES, VIDEOS = "images_kwargs", "videos_kwargs"
OTHER_GROUPS = ("audio_kwargs", "text_kwargs", "common_kwargs")
# Flat options that no picture has, and those that both have.
VIDEO_ONLY = ("num_frames", "fps", "min_frames", "max_frames", "do_sample_frames", "cap_pixels_per_frame")
SIZES = ("size", "min_pixels", "max_pixels")
DONE_BY_WORKERS = ("do_normalize", "do_rescale")  # workers do both in any case, as vLLM's do


def media_options(processor: Mapping[str, Any] | None, media_io: Mapping[str, Any] | None) -> MediaOptions:
    """Returns the options of a request's media. `processor`: mm_processor_kwargs, flat or in groups by
    modality; `media_io`: media_io_kwargs. Raises InvalidArgument."""
    if not processor and not media_io:
        return DEFAULT_MEDIA_OPTIONS
    processor, media_io = processor or {}, media_io or {}
    mode, background = _image_io(media_io)
    frames, metadata = read_video_io(media_io.get(VIDEO) or {})
    return MediaOptions(_for_images(processor), mode, background, {**frames, **_for_videos(processor)}, metadata)


def _for_images(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the processor's options for pictures. Raises InvalidArgument for a group that is no object."""
    groups = (IMAGES, VIDEOS, *OTHER_GROUPS)
    options = {name: value for name, value in given.items() if name not in groups and name not in VIDEO_ONLY}
    return _without_done({**options, **_group(given, IMAGES)})


def _for_videos(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the processor's options for videos: those of their group, and the flat ones that videos may have. Raises
    InvalidArgument for a group that is no object."""
    options = {name: value for name, value in given.items() if name in VIDEO_ONLY or name in SIZES}
    return _without_done({**options, **_group(given, VIDEOS)})


def _group(given: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Returns a group of processor options. Raises InvalidArgument unless it is an object."""
    group = given.get(name) or {}
    if not isinstance(group, Mapping):
        raise InvalidArgument(f"mm_processor_kwargs: {name} must be an object", field="mm_processor_kwargs")
    return group


def _without_done(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in DONE_BY_WORKERS}


def _image_io(given: Mapping[str, Any]) -> tuple[str, tuple[int, int, int]]:
    """Returns the colour mode and the background of media_io_kwargs.image. Raises InvalidArgument for unknown
    modalities and options, and for values that an option does not allow."""
    for name in given:
        if name not in MODALITIES:
            raise _wrong(f"there is no modality {name!r:.64}; known: {', '.join(MODALITIES)}")
    image = given.get(IMAGE) or {}
    if not isinstance(image, Mapping):
        raise _wrong(f"image must be an object, got {image!r:.64}")
    for name in image:
        if name not in IMAGE_FIELDS:
            raise _wrong(f"image has no option {name!r:.64}; known: {', '.join(IMAGE_FIELDS)}")
    mode = image.get("image_mode") or "RGB"
    if mode not in MODES:
        raise _wrong(f"image.image_mode must be one of {', '.join(MODES)}, got {mode!r:.64}")
    colour = image.get("rgba_background_color") or WHITE
    if not isinstance(colour, list | tuple) or len(colour) != len(WHITE) or not all(map(_is_byte, colour)):
        raise _wrong(f"image.rgba_background_color must be three numbers from 0 to {MAX_BYTE}, got {colour!r:.64}")
    red, green, blue = colour
    return mode, (red, green, blue)


def _is_byte(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_BYTE


def _wrong(reason: str) -> InvalidArgument:
    return InvalidArgument(f"media_io_kwargs: {reason}.", field="media_io_kwargs")
