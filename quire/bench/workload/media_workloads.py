"""Workloads of models that take pictures or sound: random noise, new in each run unless said."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from quire.bench.workload.noise import NoiseMedia
from quire.bench.workload.picture_shapes import IMAGE_PAD, VISION_END, VISION_START
from quire.bench.workload.sound_shapes import TRANSCRIBE
from quire.bench.workload.workloads import LARGEST_ID, BenchRequest, Workload

HD = (1280, 720)  # pixels
SMALL = (448, 448)


def pictures() -> Workload:
    """64 requests with one picture of 1280 x 720 and 128 tokens of text each."""
    return Workload("pictures", _with_pictures(64, num_output=64), is_new=True)


def pictures_again() -> Workload:
    """The requests of `pictures`, with the same pictures in each run."""
    return replace(pictures(), name="pictures_again", is_new=False)


def pictures8() -> Workload:
    """16 requests with eight pictures of 448 x 448 each."""
    return Workload("pictures8", _with_pictures(16, count=8, size=SMALL, num_output=32), is_new=True)


def picture_first() -> Workload:
    """One request with a picture for one token: the time to the first token."""
    return Workload("picture_first", _with_pictures(1, num_output=1), load="1", is_new=True)


def picture_single() -> Workload:
    """One request with a picture for 64 tokens."""
    return Workload("picture_single", _with_pictures(1, num_output=64), load="1", is_new=True)


def clips() -> Workload:
    """64 clips of 30 seconds for an encoder-decoder model of speech."""
    return Workload("clips", _with_clips(64, num_output=64), is_new=True)


def clips_again() -> Workload:
    """The clips of `clips`, the same in each run."""
    return replace(clips(), name="clips_again", is_new=False)


def clip_first() -> Workload:
    """One clip for one token."""
    return Workload("clip_first", _with_clips(1, num_output=1), load="1", is_new=True)


def clip_single() -> Workload:
    """One clip for 64 tokens."""
    return Workload("clip_single", _with_clips(1, num_output=64), load="1", is_new=True)


PICTURES: dict[str, Callable[[], Workload]] = {
    make.__name__: make for make in (pictures, pictures_again, pictures8, picture_first, picture_single)
}
CLIPS: dict[str, Callable[[], Workload]] = {
    make.__name__: make for make in (clips, clips_again, clip_first, clip_single)
}


def _with_pictures(
    requests: int, *, count: int = 1, size: tuple[int, int] = HD, num_output: int
) -> tuple[BenchRequest, ...]:
    """Builds requests whose `count` pictures come before 128 tokens of text."""
    head = (VISION_START, IMAGE_PAD, VISION_END) * count
    return tuple(
        BenchRequest(head + _text(seed), num_output, media=NoiseMedia(seed, count, *size)) for seed in range(requests)
    )


def _text(seed: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randint(0, LARGEST_ID) for _ in range(128))


def _with_clips(requests: int, *, num_output: int) -> tuple[BenchRequest, ...]:
    return tuple(BenchRequest(TRANSCRIBE, num_output, media=NoiseMedia(seed, clip_s=30)) for seed in range(requests))
