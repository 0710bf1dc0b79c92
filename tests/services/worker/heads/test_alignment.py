"""Settings of alignment heads, and the filters over their attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.whisper.generation_whisper import _median_filter

from quire.services.worker.heads.alignment import AlignmentSettings, median_filter, standardized
from quire.shared.errors import InvalidArgument


def settings(folder: Path, listed: Any = None, **config: Any) -> AlignmentSettings:
    (folder / "config.json").write_text(json.dumps({"model_type": "whisper", **config}))
    if listed is not None:
        (folder / "generation_config.json").write_text(json.dumps({"alignment_heads": listed}))
    return AlignmentSettings.of_folder(folder, 4, 6)


def test_listed_heads_are_taken_by_layer(tmp_path: Path) -> None:
    found = settings(tmp_path, [[3, 1], [1, 0], [3, 4]], median_filter_width=9)
    assert (dict(found.heads), found.median_width, found.num_heads) == ({1: (0,), 3: (1, 4)}, 9, 3)


def test_without_a_list_the_upper_half_of_the_layers_is_taken(tmp_path: Path) -> None:
    found = settings(tmp_path)
    assert (dict(found.heads), found.median_width) == ({2: (0, 1, 2, 3, 4, 5), 3: (0, 1, 2, 3, 4, 5)}, 7)
    assert settings(tmp_path, []).num_heads == 12


@pytest.mark.parametrize("listed", [[[4, 0]], [[0, 6]], [[-1, 0]], [[1]], [3], "all", [[1, 2, 3]], [[True, 0]]])
def test_others_are_refused_by_name(tmp_path: Path, listed: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"alignment_heads has .* and the model has 4 layers of 6 heads"):
        settings(tmp_path, listed)


@pytest.mark.parametrize("width", [0, 4, "7"])
def test_an_even_filter_is_refused(tmp_path: Path, width: Any) -> None:
    with pytest.raises(InvalidArgument, match="median_filter_width must be an odd number"):
        settings(tmp_path, median_filter_width=width)


@pytest.mark.parametrize(("num_rows", "width"), [(1, 7), (3, 7), (4, 7), (5, 7), (50, 7), (50, 1), (9, 3)])
def test_medians_are_those_of_transformers(num_rows: int, width: int) -> None:
    values = torch.randn(6, num_rows, generator=torch.Generator().manual_seed(num_rows))
    torch.testing.assert_close(median_filter(values, width), _median_filter(values[None], width)[0])


def test_a_single_token_has_finite_numbers() -> None:
    assert standardized(torch.rand(1, 5)).tolist() == [[0.0] * 5]
