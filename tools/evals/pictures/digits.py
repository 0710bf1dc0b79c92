"""Reading handwritten digits from pictures."""

from tools.evals.pictures.scenes import sample_digit
from tools.evals.pictures.skills import picture_skill

SKILL = picture_skill("picture_digits", {"digit": (sample_digit,), "describe": (sample_digit,)})
