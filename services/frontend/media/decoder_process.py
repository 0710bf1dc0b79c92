"""A child process that decodes and renders media under bounds of memory and processor time; decoder.py owns it.

Messages to and from the process:
- introduction(), once: the bounds, and the model's folder, whose media processor is used (JSON)
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

from quire.services.frontend.media import pictures
from quire.services.frontend.media.pictures import Colours
from quire.services.frontend.media.policy import MediaBounds
from quire.services.frontend.media.tiles import MediaTiles
from quire.services.frontend.request.media import MediaOptions
from quire.shared.errors import InvalidArgument
from quire.shared.media.audio import decoding
from quire.shared.media.audio.processor import AudioProcessor
from quire.shared.media.audio.waveform import AudioBounds
from quire.shared.media.modalities import AUDIO, IMAGE
from quire.shared.media.processor import MediaProcessor, TileLayout
from quire.shared.media.registry import read_audio_processor, read_media_processor
from quire.shared.process.child import serve_requests
from quire.shared.process.resource_limits import CpuTimeExceeded, cpu_time_limit, limit_memory

END = b"\n"  # of the JSON
SAMPLES = "samples"  # in the place of a modality: the samples of a sound file are asked for


def introduction(bounds: MediaBounds, folder: Path) -> bytes:
    """Returns the first message to a process, which begin() reads."""
    return json.dumps({"bounds": asdict(bounds), "folder": str(folder)}).encode()


def begin(introduced: bytes) -> Callable[[bytes], bytes]:
    """Makes the processor, limits the memory of this process and returns the function that answers a question with
    encoded tiles or a refusal. `introduced`: the MediaBounds and the folder as JSON."""
    given = json.loads(introduced)
    bounds = MediaBounds(**given["bounds"])
    folder = Path(given["folder"])
    picture_processor, sound_processor = read_media_processor(folder), read_audio_processor(folder)
    if sound_processor is not None:
        _import_sound_decoder()
    limit_memory(bounds.decode_bytes)

    def answer(message: bytes) -> bytes:
        """Processes the item of one question within the bounds on processor time and memory; returns its tiles or the
        refusal, encoded."""
        head, _, content = message.partition(END)
        how = json.loads(head)
        try:
            with cpu_time_limit(decode_time(bounds, how["modality"])):
                if how["modality"] == SAMPLES:
                    return encode(_samples(content, bounds, sound_processor))
                if how["modality"] == AUDIO:
                    return encode(_features(content, how["options"], bounds, sound_processor))
                return encode(_tiles(content, how, bounds, picture_processor))
        except InvalidArgument as error:
            return _refusal(error.message, error.field)
        except CpuTimeExceeded:
            return _refusal(over_time(bounds, how["modality"]))
        except MemoryError:
            return _refusal(over_memory(bounds, how["modality"]))

    return answer


def _import_sound_decoder() -> None:
    """Loads the library that decodes sound, before memory is limited; without it, files that need it are refused."""
    with contextlib.suppress(ImportError):
        import av

        av.logging.set_level(None)


def _samples(content: bytes, bounds: MediaBounds, processor: AudioProcessor | None) -> MediaTiles:
    """Decodes the sound in the file `content` to the samples that the model takes, [1, 1, num_samples]. Raises
    InvalidArgument for a file that is no sound, and one beyond the bounds."""
    assert processor is not None  # only models that transcribe are asked
    samples = decoding.decode(content, processor.rate, AudioBounds(seconds=bounds.audio_file_s))
    return MediaTiles(TileLayout(1, 1, len(samples), is_sound=True), samples.astype("<f4").tobytes())


def decode_time(bounds: MediaBounds, modality: str) -> float:
    """Returns the seconds of processor time that an item may take."""
    return bounds.audio_file_decode_s if modality == SAMPLES else bounds.decode_s


def _features(
    content: bytes, options: Mapping[str, Any], bounds: MediaBounds, processor: AudioProcessor | None
) -> MediaTiles:
    """Decodes the sound in the file `content` and computes its features. Raises InvalidArgument for a file that is no
    sound, one beyond the bounds, and unknown options."""
    assert processor is not None  # the pipeline refuses sound otherwise
    seconds = min(bounds.audio_s, processor.max_samples / processor.rate)
    samples = decoding.decode(content, processor.rate, AudioBounds(seconds=seconds))
    layout = processor.sound_layout(min(len(samples), processor.max_samples), options)
    features = processor.features(samples[: processor.max_samples], layout)
    return MediaTiles(layout, features.astype(layout.dtype).tobytes())


def _tiles(content: bytes, how: dict[str, object], bounds: MediaBounds, processor: MediaProcessor | None) -> MediaTiles:
    """Decodes the file `content` and renders its tiles. `how`: the JSON line of a question. Raises InvalidArgument for
    a file that is no picture, one beyond the bounds, and unknown options."""
    assert processor is not None  # the pipeline refuses pictures otherwise
    picture = pictures.decode(content, bounds, Colours(str(how["mode"]), tuple(how["background"])))  # type: ignore[arg-type]
    layout = processor.layout(picture.height, picture.width, how["options"])  # type: ignore[arg-type]
    return MediaTiles(layout, processor.render(picture, layout).tobytes())


def question(content: bytes, options: MediaOptions, modality: str = IMAGE) -> bytes:
    """Returns the message that asks for the tiles of the item in the file `content`."""
    colours = {"mode": options.image_mode, "background": options.background}
    how = {"modality": modality, **colours, "options": dict(options.processor)}
    return json.dumps(how).encode() + END + content


SHORTER = "Send a shorter clip."
REMEDIES = {IMAGE: "Send a smaller picture.", AUDIO: SHORTER, SAMPLES: SHORTER}


def over_memory(bounds: MediaBounds, modality: str) -> str:
    """Returns the refusal of an item that exceeds `decode_bytes`."""
    limit = bounds.decode_bytes >> 20
    text = f"decoding it takes too much memory (limit: {limit} MiB)"
    return f"Failed to load {_kind(modality)}: {text}. {REMEDIES[modality]}"


def over_time(bounds: MediaBounds, modality: str) -> str:
    """Returns the refusal of an item that exceeds `decode_s`."""
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
