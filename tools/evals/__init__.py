"""Skills that `quire-tiny` is trained on, with questions and checkers.

`held_back_items` gives questions that were never trained on, `check` judges the answers. Uses only the standard
library, so that any program that can reach a model can score it; skills with pictures need numpy and Pillow as well.
"""

from __future__ import annotations

from tools.evals.item import Item, Skill, Split, Verdict
from tools.evals.registry import SKILLS, check, held_back_items, items, load

__all__ = ["SKILLS", "Item", "Skill", "Split", "Verdict", "check", "held_back_items", "items", "load"]
