"""Tests of other servers' samplers: refused where they would change the text, ignored where they are off."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from quire.services.frontend.input_processor.sampling.unsupported_fields import reject_unsupported
from quire.services.frontend.input_processor.sampling.unsupported_samplers import (
    IGNORED_SAMPLER_FIELDS,
    REPLACEMENTS,
    UNSUPPORTED_SAMPLERS,
)
from quire.shared.errors import Unimplemented
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.services.frontend.tool_model import tool_model_folder

MESSAGES = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/responses": {"input": "hi", "max_output_tokens": 3},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
}
# Defaults that llama.cpp's, text-generation-webui's, TabbyAPI's and KoboldCpp's clients send with every request.
DEFAULTS: list[dict[str, Any]] = [
    {
        "samplers": None, "typical_p": 1.0, "xtc_probability": 0.0, "xtc_threshold": 0.1, "dry_multiplier": 0.0,
        "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1, "dynatemp_range": 0.0,
        "dynatemp_exponent": 1.0, "repeat_last_n": -1, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1,
        "adaptive_target": -1.0, "lora": [],
    },
    {
        "typical_p": 1, "tfs": 1, "top_a": 0, "epsilon_cutoff": 0, "eta_cutoff": 0, "encoder_repetition_penalty": 1,
        "no_repeat_ngram_size": 0, "penalty_alpha": 0, "mirostat_mode": 0, "mirostat_tau": 5, "do_sample": True,
        "dynamic_temperature": False, "dynatemp_low": 1, "dynatemp_high": 1, "smoothing_factor": 0,
        "smoothing_curve": 1, "guidance_scale": 1, "negative_prompt": "", "temperature_last": False,
        "repetition_penalty_range": 1024 * 0, "sampler_priority": [], "ban_eos_token": False,
    },
    {"typical": 1, "tfs_z": 1.0, "repeat_penalty": 1.0, "grammar": "", "skew": 0, "token_healing": False},
]  # fmt: skip
ASKING: list[tuple[str, Any]] = [
    ("typical_p", 0.9), ("mirostat", 2), ("dry_multiplier", 0.8), ("xtc_probability", 0.5), ("tfs_z", 0.95),
    ("top_a", 0.2), ("do_sample", False), ("grammar", 'root ::= "a"'), ("repeat_penalty", 1.1), ("samplers", ["top_k"]),
    ("lora", [{"id": 0, "scale": 0.5}]), ("json_schema", {"type": "object"}), ("no_repeat_ngram_size", 3),
]  # fmt: skip


@pytest.fixture
async def frontend(tmp_path: Path) -> AsyncIterator[Running]:
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(tool_model_folder(tmp_path / "talking"), script.address) as frontend:
        yield frontend


@pytest.mark.parametrize("path", BODIES)
async def test_samplers_that_are_off_are_ignored(frontend: Running, path: str) -> None:
    for fields in DEFAULTS:
        answer = await frontend.http.post(path, json={**BODIES[path], **fields})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", BODIES)
async def test_a_sampler_that_would_change_the_text_is_refused_with_a_remedy(frontend: Running, path: str) -> None:
    for name, value in ASKING:
        answer = await frontend.http.post(path, json={**BODIES[path], name: value})
        assert answer.status_code == 400, (name, answer.text)
        assert f"{name} is not supported by this server yet; " in answer.text


async def test_ollamas_options_know_the_same_samplers(frontend: Running) -> None:
    body: dict[str, Any] = {"messages": MESSAGES, "stream": False}
    off = {"num_predict": 3, "mirostat": 0, "mirostat_tau": 5.0, "typical_p": 1.0, "xtc_probability": 0}
    answer = await frontend.http.post("/api/chat", json={**body, "options": off})
    assert answer.status_code == 200, answer.text
    answer = await frontend.http.post("/api/chat", json={**body, "options": {"xtc_probability": 0.5}})
    assert answer.status_code == 400
    assert "options.xtc_probability is not supported by this server yet; leave it out" in answer.text


def test_each_sampler_has_a_no_op_value() -> None:
    for name, neutral in UNSUPPORTED_SAMPLERS.items():
        assert None in neutral
        for value in neutral:
            reject_unsupported({name: value}, UNSUPPORTED_SAMPLERS)
        with pytest.raises(Unimplemented) as refused:
            reject_unsupported({name: "x" if name not in ("mirostat",) else 2}, UNSUPPORTED_SAMPLERS)
        assert refused.value.field == name
    assert set(REPLACEMENTS) <= set(UNSUPPORTED_SAMPLERS)
    assert not set(IGNORED_SAMPLER_FIELDS) & set(UNSUPPORTED_SAMPLERS)
