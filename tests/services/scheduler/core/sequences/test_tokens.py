"""The tokens of a sequence read the same with and without a slot."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire.services.scheduler.core.running.running import TokenRows
from quire.services.scheduler.core.sequences.tokens import SequenceTokens
from quire.shared.columns import i32_bytes

BLOCK = 4


@pytest.mark.parametrize("seed", range(10))
def test_tokens_match_a_list_through_random_operations(seed: int) -> None:
    rng = random.Random(seed)
    rows = TokenRows(3, BLOCK)
    prompts = [[rng.randrange(99) for _ in range(rng.randrange(20))] for _ in range(3)]
    held = [SequenceTokens(i32_bytes(prompt)) for prompt in prompts]
    slots: dict[int, int] = {}
    for _ in range(300):
        number = rng.randrange(3)
        if number in slots and rng.random() < 0.2:
            held[number].unbind()
            del slots[number]
        elif number not in slots and rng.random() < 0.5:
            slots[number] = slot = rng.choice(sorted({0, 1, 2} - set(slots.values())))
            assert rows.admit(slot, held[number]) == len(prompts[number])
        elif number not in slots:
            prompts[number].append(rng.randrange(99))
            held[number].append(prompts[number][-1])
        else:
            prompts[number].append(rng.randrange(99))
            filled, content = rows.append(np.array([slots[number]]), np.array(prompts[number][-1:], dtype=np.int32))
            assert filled == ([slots[number]] if len(prompts[number]) % BLOCK == 0 else [])
            assert content == (i32_bytes(prompts[number][-BLOCK:]) if filled else b"")
            held[number].kept += content
        begin = rng.randrange(len(prompts[number]) + 1)
        end = rng.randrange(begin, len(prompts[number]) + 1)
        assert held[number].column(begin, end) == i32_bytes(prompts[number][begin:end])
        assert [tokens.ids() for tokens in held] == prompts
        assert list(map(len, held)) == list(map(len, prompts))


def test_a_beam_copies_another_one_of_the_same_length() -> None:
    rows = TokenRows(2, BLOCK)
    parent, child = SequenceTokens(i32_bytes([1, 2, 3, 4, 5])), SequenceTokens(i32_bytes([1, 2, 3, 4, 6]))
    for slot, tokens in enumerate((parent, child)):
        rows.admit(slot, tokens)
    child.copy_from(parent)
    rows.append(np.array([1]), np.array([9], dtype=np.int32))
    assert (parent.ids(), child.ids()) == ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 9])
