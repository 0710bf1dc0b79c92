"""Held-back questions to quire-tiny as token ids, whose greedy answers are known and far from ties."""

from __future__ import annotations

from functools import cache

from quire import bundled
from tools.evals import held_back_items
from tools.training.chat import prompt
from tools.training.tokenizer import load_tokenizer

SKILLS = ("recall", "json", "counting", "echo", "tools", "story")


@cache
def questions(per_skill: int = 2, longest: int = 400) -> list[list[int]]:
    """Returns prompts of several skills with at most `longest` tokens."""
    tokenizer = load_tokenizer(bundled.FOLDER)
    found: list[list[int]] = []
    for skill in SKILLS:
        items = held_back_items(2, names=[skill])
        ids = [tokenizer.encode(prompt(i.messages, i.tools), add_special_tokens=False).ids for i in items]
        found += [tokens for tokens in ids if len(tokens) <= longest][:per_skill]
    return found
