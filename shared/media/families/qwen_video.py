"""Videos of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: two frames share their patches; the tokens of a pair carry its time, as
a position (Qwen2.5-VL) or as text before them (Qwen3-VL)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quire.shared.errors import InvalidArgument
from quire.shared.media.families.qwen_vl import CONFIG, EDGES, FIELD, AreaBounds, read_side, smart_resize
from quire.shared.media.options import check_names, read_count, read_flag
from quire.shared.media.picture_sizes import read_normalization, read_resampling
from quire.shared.media.processor import Normalization, PlaceholderExpansion, PromptTokenizer, TileLayout
from quire.shared.media.video_sampling import NAMES, FrameSampling, read_video_values, spread

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy.typing as npt
    from PIL import Image

    from quire.shared.media.video import Clip, VideoFacts

PAIR = 2  # frames that share their patches
MOST_TOKENS = 16_384  # of one video; frames are scaled down to it
CAP = "cap_pixels_per_frame"
SLACK = 1.05  # of the least area, below which a cap does not go
WANTED = FrameSampling(fps=2.0, min_frames=4)
SECONDS = 10  # parts of a second in the layout of a Qwen3-VL


class VideoTokens(NamedTuple):
    """Token ids that stand around and for the patches of a video."""

    placeholder: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class QwenVideoConfig:
    """Processing that all of these families have."""

    bounds: AreaBounds  # of each frame; Qwen3-VL: of all frames together
    sampling: FrameSampling
    tokens: VideoTokens
    normalization: Normalization
    side: int  # of a token, in pixels
    resampling: str
    is_capped: bool  # the area of a frame has a share of a total
    max_video_tokens: int  # from which that total is computed

    def checked(self, options: Mapping[str, Any]) -> QwenVideoConfig:
        """Returns the processing with the options of a request. Raises InvalidArgument for unknown options and wrong
        values."""
        check_names(options, "size", *EDGES.values(), *NAMES, CAP)
        return QwenVideoConfig(
            self.bounds.replaced(options, FIELD),
            self.sampling.replaced(options),
            self.tokens,
            self.normalization,
            self.side,
            self.resampling,
            read_flag(options, CAP, self.is_capped),
            self.max_video_tokens,
        )

    def grid(self, height: int, width: int, num_frames: int) -> tuple[int, int, int]:
        """Returns pairs of frames, and rows and columns of tokens of each. Raises InvalidArgument for more tokens than
        a video may have."""
        grid = -(-num_frames // PAIR), height // self.side, width // self.side
        if math.prod(grid) > MOST_TOKENS:
            raise InvalidArgument(
                f"a video has at most {MOST_TOKENS} tokens, and {num_frames} frames of {height} x {width} pixels give "
                f"{math.prod(grid)}; take fewer frames (media_io_kwargs.video.num_frames, fps)",
                field="messages",
            )
        return grid

    def most_area(self, num_frames: int) -> int:
        """Returns the largest area of each of `num_frames` frames whose tokens are at most MOST_TOKENS."""
        return MOST_TOKENS // -(-num_frames // PAIR) * self.side**2


class QwenVideoProcessor:
    """Videos of Qwen2-VL and Qwen2.5-VL. Layout numbers: pairs of frames, rows and columns of tokens, then the position
    in time of each pair."""

    around = None
    max_embeddings = MOST_TOKENS

    def __init__(self, config: QwenVideoConfig, tokens_per_second: float | None) -> None:
        """`tokens_per_second`: positions of a second of video; None: pairs are one position apart."""
        self._config, self._tokens_per_second = config, tokens_per_second
        self.placeholder, self.normalization = config.tokens.placeholder, config.normalization

    def sample(self, facts: VideoFacts, options: Mapping[str, Any]) -> tuple[int, ...]:
        """Returns an even number of frames at equal distances, from the first one on; one frame stays one."""
        sampling = self._config.checked(options).sampling
        wanted = sampling.num_wanted(facts)
        by_number = sampling.fps is None
        count = round(wanted / PAIR) * PAIR if by_number else math.floor(wanted / PAIR) * PAIR
        count = min(max(count, PAIR), facts.num_frames // PAIR * PAIR) or 1
        step = facts.num_frames / count
        return tuple(int(np.float32(index * step)) for index in range(count))

    def layout(self, clip: Clip, options: Mapping[str, Any]) -> TileLayout:
        """Returns one tile for each frame. Raises InvalidArgument for elongated frames, and too many tokens."""
        config, count = self._config.checked(options), len(clip.indices)
        least, most = config.bounds
        if config.is_capped:
            total = int(config.max_video_tokens * config.side**2 * 0.9)
            most = max(min(most, total * PAIR // count), int(least * SLACK))
        bounds = _fitting(AreaBounds(least, most), config.most_area(count))
        height, width = smart_resize(clip.facts.height, clip.facts.width, config.side, bounds)
        grid = config.grid(height, width, count)
        return TileLayout(count, height, width, (*grid, *self._times(clip, grid[0])))

    def _times(self, clip: Clip, num_pairs: int) -> list[int]:
        """Returns the position in time of each pair of frames, rounded down; in single precision, as transformers."""
        if self._tokens_per_second is None:
            return list(range(num_pairs))
        step = np.float32(self._tokens_per_second * PAIR / clip.fps)
        times: list[int] = (np.arange(num_pairs, dtype=np.float32) * step).astype(np.int64).tolist()
        return times

    def render(self, frame: Image.Image, layout: TileLayout) -> npt.NDArray[np.uint8]:
        """Returns the scaled frame, [height, width, 3]."""
        from quire.shared.media.rendering import resized

        return resized(frame, layout.height, layout.width, self._config.resampling)

    def expand(self, layout: TileLayout, tokenizer: PromptTokenizer) -> PlaceholderExpansion:
        """Returns the placeholder, once for each square of merged patches of each pair."""
        count = math.prod(layout.numbers[:3])
        return PlaceholderExpansion((self.placeholder,) * count, ((0, count),))


class Qwen3VideoProcessor:
    """Videos of Qwen3-VL: each pair of frames stands behind its time as text. Layout numbers: pairs of frames, rows and
    columns of tokens, then the time of each pair in tenths of a second."""

    max_embeddings = MOST_TOKENS

    def __init__(self, config: QwenVideoConfig) -> None:
        self._config = config
        self.placeholder, self.normalization = config.tokens.placeholder, config.normalization
        self.around = config.tokens.start, config.tokens.end

    def sample(self, facts: VideoFacts, options: Mapping[str, Any]) -> tuple[int, ...]:
        """Returns frames at equal distances, the first and the last one among them."""
        return spread(facts.num_frames, max(1, int(self._config.checked(options).sampling.num_wanted(facts))))

    def layout(self, clip: Clip, options: Mapping[str, Any]) -> TileLayout:
        """Returns one tile for each frame. Raises InvalidArgument for elongated frames, and too many tokens."""
        config, count = self._config.checked(options), len(clip.indices)
        least, most = config.bounds
        if config.is_capped:
            of_frame = min(config.max_video_tokens * config.side**2, most // count)
            most = max(of_frame, int(least * SLACK)) * count
        bounds = _fitting(AreaBounds(least, most), config.most_area(count) * count)
        height, width = _resize_together(clip, config.side, bounds)
        return TileLayout(count, height, width, (*config.grid(height, width, count), *_tenths(clip)))

    def render(self, frame: Image.Image, layout: TileLayout) -> npt.NDArray[np.uint8]:
        """Returns the scaled frame, [height, width, 3]."""
        from quire.shared.media.rendering import resized

        return resized(frame, layout.height, layout.width, self._config.resampling)

    def expand(self, layout: TileLayout, tokenizer: PromptTokenizer) -> PlaceholderExpansion:
        """Returns for each pair of frames its time as text, and its placeholders between the tokens that begin and end
        a picture."""
        _, rows, columns, *times = layout.numbers
        tokens: list[int] = []
        runs = []
        for time in times:
            tokens += [*tokenizer.encode(f"<{time / SECONDS:.1f} seconds>"), self._config.tokens.start]
            runs.append((len(tokens), rows * columns))
            tokens += [*(self.placeholder,) * (rows * columns), self._config.tokens.end]
        return PlaceholderExpansion(tuple(tokens), tuple(runs))


def _fitting(bounds: AreaBounds, most: int) -> AreaBounds:
    """Returns the bounds, lowered to the area `most`. Sides are rounded up to the lower bound, so that it is dropped
    where it is near `most`."""
    return AreaBounds(bounds.least if 2 * bounds.least <= most else 1, min(bounds.most, most))


def _resize_together(clip: Clip, side: int, bounds: AreaBounds) -> tuple[int, int]:
    """Returns the height and width of the frames of a clip; `bounds` hold for the area of all of them together. Raises
    InvalidArgument for frames that are too elongated."""
    height, width, count = clip.facts.height, clip.facts.width, max(len(clip.indices), PAIR)
    if min(height, width) < side:
        scale = max(side / height, side / width)
        height, width = int(height * scale), int(width * scale)
    rounded = smart_resize(height, width, side, AreaBounds(0, 1 << 62))
    area = round(count / PAIR) * PAIR * rounded[0] * rounded[1]
    if area > bounds.most:
        factor = math.sqrt(count * height * width / bounds.most)
        return max(side, int(height / factor / side) * side), max(side, int(width / factor / side) * side)
    if area < bounds.least:
        factor = math.sqrt(bounds.least / (count * height * width))
        return math.ceil(height * factor / side) * side, math.ceil(width * factor / side) * side
    return rounded


def _tenths(clip: Clip) -> list[int]:
    """Returns the time of each pair of frames, the mean of both, in tenths of a second, rounded as text shows it."""
    indices = [*clip.indices, *clip.indices[-1:] * (len(clip.indices) % PAIR)]
    seconds = [index / clip.facts.fps for index in indices]
    means = [(first + last) / PAIR for first, last in zip(seconds[::PAIR], seconds[1::PAIR], strict=True)]
    return [int(f"{mean:.1f}".replace(".", "")) for mean in means]


def make_qwen_video(folder: Path, config: Mapping[str, Any]) -> QwenVideoProcessor | Qwen3VideoProcessor:
    """Returns the processor of a model's videos. Raises InvalidArgument if its files do not fit together."""
    kind = str(config["model_type"])
    is_third = kind.startswith("qwen3")
    read = _read(folder, config, side=32 if is_third else 28, max_video_tokens=768 if is_third else 128_000)
    if is_third:
        return Qwen3VideoProcessor(read)
    return QwenVideoProcessor(read, _tokens_per_second(config) if kind == "qwen2_5_vl" else None)


def _read(folder: Path, config: Mapping[str, Any], *, side: int, max_video_tokens: int) -> QwenVideoConfig:
    """Reads the processing of videos. `side` and `max_video_tokens`: of transformers' class. Raises InvalidArgument for
    values that do not fit."""
    values, name = read_video_values(folder)
    vision = config["vision_config"]
    patch = read_side(values, "patch_size", side // 2, name), read_side(values, "merge_size", 2, name)
    wanted = read_side(vision, "patch_size", side // 2, CONFIG), read_side(vision, "spatial_merge_size", 2, CONFIG)
    pair = read_side(values, "temporal_patch_size", PAIR, name), read_side(vision, "temporal_patch_size", PAIR, CONFIG)
    if patch != wanted or pair != (PAIR, PAIR):
        raise InvalidArgument(
            f"{name}: patch_size, merge_size and temporal_patch_size are {(*patch, pair[0])}, and vision_config has "
            f"{(*wanted, pair[1])}. They must be equal, and temporal_patch_size {PAIR}.",
            field="model",
        )
    ids = VideoTokens(
        _token(config, "video_token_id", 151_656),
        _token(config, "vision_start_token_id", 151_652),
        _token(config, "vision_end_token_id", 151_653),
    )
    return QwenVideoConfig(
        AreaBounds(128 * side**2, 768 * side**2).replaced(values, name),
        WANTED.replaced(values, name),
        ids,
        read_normalization(values, name),
        patch[0] * patch[1],
        read_resampling(values, name),
        values.get(CAP) is True,
        read_count(values, "max_video_tokens", max_video_tokens, 1 << 31),
    )


def _tokens_per_second(config: Mapping[str, Any]) -> float:
    """Returns the positions of a second of video. Raises InvalidArgument for anything but a positive number."""
    value = config["vision_config"].get("tokens_per_second", 4)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise InvalidArgument(f"{CONFIG}.tokens_per_second is {value!r}; a number above 0 is needed", field="model")
    return float(value)


def _token(config: Mapping[str, Any], key: str, default: int) -> int:
    """Returns a token id of config.json. Raises InvalidArgument for anything else."""
    value = config.get(key, default)
    if not isinstance(value, int):
        raise InvalidArgument(f"config.json: {key} is {value!r}, not a token id", field="model")
    return value
