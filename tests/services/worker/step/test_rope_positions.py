"""Positions of pictures and of the text around them are those of transformers' get_rope_index."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from quire.services.worker.layers.attention.rotary import column_axes, cos_sin_table, rows_by_axes
from quire.services.worker.models.config.rope_config import RopeConfig
from quire.services.worker.step.media_items import MediaItem
from quire.services.worker.step.rope_positions import RopePositions, axes_of
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.errors import InvalidArgument


def item(offset: int, length: int, layout: tuple[int, ...]) -> MediaItem:
    return MediaItem(bytes(32), offset, length, length, layout=layout)


def picture(offset: int, rows: int, columns: int) -> MediaItem:
    return item(offset, rows * columns, (1, rows, columns))


SEQUENCES = {
    "one": (30, [picture(4, 3, 5)]),
    "at the start": (16, [picture(0, 4, 2)]),
    "at the end": (12, [picture(6, 2, 3)]),
    "several, with text between": (60, [picture(3, 2, 6), picture(17, 5, 1), picture(30, 4, 4)]),
    "of one token": (9, [picture(2, 1, 1), picture(5, 1, 2)]),
}


def step(slots: list[int], starts: list[int], counts: list[int]) -> StepInputs:
    """Returns a step's rows; only slots and positions matter here."""
    query_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    parts = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
    positions, none = np.concatenate(parts).astype(np.int32), np.zeros(0, np.int32)
    return StepInputs(
        slots=np.array(slots, dtype=np.intp), token_ids=np.zeros_like(positions), positions=positions,
        slot_mapping=positions, query_start=query_start, seq_lens=np.add(starts, counts).astype(np.int32), num_blocks=1,
        prev_sampled_tokens=none, prev_sampled_slots=np.zeros(0, np.intp), sampling_slots=np.zeros(0, np.intp),
        sampling_tokens=none, sample_positions=none, rows_changed=False,
    )  # fmt: skip


def of_transformers(length: int, items: list[MediaItem]) -> tuple[np.ndarray, int]:
    kinds, grids = torch.zeros(1, length, dtype=torch.int32), []
    for one in items:
        kinds[0, one.offset : one.end] = 1
        grids.append([1, 2 * one.layout[1], 2 * one.layout[2]])
    with torch.device("meta"):
        vision = {"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 1}
        text = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
        model = transformers.Qwen2VLModel(transformers.Qwen2VLConfig(vision_config=vision, text_config=text))
    axes, delta = model.get_rope_index(torch.zeros(1, length, dtype=torch.long), kinds, torch.tensor(grids))
    return axes[:, 0].numpy(), int(delta)


@pytest.mark.parametrize("name", SEQUENCES)
def test_positions_of_whole_prompts(name: str) -> None:
    length, items = SEQUENCES[name]
    expected, delta = of_transformers(length, items)
    axes, shift = axes_of(items)
    np.testing.assert_array_equal(axes, expected[:, : axes.shape[1]])
    assert shift == delta
    positions = RopePositions(4)
    positions.admit(2, items)
    found = positions.in_step(step([2], [0], [length]))
    assert found.rope_positions is not None
    rows = np.tile(found.rope_positions, (3, 1)) if found.rope_axes is None else found.rope_axes
    np.testing.assert_array_equal(rows, expected)


def test_any_chunks_give_the_positions_of_the_whole() -> None:
    length, items = SEQUENCES["several, with text between"]
    expected, delta = of_transformers(length, items)
    positions = RopePositions(4)
    positions.admit(1, items)
    for size in (1, 4, 7, 25):
        for start in range(0, length, size):
            count = min(size, length - start)
            found = positions.in_step(step([0, 1, 3], [5, start, 0], [1, count, 2]))
            assert found.rope_positions is not None
            assert found.rope_positions[0] == 5
            assert found.rope_positions[-2:].tolist() == [0, 1]
            rows = np.tile(found.rope_positions, (3, 1)) if found.rope_axes is None else found.rope_axes
            np.testing.assert_array_equal(rows[:, 1 : 1 + count], expected[:, start : start + count])
    decoded = positions.in_step(step([0, 1], [5, length + 3], [1, 1]))
    assert decoded.rope_axes is None
    assert decoded.rotated_positions.tolist() == [5, length + 3 + delta]


def test_steps_without_pictures_are_left_as_they_are() -> None:
    positions, inputs = RopePositions(4), step([0, 2], [0, 9], [4, 1])
    assert positions.in_step(inputs) is inputs
    positions.admit(1, [picture(0, 2, 2)])
    assert positions.in_step(inputs) is inputs
    positions.admit(2, [picture(0, 2, 2)])
    assert positions.in_step(inputs) is not inputs
    positions.release(2)
    assert positions.in_step(inputs) is inputs
    assert inputs.rotated_positions is inputs.positions


@pytest.mark.parametrize(
    "items",
    [
        [item(2, 6, (1, 2, 2))],
        [item(2, 4, ())],
        [picture(2, 2, 2), picture(5, 1, 1)],
    ],
)
def test_items_that_do_not_fit_are_refused(items: list[MediaItem]) -> None:
    with pytest.raises(InvalidArgument, match="media: an item of"):
        RopePositions(4).admit(0, items)


@pytest.mark.parametrize("alternate", [False, True])
@pytest.mark.parametrize("sections", [(2, 3, 3), (4, 2, 2), (1, 1, 6)])
def test_angles_are_those_of_transformers(sections: tuple[int, int, int], alternate: bool) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}
    config = transformers.Qwen3VLTextConfig(head_dim=16, num_attention_heads=2, hidden_size=32, rope_parameters=rope)
    kind = (
        transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLTextRotaryEmbedding
        if alternate
        else transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VLRotaryEmbedding
    )
    axes, _ = axes_of([picture(3, 4, 5), picture(25, 2, 7)])
    cos, sin = kind(config)(torch.zeros(1), torch.from_numpy(axes)[:, None].long())
    ours = RopeConfig(1e4, sections=sections, sections_alternate=alternate)
    of_columns = column_axes(ours, 16)
    assert of_columns is not None
    rows = rows_by_axes(cos_sin_table(ours, 16, 64), torch.from_numpy(axes), of_columns)
    torch.testing.assert_close(rows, torch.cat((cos[0, :, :8], sin[0, :, :8]), 1), rtol=0, atol=1e-5)
    text = torch.arange(9, dtype=torch.int32).expand(3, 9)
    plain = cos_sin_table(ours, 16, 64)
    torch.testing.assert_close(rows_by_axes(plain, text, of_columns), plain[:9], rtol=0, atol=0)
    assert replace(ours, sections=()).sections == ()
