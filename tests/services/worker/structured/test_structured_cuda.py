"""Constrained sequences on a GPU, whose stream waits for masks that the host has not built yet."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from quire.services.worker.codec.step_codec import decode_plan, encode_result
from quire.services.worker.replica.flight import StepInFlight
from quire.services.worker.structured import mask_builder
from quire.services.worker.structured.stream_gate import StreamGate
from quire.shared.errors import Internal
from tests.services.worker.replica_internals import filler_of
from tests.services.worker.rig import Rig
from tests.services.worker.structured.grammar_rig import EOS, PERSON, TINY, admit, hot, prepare, run, text

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("asked", [{}, {"top_p": 0.9}, {"min_tokens": 2}])
def test_two_steps_in_flight_on_a_gpu(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, graphs: bool, late: bool, asked: dict[str, float]
) -> None:
    """Launches a step before the previous one is awaited, whose tokens its masks need."""
    rig = on_gpu(graphs)
    forms = [prepare(rig, json_schema=json.dumps({**PERSON, "title": str(i)})) for i in range(6)]
    new = [admit(tokenizer, slot, form, sampling=hot(slot, **asked)) for slot, form in enumerate(forms)]
    new += [admit(tokenizer, slot, b"") for slot in (6, 7)]
    said: dict[int, list[int]] = {sequence.slot: [] for sequence in new}
    under_way: deque[StepInFlight] = deque()
    if late:
        filler = filler_of(rig.replica)
        fill = filler.fill

        def slowly(*arguments: Any) -> None:
            time.sleep(0.02)
            fill(*arguments)

        monkeypatch.setattr(filler, "fill", slowly)

    def land() -> None:
        flight = under_way.popleft()
        outcome = flight.launch.wait()
        rig.replica.record(flight, outcome)
        result = encode_result(flight.result(outcome, wait_us=0))
        assert not [failure for failure in result.failures if EOS not in said[failure.slot]]
        for slot, token in rig.scheduler.take(result).items():
            if EOS not in said[slot]:
                said[slot].append(token)

    with torch.inference_mode():
        for number in range(80):
            counts = {sequence.slot: len(sequence.tokens) for sequence in new} if number == 0 else None
            under_way.append(rig.replica.launch(decode_plan(rig.scheduler.plan(new if number == 0 else None, counts))))
            if len(under_way) == 2:
                land()
        land()
    for slot in range(6):
        assert json.loads(text(tokenizer, said[slot])).keys() == {"name", "age"}


def test_hanging_masks_time_out_on_a_gpu(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_builder, "MAX_WAIT_S", 0.5)
    rig = on_gpu(graphs=True)
    digits = prepare(rig, regex=r"\d{3}")
    hanging = threading.Event()
    monkeypatch.setattr(filler_of(rig.replica), "fill", lambda *_: hanging.wait(20))
    new = [admit(tokenizer, 0, digits)]
    with torch.inference_mode():
        flight = rig.replica.launch(decode_plan(rig.scheduler.plan(new, {0: len(new[0].tokens)})))
        with pytest.raises(Internal, match="grammar masks were not built within"):
            flight.launch.wait()
        torch.cuda.synchronize()
    rig.end_epoch()
    said = run(rig, [admit(tokenizer, 1, digits)])
    assert tokenizer.decode(said[1][:-1]).isdigit()
    hanging.set()


def test_a_gate_opened_by_several_threads_stays_open() -> None:
    gate = StreamGate()
    target, source = torch.zeros(3, device="cuda"), torch.ones(3).pin_memory()
    torch.cuda.synchronize()  # the gate's stream copies concurrently to the stream that zeroes the target
    gate.advance_to(1)
    gate.open_permanently()
    gate.open_permanently()
    gate.advance_to(2)
    gate.copy_after(7, target, source)
    assert target.tolist() == [1, 1, 1]


def on_gpu(graphs: bool) -> Rig:
    return Rig(
        TINY,
        device="cuda",
        dtype="bfloat16",
        cuda_graphs=graphs,
        attention_backend="auto",
        block_size=16,
        num_blocks=512,
        record_logits=False,
    )
