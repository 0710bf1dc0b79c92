"""Naming drawn shapes: their colour, kind, number and place."""

from tools.evals.pictures.scenes import sample_alike, sample_different, sample_single
from tools.evals.pictures.skills import picture_skill

ANY = (sample_single, sample_alike, sample_different)
SKILL = picture_skill(
    "picture_shapes",
    {
        "colour": ANY,
        "kind": ANY,
        "count": ANY,
        "position": (sample_single, sample_different),
        "presence": ANY,
        "describe": ANY,
    },
)
