"""Videos of LLaVA-OneVision, InternVL 3 and SmolVLM: each frame is one tile of the vision tower's size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.shared.errors import InvalidArgument
from quire.shared.media.families.idefics3 import AROUND, WHOLE, make_idefics3, scaled_to_edge
from quire.shared.media.families.internvl import make_internvl
from quire.shared.media.families.llava_next import make_llava_onevision
from quire.shared.media.options import check_names
from quire.shared.media.picture_sizes import read_normalization, read_resampling
from quire.shared.media.processor import Normalization, PlaceholderExpansion, PromptTokenizer, TileLayout
from quire.shared.media.special_tokens import token_id
from quire.shared.media.video_sampling import MOST_FRAMES, NAMES, FrameSampling, read_video_values

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt
    from PIL import Image

    from quire.shared.media.video import Clip, VideoFacts

MOST_TOKENS = 16_384  # of one video; fewer frames are taken where they would have more
WANTED = FrameSampling(num_frames=32)  # where neither the model's file nor the request says more
VIDEO = "<video>"
HALF = (0.5, 0.5, 0.5)  # mean and standard deviation of SmolVLM
LANCZOS = 1
MINUTE, HOUR = 60, 3600
SMALL = {
    0: "zero", 1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight", 9: "nine",
    10: "ten", 11: "eleven", 12: "twelve", 13: "thirteen", 14: "fourteen", 15: "fifteen", 16: "sixteen",
    17: "seventeen", 18: "eighteen", 19: "nineteen",
}  # fmt: skip
TENS = {2: "twenty", 3: "thirty", 4: "forty", 5: "fifty", 6: "sixty", 7: "seventy", 8: "eighty", 9: "ninety"}
SKIPPED_S = 1  # at the beginning and the end of a SmolVLM's long video


@dataclass(frozen=True, slots=True)
class FrameFamily:
    """Parts of the processing that differ between the families."""

    choose: Callable[[VideoFacts, int, FrameSampling], tuple[int, ...]]  # of a number of frames: the frames to take
    numbers: Callable[[Clip], tuple[int, ...]]  # of the layout
    texts: Callable[[int, tuple[int, ...]], list[str]]  # of the frames' and the layout's numbers: before each frame
    end: str = ""  # text after each frame
    last: str = ""  # text after the last one
    extra_rows: int = 0  # after those of the frames


@dataclass(frozen=True, slots=True)
class FrameVideoProcessor:
    """Scales frames to the tower's size without regard to their aspect."""

    family: FrameFamily
    placeholder: int
    embedded: int  # token in the places of the rows
    normalization: Normalization
    side: int  # of a frame, in pixels
    frame_embeddings: int
    longest_edge: int  # to which frames are scaled first; 0: not
    resampling: str
    sampling: FrameSampling
    around: tuple[int, int] | None = None

    @property
    def most_frames(self) -> int:
        return max(1, min(MOST_FRAMES, MOST_TOKENS // self.frame_embeddings))

    @property
    def max_embeddings(self) -> int:
        return self.most_frames * self.frame_embeddings + self.family.extra_rows

    def sample(self, facts: VideoFacts, options: Mapping[str, Any]) -> tuple[int, ...]:
        """Returns frames at equal distances, as many as the family's rule and max_embeddings allow."""
        check_names(options, *NAMES)
        rule = self.sampling.replaced(options)
        rule = rule._replace(max_frames=min(rule.max_frames, self.most_frames))
        return self.family.choose(facts, max(1, int(rule.num_wanted(facts))), rule)

    def layout(self, clip: Clip, options: Mapping[str, Any]) -> TileLayout:
        """Returns one tile for each frame. Raises InvalidArgument for more frames than max_embeddings allows."""
        check_names(options, *NAMES)
        count = len(clip.indices)
        if count > self.most_frames:
            raise InvalidArgument(
                f"a video has at most {self.most_frames} frames of {self.frame_embeddings} tokens, got {count}; take "
                "fewer (media_io_kwargs.video.num_frames, fps)",
                field="messages",
            )
        return TileLayout(count, self.side, self.side, self.family.numbers(clip))

    def render(self, frame: Image.Image, layout: TileLayout) -> npt.NDArray[np.uint8]:
        """Returns the scaled frame, [side, side, 3]."""
        from quire.shared.media.rendering import resized
        from quire.shared.media.tiling import scaled

        if self.longest_edge:
            size = scaled_to_edge(frame.height, frame.width, self.longest_edge)
            frame = scaled(frame, *size, self.resampling)
        return resized(frame, self.side, self.side, self.resampling)

    def expand(self, layout: TileLayout, tokenizer: PromptTokenizer) -> PlaceholderExpansion:
        """Returns the text and the placeholders of each frame, in order."""
        family, tokens = self.family, list[int]()
        runs: list[tuple[int, int]] = []
        end = tokenizer.encode(family.end) if family.end else []
        for text in family.texts(layout.num_tiles, layout.numbers):
            tokens += tokenizer.encode(text) if text else []
            _add_run(runs, len(tokens), self.frame_embeddings)
            tokens += [self.embedded] * self.frame_embeddings + end
        if family.extra_rows:
            _add_run(runs, len(tokens), family.extra_rows)
            tokens += [self.embedded] * family.extra_rows
        tokens += tokenizer.encode(family.last) if family.last else []
        return PlaceholderExpansion(tuple(tokens), tuple(runs))


def _add_run(runs: list[tuple[int, int]], start: int, length: int) -> None:
    """Adds a run of rows; one that follows the last directly becomes part of it."""
    if runs and sum(runs[-1]) == start:
        start, length = runs[-1][0], runs.pop()[1] + length
    runs.append((start, length))


def _from_first(facts: VideoFacts, count: int, rule: FrameSampling) -> tuple[int, ...]:
    """Returns the first frame of each of `count` equal parts."""
    return tuple(index * facts.num_frames // count for index in range(count))


def _from_middle(facts: VideoFacts, count: int, rule: FrameSampling) -> tuple[int, ...]:
    """Returns the middle frame of each of `count` equal parts."""
    step = facts.num_frames / count
    return tuple(int(step / 2 + index * step) for index in range(count))


def _within_ends(facts: VideoFacts, count: int, rule: FrameSampling) -> tuple[int, ...]:
    """Returns frames from the first to the last one, each once; a video with more seconds than `rule` takes frames
    loses its first and last second."""
    import numpy as np

    seconds, first, last = facts.num_frames / facts.fps, 0, facts.num_frames - 1
    if rule.fps is not None:
        count = max(1, min(round(rule.fps * seconds), rule.max_frames, facts.num_frames))
        if seconds - 2 * SKIPPED_S > rule.max_frames * rule.fps:
            first = int(SKIPPED_S * facts.fps)
            last = min(int(facts.num_frames - SKIPPED_S * facts.fps), last)
    if first >= last:
        first, last = 0, facts.num_frames - 1
    return tuple(np.unique(np.linspace(first, last, count, dtype=int)).tolist())


def _no_texts(count: int, numbers: tuple[int, ...]) -> list[str]:
    return [""] * count


def _frame_texts(count: int, numbers: tuple[int, ...]) -> list[str]:
    """Returns the text before each frame of InternVL."""
    return [f"{chr(10) if number else ''}Frame{number + 1}: <img>" for number in range(count)]


def _times(clip: Clip) -> tuple[int, ...]:
    """Returns the length of the video, then the time of each frame, in whole seconds."""
    fps = clip.facts.fps
    return int(clip.facts.num_frames / fps), *(int(index / fps) for index in clip.indices)


def _timed_texts(count: int, numbers: tuple[int, ...]) -> list[str]:
    """Returns the text before each frame of SmolVLM: the first with what the video is."""
    length, *times = numbers
    duration = f"{length // HOUR}:{length // MINUTE % MINUTE:02d}:{length % MINUTE:02d}"
    intro = f"You are provided the following series of {in_words(count)} frames from a {duration} [H:MM:SS] video.\n"
    shown = [f"\nFrame from {time // MINUTE:02d}:{time % MINUTE:02d}:{AROUND}{WHOLE}" for time in times]
    return [intro + shown[0], *shown[1:]]


def in_words(number: int) -> str:
    """Returns a number from 0 to 999 in English words."""
    if number < len(SMALL):
        return SMALL[number]
    if number < 100:
        ones = f"-{SMALL[number % 10]}" if number % 10 else ""
        return TENS[number // 10] + ones
    rest = f" and {in_words(number % 100)}" if number % 100 else ""
    return f"{SMALL[number // 100]} hundred{rest}"


ONEVISION = FrameFamily(_from_first, lambda clip: (len(clip.indices),), _no_texts, extra_rows=1)
INTERNVL = FrameFamily(_from_middle, lambda clip: (), _frame_texts, end="</img>")
SMOLVLM = FrameFamily(_within_ends, _times, _timed_texts, end=AROUND, last="\n\n")


def make_onevision_video(folder: Path, config: Mapping[str, Any]) -> FrameVideoProcessor:
    """Returns the processor of the videos of a LLaVA-OneVision: patches of each frame are joined 2 x 2, and a newline
    row ends the video."""
    pictures = make_llava_onevision(folder, config)
    placeholder = int(config.get("video_token_index", config.get("video_token_id", 151_647)))
    values, name = read_video_values(folder)
    joined = -(-pictures.patches // 2)
    return FrameVideoProcessor(
        ONEVISION,
        placeholder,
        placeholder,
        read_normalization(values, name),
        _checked_side(values, name, pictures.side),
        joined**2,
        0,
        read_resampling(values, name),
        WANTED.replaced(values, name),
    )


def make_internvl_video(folder: Path, config: Mapping[str, Any]) -> FrameVideoProcessor | None:
    """Returns the processor of the videos of an InternVL 3; None if its tokenizer has no token for them."""
    pictures, placeholder = make_internvl(folder, config), token_id(folder, VIDEO, -1)
    if placeholder < 0:
        return None
    values, name = read_video_values(folder)
    return FrameVideoProcessor(
        INTERNVL,
        placeholder,
        pictures.placeholder,
        read_normalization(values, name),
        _checked_side(values, name, pictures.side),
        pictures.tile_embeddings,
        0,
        read_resampling(values, name),
        WANTED.replaced(values, name),
    )


def make_smolvlm_video(folder: Path, config: Mapping[str, Any]) -> FrameVideoProcessor | None:
    """Returns the processor of the videos of a SmolVLM; None if its tokenizer has no token for them."""
    pictures, placeholder = make_idefics3(folder, config), token_id(folder, VIDEO, -1)
    if placeholder < 0:
        return None
    values, name = read_video_values(folder)
    sampling = values.get("video_sampling") or {}
    size = sampling.get("video_size") or values.get("size") or {}
    rule = {"fps": sampling.get("fps", 1), "max_frames": sampling.get("max_frames", 64)}
    return FrameVideoProcessor(
        SMOLVLM,
        placeholder,
        pictures.placeholder,
        read_normalization(values, name, HALF, HALF),
        pictures.side,
        pictures.tile_embeddings,
        int(size.get("longest_edge") or pictures.longest_edge),
        read_resampling(values, name, LANCZOS),
        FrameSampling().replaced(rule, name),
    )


def _checked_side(values: Mapping[str, Any], name: str, side: int) -> int:
    """Returns the side of a frame. Raises InvalidArgument if the file scales frames to another size than the
    tower's."""
    size = values.get("size") or {}
    found = (size.get("height", side), size.get("width", side))
    if found != (side, side):
        text = f"{name}: frames have {found[0]} x {found[1]} pixels, and the vision tower {side}; they must be equal"
        raise InvalidArgument(text, field="model")
    return side
