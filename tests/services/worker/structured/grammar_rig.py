"""Helpers for sequences under grammars, in a rig with the bundled model."""

from __future__ import annotations

import hashlib
import queue
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from quire.services.worker.structured.compile_pool import CompileResult
from quire.shared.pb.common.v1 import sampling_pb2 as pb
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

TINY = Path(__file__).parents[4] / "quire/tiny/model"
EOS = 0
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def prepare(rig: Rig, **constraint: Any) -> bytes:
    """Compiles a grammar and returns its id."""
    message = pb.StructuredOutput(**constraint)
    name = hashlib.sha256(message.SerializeToString(deterministic=True)).digest()
    outcomes: queue.SimpleQueue[CompileResult] = queue.SimpleQueue()
    rig.grammars.prepare(name, message, outcomes.put)
    outcome = outcomes.get()  # a library's subprocess may take minutes to start on a busy machine
    if outcome.error is not None:
        raise outcome.error
    return name


def hot(seed: int = 1, temperature: float = 1.0, **fields: Any) -> pb.SamplingParams:
    return pb.SamplingParams(temperature=temperature, seed=seed, max_tokens=200, **fields)


def admit(tokenizer: Tokenizer, slot: int, grammar_id: bytes, output: list[int] | None = None, **fields: Any) -> New:
    prompt = tokenizer.encode(f"Sequence {slot} says: ").ids
    sampling = fields.pop("sampling", None) or hot(slot)
    return New(
        slot,
        prompt + (output or []),
        num_prompt=len(prompt),
        sampling=sampling,
        eos=(EOS,),
        grammar_id=grammar_id,
        **fields,
    )


def step(rig: Rig, new: list[New] | None = None) -> dict[int, int]:
    """Runs a step that computes new prompts whole."""
    return rig.step(new=new, counts={sequence.slot: len(sequence.tokens) for sequence in new or []})


def run(rig: Rig, new: list[New], steps: int = 120) -> dict[int, list[int]]:
    """Returns the tokens of each slot up to its end of sequence."""
    said: dict[int, list[int]] = {sequence.slot: [] for sequence in new}
    arriving = new
    for _ in range(steps):
        for slot, token in step(rig, arriving).items():
            if slot in said and EOS not in said[slot]:
                said[slot].append(token)
        assert not rig.last_result.failures
        arriving = []
        if all(EOS in tokens for tokens in said.values()):
            break
    return said


def text(tokenizer: Tokenizer, tokens: list[int]) -> str:
    assert tokens[-1] == EOS
    return tokenizer.decode(tokens[:-1])
