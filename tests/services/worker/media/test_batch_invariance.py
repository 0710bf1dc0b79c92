"""With --batch-invariant, rows of a picture do not depend on the pictures that are ordered with it."""

from __future__ import annotations

from typing import Any

from quire import LLMEngine, SamplingParams
from tests.pictures import shape

PROMPT = "<|im_start|>user\n<image>\nWhat is in the picture?<|im_end|>\n<|im_start|>assistant\n"
SAMPLING = SamplingParams(temperature=0, max_tokens=8, logprobs=1)
COLOURS = ("green", "red", "yellow")


def prompt(colour: str) -> dict[str, Any]:
    return {"prompt": PROMPT, "multi_modal_data": {"image": shape("circle", colour, 96)}}


def answers(*colours: str) -> list[Any]:
    """Returns the tokens of the answers and the bits of their log-probabilities, from a new engine."""
    with LLMEngine(batch_invariant=True, threads=1, num_blocks=200) as engine:
        outputs = engine.generate([prompt(colour) for colour in colours], SAMPLING)
    return [(found.outputs[0].token_ids, [one.top for one in found.outputs[0].logprobs]) for found in outputs]


def test_a_picture_among_others_gets_the_bits_that_it_gets_alone() -> None:
    alone = [answers(colour)[0] for colour in COLOURS]
    assert answers(*COLOURS) == alone
    assert len({repr(answer) for answer in alone}) == len(COLOURS), "each picture is seen"
