"""What `quire-tiny` is trained to do, and how to tell whether an answer is right.

`held_back_items` gives questions that were never trained on, `check` judges the answers. Needs nothing but the standard
library, so that anything that can reach a model can score it.
"""

from __future__ import annotations

from tools.evals.item import Item, Skill, Split, Verdict
from tools.evals.registry import SKILLS, check, held_back_items, items, load

__all__ = ["SKILLS", "Item", "Skill", "Split", "Verdict", "check", "held_back_items", "items", "load"]
