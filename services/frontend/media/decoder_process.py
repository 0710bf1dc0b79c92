"""A child process that decodes and renders pictures and videos under bounds of memory and processor time; decoder.py
owns it.

Messages to and from the process:
- introduction(), once: the bounds, and the model's folder, whose media processors are used (JSON)
- question() or video_question(), for each item: a JSON line with the options, then the file's bytes
- encode(): a JSON line with the layout, then the pixels of the tiles; or a JSON line with the refusal alone
"""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quire.services.frontend.media import pictures, videos
from quire.services.frontend.media.pictures import Colours
from quire.services.frontend.media.policy import MediaBounds
from quire.services.frontend.media.tiles import MediaTiles
from quire.services.frontend.request.media import MediaOptions, VideoMetadata
from quire.shared.errors import InvalidArgument
from quire.shared.media.processor import MediaProcessor, TileLayout
from quire.shared.media.registry import read_media_processor, read_video_processor
from quire.shared.media.video import VideoProcessor
from quire.shared.process.child import serve_requests
from quire.shared.process.resource_limits import CpuTimeExceeded, cpu_time_limit, limit_memory

END = b"\n"  # of the JSON


def introduction(bounds: MediaBounds, folder: Path) -> bytes:
    """Returns the first message to a process, which begin() reads."""
    return json.dumps({"bounds": asdict(bounds), "folder": str(folder)}).encode()


def begin(introduced: bytes) -> Callable[[bytes], bytes]:
    """Makes the processors, limits the memory of this process and returns the function that answers a question with
    encoded tiles or a refusal. `introduced`: the MediaBounds and the folder as JSON."""
    given = json.loads(introduced)
    bounds = MediaBounds(**given["bounds"])
    folder = Path(given["folder"])
    processor, video = read_media_processor(folder), read_video_processor(folder)
    assert processor is not None
    if video is not None:
        _import_video_decoder()
    limit_memory(bounds.decode_bytes)

    def answer(message: bytes) -> bytes:
        """Processes the item of one question within the bounds on processor time and memory; returns its tiles or the
        refusal, encoded."""
        head, _, content = message.partition(END)
        how = json.loads(head)
        is_video = "video" in how
        try:
            with cpu_time_limit(decode_time(bounds, is_video=is_video)):
                if is_video:
                    return encode(_video_tiles(content, how, bounds, video))
                return encode(_tiles(content, how, bounds, processor))
        except InvalidArgument as error:
            return _refusal(error.message, error.field)
        except CpuTimeExceeded:
            return _refusal(over_time(bounds, is_video=is_video))
        except MemoryError:
            return _refusal(over_memory(bounds, is_video=is_video))

    return answer


def _tiles(content: bytes, how: dict[str, object], bounds: MediaBounds, processor: MediaProcessor) -> MediaTiles:
    """Decodes the file `content` and renders its tiles. `how`: the JSON line of a question. Raises InvalidArgument for
    a file that is no picture, one beyond the bounds, and unknown options."""
    picture = pictures.decode(content, bounds, Colours(str(how["mode"]), tuple(how["background"])))  # type: ignore[arg-type]
    layout = processor.layout(picture.height, picture.width, how["options"])  # type: ignore[arg-type]
    return MediaTiles(layout, processor.render(picture, layout).tobytes())


def _video_tiles(
    content: bytes, how: dict[str, Any], bounds: MediaBounds, processor: VideoProcessor | None
) -> MediaTiles:
    """Decodes the video `content` and renders the frames that the processor takes. `how`: the JSON line of a question.
    Raises InvalidArgument as videos.decode()."""
    assert processor is not None  # the pipeline refuses videos otherwise
    fps, total, indices, duration = how["metadata"]
    metadata = VideoMetadata(fps, total, None if indices is None else tuple(indices), duration)
    return videos.decode(content, how["video"], metadata, bounds, processor)


def _import_video_decoder() -> None:
    """Loads the libraries that decode videos, before memory is limited; without them, videos are refused later."""
    with contextlib.suppress(ImportError):
        import av

        av.logging.set_level(None)


def video_question(content: bytes, options: MediaOptions, metadata: VideoMetadata) -> bytes:
    """Returns the message that asks for the tiles of the video `content`."""
    return json.dumps({"video": dict(options.video), "metadata": metadata}).encode() + END + content


def decode_time(bounds: MediaBounds, *, is_video: bool) -> float:
    """Returns the seconds of processor time that one item may take."""
    return bounds.video_decode_s if is_video else bounds.decode_s


def question(content: bytes, options: MediaOptions) -> bytes:
    """Returns the message that asks for the tiles of the picture in the file `content`."""
    how = {"mode": options.image_mode, "background": options.background, "options": dict(options.processor)}
    return json.dumps(how).encode() + END + content


def over_memory(bounds: MediaBounds, *, is_video: bool = False) -> str:
    """Returns the refusal of an item that exceeds `decode_bytes`."""
    limit, (kind, remedy) = bounds.decode_bytes >> 20, _kind(is_video=is_video)
    return f"Failed to load {kind}: decoding it takes too much memory (limit: {limit} MiB). {remedy}"


def over_time(bounds: MediaBounds, *, is_video: bool = False) -> str:
    """Returns the refusal of an item that takes longer than decode_time()."""
    limit, (kind, remedy) = decode_time(bounds, is_video=is_video), _kind(is_video=is_video)
    return f"Failed to load {kind}: decoding it takes more than {limit:g} s. {remedy}"


def _kind(*, is_video: bool) -> tuple[str, str]:
    """Returns the name of an item in errors, and the remedy for one that is too large."""
    return ("video", "Send a shorter or smaller one.") if is_video else ("image", "Send a smaller picture.")


def _refusal(text: str, field: str = "messages") -> bytes:
    return json.dumps({"refused": text, "field": field}).encode() + END


def encode(tiles: MediaTiles) -> bytes:
    """Returns the answer with these tiles, which decode() reads."""
    return json.dumps({"layout": tiles.layout}).encode() + END + tiles.pixels


def decode(answer: bytes) -> MediaTiles:
    """Returns the tiles of an encoded answer. Raises InvalidArgument with the refusal of the process."""
    head, _, pixels = answer.partition(END)
    found = json.loads(head)
    if "refused" in found:
        raise InvalidArgument(found["refused"], field=found["field"])
    num_tiles, height, width, numbers = found["layout"]
    return MediaTiles(TileLayout(num_tiles, height, width, tuple(numbers)), pixels)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # it writes no file
    serve_requests(begin)
