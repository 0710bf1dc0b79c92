"""A child process that decodes and renders media under bounds of memory and processor time; decoder.py owns it.

Messages to and from the process:
- introduction(), once: the bounds, and the model's folder, whose media processors are used (JSON)
- question(), for each item: a JSON line with the modality and the options, then the file's bytes
- encode(): a JSON line with the layout, then the pixels of the tiles; or a JSON line with the refusal alone
"""

from __future__ import annotations

import contextlib
import json
import resource
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quire.services.frontend.media import pictures, videos
from quire.services.frontend.media.pictures import Colours
from quire.services.frontend.media.policy import MediaBounds
from quire.services.frontend.media.tiles import MediaTiles
from quire.services.frontend.request.media import NO_METADATA, MediaOptions, VideoMetadata
from quire.shared.errors import InvalidArgument
from quire.shared.media.audio import decoding
from quire.shared.media.audio.waveform import AudioBounds
from quire.shared.media.modalities import AUDIO, IMAGE, VIDEO
from quire.shared.media.model_processors import MediaProcessors
from quire.shared.media.processor import TileLayout
from quire.shared.process.child import serve_requests
from quire.shared.process.resource_limits import CpuTimeExceeded, cpu_time_limit, limit_memory

END = b"\n"  # of the JSON
Question = dict[str, Any]  # the JSON line of a question
SAMPLES = "samples"  # in the place of a modality: the samples of a sound file are asked for


def introduction(bounds: MediaBounds, folder: Path) -> bytes:
    """Returns the first message to a process, which begin() reads."""
    return json.dumps({"bounds": asdict(bounds), "folder": str(folder)}).encode()


def begin(introduced: bytes) -> Callable[[bytes], bytes]:
    """Makes the processors, limits the memory of this process and returns the function that answers a question with
    encoded tiles or a refusal. `introduced`: the MediaBounds and the folder as JSON."""
    given = json.loads(introduced)
    bounds = MediaBounds(**given["bounds"])
    processors = MediaProcessors.read(Path(given["folder"]))
    if processors.video is not None or processors.audio is not None:
        _import_av()
    limit_memory(bounds.decode_bytes)

    def answer(message: bytes) -> bytes:
        """Processes the item of one question within the bounds on processor time and memory; returns its tiles or the
        refusal, encoded."""
        head, _, content = message.partition(END)
        how = json.loads(head)
        try:
            with cpu_time_limit(decode_time(bounds, how["modality"])):
                return encode(DECODERS[how["modality"]](content, how, bounds, processors))
        except InvalidArgument as error:
            return _refusal(error.message, error.field)
        except CpuTimeExceeded:
            return _refusal(over_time(bounds, how["modality"]))
        except MemoryError:
            return _refusal(over_memory(bounds, how["modality"]))

    return answer


def _import_av() -> None:
    """Loads the library that decodes videos and sound, before memory is limited; without it, files that need it are
    refused."""
    with contextlib.suppress(ImportError):
        import av

        av.logging.set_level(None)


def question(
    content: bytes, options: MediaOptions, modality: str = IMAGE, metadata: VideoMetadata = NO_METADATA
) -> bytes:
    """Returns the message that asks for the tiles of the item in the file `content`. `metadata`: of a video that is
    sent as frames."""
    how = {
        "modality": modality,
        "mode": options.image_mode,
        "background": options.background,
        "options": dict(options.video if modality == VIDEO else options.processor),
        "metadata": metadata,
    }
    return json.dumps(how).encode() + END + content


def _picture(content: bytes, how: Question, bounds: MediaBounds, processors: MediaProcessors) -> MediaTiles:
    """Decodes the picture `content` and renders its tiles. Raises InvalidArgument for a file that is no picture, one
    beyond the bounds, and unknown options."""
    assert processors.image is not None  # the pipeline refuses pictures otherwise
    picture = pictures.decode(content, bounds, Colours(how["mode"], tuple(how["background"])))
    layout = processors.image.layout(picture.height, picture.width, how["options"])
    return MediaTiles(layout, processors.image.render(picture, layout).tobytes())


def _video(content: bytes, how: Question, bounds: MediaBounds, processors: MediaProcessors) -> MediaTiles:
    """Decodes the video `content` and renders the frames that the processor takes. Raises InvalidArgument as
    videos.decode()."""
    assert processors.video is not None  # the pipeline refuses videos otherwise
    fps, total, indices, duration = how["metadata"]
    metadata = VideoMetadata(fps, total, None if indices is None else tuple(indices), duration)
    return videos.decode(content, how["options"], metadata, bounds, processors.video)


def _sound(content: bytes, how: Question, bounds: MediaBounds, processors: MediaProcessors) -> MediaTiles:
    """Decodes the sound `content` and computes its features. Raises InvalidArgument for a file that is no sound, one
    beyond the bounds, and unknown options."""
    processor = processors.audio
    assert processor is not None  # the pipeline refuses sound otherwise
    seconds = min(bounds.audio_s, processor.max_samples / processor.rate)
    samples = decoding.decode(content, processor.rate, AudioBounds(seconds=seconds))
    layout = processor.sound_layout(min(len(samples), processor.max_samples), how["options"])
    features = processor.features(samples[: processor.max_samples], layout)
    return MediaTiles(layout, features.astype(layout.dtype).tobytes())


def _samples(content: bytes, how: Question, bounds: MediaBounds, processors: MediaProcessors) -> MediaTiles:
    """Decodes the sound `content` to the samples that the model takes, [1, 1, num_samples]. Raises InvalidArgument for
    a file that is no sound, and one beyond the bounds."""
    assert processors.audio is not None  # only models that transcribe are asked
    samples = decoding.decode(content, processors.audio.rate, AudioBounds(seconds=bounds.audio_file_s))
    return MediaTiles(TileLayout(1, 1, len(samples), is_sound=True), samples.astype("<f4").tobytes())


# By modality, or SAMPLES: function that decodes a file and renders its tiles.
DECODERS: Mapping[str, Callable[[bytes, Question, MediaBounds, MediaProcessors], MediaTiles]] = {
    IMAGE: _picture,
    VIDEO: _video,
    AUDIO: _sound,
    SAMPLES: _samples,
}
SHORTER = "Send a shorter clip."
REMEDIES = {
    IMAGE: "Send a smaller picture.",
    VIDEO: "Send a shorter or smaller one.",
    AUDIO: SHORTER,
    SAMPLES: SHORTER,
}


def decode_time(bounds: MediaBounds, modality: str) -> float:
    """Returns the seconds of processor time that an item may take. `modality`: or SAMPLES."""
    longer = {VIDEO: bounds.video_decode_s, SAMPLES: bounds.audio_file_decode_s}
    return longer.get(modality, bounds.decode_s)


def over_memory(bounds: MediaBounds, modality: str) -> str:
    """Returns the refusal of an item that exceeds `decode_bytes`."""
    limit = bounds.decode_bytes >> 20
    text = f"decoding it takes too much memory (limit: {limit} MiB)"
    return f"Failed to load {_kind(modality)}: {text}. {REMEDIES[modality]}"


def over_time(bounds: MediaBounds, modality: str) -> str:
    """Returns the refusal of an item that takes longer than decode_time()."""
    limit = decode_time(bounds, modality)
    return f"Failed to load {_kind(modality)}: decoding it takes more than {limit:g} s. {REMEDIES[modality]}"


def _kind(modality: str) -> str:
    """Returns the name of an item in errors."""
    return AUDIO if modality == SAMPLES else modality


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
    num_tiles, height, width, numbers, is_sound = found["layout"]
    return MediaTiles(TileLayout(num_tiles, height, width, tuple(numbers), is_sound), pixels)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # it writes no file
    serve_requests(begin)
