"""Each feature with encoder-decoder models of sound and text, in process: the answer to a request alone is the answer
in a crowd for which there are too few blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

import quire.kernels.cpu
from quire import LLMEngine, bundled
from quire.outputs import RequestOutput
from quire.requests import DictPrompt
from tests.e2e.sound.served import SPECIAL
from tests.matrix.checks import nothing
from tests.matrix.features import REQUESTS, params
from tests.matrix.requesting import assert_same
from tests.services.worker.media.sounds import make_whisper
from tests.services.worker.media.texts import save
from tests.shared.media.audio.files import noise

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        quire.kernels.cpu.unavailable() is not None, reason="plain torch rounds otherwise in other batches"
    ),
]

FEW_BLOCKS, BLOCK_SIZE, NUM_ROWS, RATE = 70, 8, 50, 16_000
# Those whose checks depend on what a trained model writes, or on which tokens a prompt has.
UNCHECKED = {"structural_tag", "thinking", "stops", "repetition", "prompt_logprobs", "named_prompt_logprobs", "cold"}
UNCHECKED |= {"json_schema", "regex", "special_tokens"}
MODELS = ("whisper", "t5", "bart")


def saved(name: str, folder: Path) -> None:
    """Saves a random model with the tokenizer of the bundled one."""
    folder.mkdir()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(bundled.FOLDER / "tokenizer.json"))
    if name == "whisper":
        tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
        sizes = {"num_mel_bins": 20, "max_source_positions": NUM_ROWS, "max_target_positions": 128}
        make_whisper(folder, vocab_size=len(tokenizer), **sizes)
        transformers.WhisperFeatureExtractor(feature_size=20, chunk_length=1).save_pretrained(folder)
    else:
        length = {"n_positions": 128} if name == "t5" else {"max_position_embeddings": 128}
        save(name, folder, vocab_size=len(tokenizer), **length)
    tokenizer.save_pretrained(folder)


def prompts_of(name: str) -> list[DictPrompt]:
    """Returns prompts of the decoder with two items of the encoder."""
    start, further = (3 if name == "whisper" else 0 if name == "t5" else 2), [*range(20, 45)]
    if name == "whisper":
        clips = [noise(7_000), noise(12_000, seed=1)]
        return [{"prompt_token_ids": [start, *further], "multi_modal_data": {"audio": (one, RATE)}} for one in clips]
    texts = [[*range(30, 60)], [*range(70, 80)]]
    return [{"encoder_prompt": one, "decoder_prompt": [start, *further]} for one in texts]


def answers_of(
    engine: LLMEngine, names: list[str], prompts: list[DictPrompt], **asked: Any
) -> dict[str, RequestOutput]:
    """Returns the answers to all features at once, each about one of the items."""
    for name in names:
        engine.add_request(name, prompts[sorted(REQUESTS).index(name) % len(prompts)], params(name), **asked)
    found: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step() if output.finished}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_crowd_changes_no_answer(tmp_path: Path, model: str) -> None:
    folder, sizes = tmp_path / model, {"dtype": "float32", "block_size": BLOCK_SIZE, "threads": 1, "max_num_seqs": 40}
    saved(model, folder)
    prompts = prompts_of(model)
    alone: dict[str, RequestOutput] = {}
    with LLMEngine(model=str(folder), num_blocks=400, **sizes) as engine:
        for name in REQUESTS:
            alone |= answers_of(engine, [name], prompts)
    with LLMEngine(model=str(folder), num_blocks=FEW_BLOCKS, max_num_batched_tokens=64, **sizes) as engine:
        crowded = answers_of(engine, [*REQUESTS], prompts)
    assert alone.keys() == crowded.keys() == REQUESTS.keys()
    for name, feature in REQUESTS.items():
        assert not alone[name].error, name
        assert_same(crowded[name], alone[name], name)
        check = nothing if name in UNCHECKED else feature.check
        for sample in alone[name].outputs:
            check(sample, alone[name], params(name))
