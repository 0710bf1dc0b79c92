"""Long lists of ids are extracted as packed numbers with the same values."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from quire.services.frontend.bounds.bodies import long_ids
from quire.services.frontend.bounds.bodies.heavy_work import HEAVY_BYTES
from tests.services.frontend.running import running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, scheduler

IDS = [number * 7919 % 400 for number in range(30_000)]


def body(ids: str) -> bytes:
    return f'{{"model": "tiny", "tokens" : [{ids}], "user": "\\"tokens\\": [1]"}}'.encode()


def test_a_list_is_taken_out_with_all_its_numbers() -> None:
    chance = random.Random(3)
    for _ in range(30):
        ids = [chance.randrange(10 ** chance.randint(1, 9)) for _ in range(6000)]
        written = "".join(f"{chance.choice(['', ' ', chr(10)])}{i}," for i in ids)[:-1] + chance.choice(["", " "])
        taken = long_ids.extract_ids(body(written))
        assert taken is not None
        assert list(long_ids.unpack_ids(taken.ids)) == ids
        assert json.loads(taken.body) == {**json.loads(body(written)), "tokens": []}


@pytest.mark.parametrize(
    "change", ["-1,", "1.5,", "1e3,", "007,", "1 2,", "null,", '"1",', ",", "[1],", "1234567890,", "NaN,", "1 ,"]
)
def test_what_is_not_plain_is_left_to_the_parser(change: str) -> None:
    many = "300," * 6000
    assert long_ids.extract_ids(body(f"{many}300")) is not None
    for written in (f"{change}{many}300", f"{many}{change}300", f"{many}{change}"):
        assert long_ids.extract_ids(body(written)) is None
    assert long_ids.extract_ids(body(many[:-1]) + b'{"tokens": []}') is None
    assert long_ids.extract_ids(body("1,2,3")) is None


async def test_answers_are_those_of_lists(folder: Path) -> None:
    script = ScriptedScheduler()
    async with scheduler(script), running(folder, script.address) as frontend:

        async def ask(ids: str) -> tuple[int, str]:
            reply = await frontend.http.post("/detokenize", content=f'{{"tokens": [{ids}]}}')
            return reply.status_code, reply.text

        written = ",".join(map(str, IDS))
        assert len(written) > HEAVY_BYTES
        status, text = await ask(written)
        assert (status, json.loads(text)) == (
            200,
            {"prompt": frontend.frontend.model.tokenizer.decode(IDS, skip_special_tokens=False)},
        )
        for wrong in ("-1", "1.5", "x", "4000000", "12345678901"):
            status, text = await ask(f"{wrong},{written}")
            assert status == 400, text
            assert "tokens" in text or "vocabulary" in text or "JSON" in text
        unknown_too = json.dumps({"tokens": [1, 2], "x": 1})  # an unknown field is ignored
        assert (await frontend.http.post("/detokenize", content=unknown_too)).status_code == 200
        inside = f'{{"messages": [{{"role": "user", "content": "x", "tokens": [{written}]}}]}}'
        told = (await frontend.http.post("/v1/chat/completions", content=inside)).text
        assert "an array" not in told
