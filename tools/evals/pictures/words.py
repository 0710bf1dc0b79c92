"""Reading short printed words from pictures."""

from tools.evals.pictures.scenes import sample_word
from tools.evals.pictures.skills import picture_skill

SKILL = picture_skill("picture_words", {"word": (sample_word,), "describe": (sample_word,)})
