"""Options of pictures in bodies: mm_processor_kwargs and media_io_kwargs, as clients of vLLM send them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.services.frontend.request.media import DEFAULT_MEDIA_OPTIONS, WHITE, MediaOptions
from quire.shared.errors import InvalidArgument

MODES = ("RGB", "L", "1")
IMAGE_FIELDS = ("image_mode", "rgba_background_color")
OTHER_MODALITIES = ("video", "audio")
MAX_BYTE = 255
# Groups of processor options by modality, in Hugging Face's names.
IMAGES, OTHER_GROUPS = "images_kwargs", ("videos_kwargs", "audio_kwargs", "text_kwargs", "common_kwargs")
DONE_BY_WORKERS = ("do_normalize", "do_rescale")  # workers do both in any case, as vLLM's do


def media_options(processor: Mapping[str, Any] | None, media_io: Mapping[str, Any] | None) -> MediaOptions:
    """Returns the options of a request's pictures. `processor`: mm_processor_kwargs, flat or in groups by modality;
    `media_io`: media_io_kwargs. Raises InvalidArgument."""
    if not processor and not media_io:
        return DEFAULT_MEDIA_OPTIONS
    mode, background = _image_io(media_io or {})
    return MediaOptions(_for_images(processor or {}), mode, background)


def _for_images(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the processor's options for pictures. Raises InvalidArgument for a group that is no object."""
    options = {name: value for name, value in given.items() if name not in (IMAGES, *OTHER_GROUPS)}
    group = given.get(IMAGES) or {}
    if not isinstance(group, Mapping):
        raise InvalidArgument(f"mm_processor_kwargs: {IMAGES} must be an object", field="mm_processor_kwargs")
    return {name: value for name, value in {**options, **group}.items() if name not in DONE_BY_WORKERS}


def _image_io(given: Mapping[str, Any]) -> tuple[str, tuple[int, int, int]]:
    """Returns the colour mode and the background of media_io_kwargs.image. Raises InvalidArgument for unknown
    modalities and options, and for values that an option does not allow."""
    for name in given:
        if name != "image" and name not in OTHER_MODALITIES:
            raise _wrong(f"there is no modality {name!r:.64}; known: image")
    image = given.get("image") or {}
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
