"""vLLM's flags at `quire up`: accepted, refused with advice, or corrected."""

from __future__ import annotations

import argparse
from functools import cache
from pathlib import Path

import pytest

from quire.cli import up
from quire.cli.main import _parse
from quire.flags import cluster_flags
from quire.flags.parser import CommandParser
from quire.flags.vllm_accepted_flags import ACCEPTED_VALUES, IGNORED_FLAGS, SHORT, SYNONYMS
from quire.flags.vllm_flag_table import REFUSED
from quire.flags.vllm_flags import SWITCHES
from quire.shared.errors import InvalidArgument
from quire.shared.settings import SERVICES

# Of `vllm serve` 0.33, long and short, and some of older versions that scripts still have.
OF_VLLM = (Path(__file__).parent / "vllm_flags.txt").read_text().split()


@cache
def parser() -> CommandParser:
    made = CommandParser()
    up.configure(made)
    return made


def parsed(*words: str) -> argparse.Namespace:
    return _parse(["serve", "folder", *words])


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        _parse(["serve", *words])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    return said


@pytest.mark.parametrize("flag", OF_VLLM)
def test_no_flag_of_vllm_is_unrecognized(flag: str) -> None:
    assert flag in parser()._option_string_actions


@pytest.mark.parametrize("flag", REFUSED)
def test_what_is_refused_says_what_to_do(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "folder", flag, "1")
    assert f"{flag} is a flag of vLLM that Quire does not have; " in said
    assert said.partition("(`")[0].strip().endswith(REFUSED[flag])


@pytest.mark.parametrize("flag", REFUSED)
def test_flags_that_a_refusal_names_are_there(flag: str) -> None:
    """Flags named in advice exist in the parser of `quire up`."""
    known = parser()._option_string_actions
    for word in REFUSED[flag].replace(",", " ").replace(";", " ").replace("(", " ").replace(")", " ").split():
        name = word.strip("`':")
        if name.startswith("--"):
            assert name in known, (flag, name)


@pytest.mark.parametrize("flag", sorted(IGNORED_FLAGS))
def test_switches_that_ask_for_what_is_so_are_taken(flag: str) -> None:
    assert parsed(flag, "--http-port", "1").model == "folder"
    assert parsed("--http-port", "1", flag).http_port == 1


@pytest.mark.parametrize("flag", ACCEPTED_VALUES)
def test_values_that_ask_for_what_is_so_are_taken(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    fine, instead = ACCEPTED_VALUES[flag]
    assert bool(fine) == bool(instead)
    for value in fine or ("anything",):
        assert parsed(flag, value).model == "folder"
    if instead:
        assert f"{instead} (`" in refusal(capsys, flag, "another")


def test_tables_say_one_thing_of_a_flag_and_nothing_of_those_that_are_there() -> None:
    tables = [set(REFUSED), set(IGNORED_FLAGS), set(ACCEPTED_VALUES), set(SHORT), set(SYNONYMS)]
    assert sum(map(len, tables)) == len(set().union(*tables))
    own = {f"--{name.replace('_', '-')}" for model in SERVICES.values() for name in model.model_fields}
    assert not own & set().union(*tables)
    assert set(SHORT.values()) <= set(REFUSED)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (("-tp", "2"), "worker.tensor_parallel_size", 2),
        (("-pp", "2"), "worker.pipeline_parallel_size", 2),
        (("-dp", "3"), "workers", 3),
        (("-q", "awq"), "worker.quantization", "awq"),
        (("--num-gpu-blocks-override", "512"), "worker.num_blocks", 512),
        (("--load-format", "safetensors"), "worker.load_format", "safetensors"),
        (("--dtype", "half"), "worker.dtype", "half"),
        (("--no-trust-remote-code", "-tp", "1"), "worker.tensor_parallel_size", 1),
    ],
)
def test_other_names_of_what_is_there_are_taken(words: tuple[str, ...], name: str, value: object) -> None:
    assert vars(parsed(*words))[name] == value


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tensor-paralel-size", "2"), "--tensor-paralel-size; did you mean --tensor-parallel-size?"),
        (("--max_model_len", "4096"), "--max_model_len; did you mean --max-model-len?"),
        (("--gpu_memory_utilization=0.9",), "did you mean --gpu-memory-utilization?"),
        (("--max-model-length", "4096"), "did you mean --max-model-len?"),
        (("--compilation-config.mode", "3"), "--compilation-config is a flag of vLLM that Quire does not have; "),
        (("-cc.mode=3",), "-cc is a flag of vLLM that Quire does not have; torch.compile is not used"),
        (("-O3",), "-O is a flag of vLLM that Quire does not have; torch.compile is not used"),
        (("--hf_overrides", "{}"), "--hf-overrides is a flag of vLLM that Quire does not have; "),
        (("--enforce-eagr",), "did you mean --enforce-eager?"),
        (("--disable-log-request",), "did you mean --disable-log-requests?"),
        (("--no-such-thing-anywhere",), "unrecognized argument: --no-such-thing-anywhere ("),
        (("folder", "another"), "unexpected argument: another"),
        (("--load-format", "tensorizer"), "invalid choice: 'tensorizer'"),
        (("--override-generation-config", '{"temperature": 0.6}'), "generation_config.json"),
        (("--rope-scaling", '{"rope_type":"yarn","factor":4.0}'), "change config.json"),
        (("--limit-mm-per-prompt", '{"image": {"count": 4}}'), "is neither a number nor a text"),
        (("--enable-mm-embeds",), "embeddings of media are not supported"),
        (("--mm-encoder-tp-mode", "data"), "runs in the workers"),
        (("--distributed-executor-backend", "ray"), "Ray is not used"),
        (
            ("--reasoning-config", '{"reasoning_start_str": "<think>"}'),
            "bounds its reasoning with thinking_token_budget",
        ),  # vllm#42399
        (
            ("--cc", '{"mode": "3"}'),
            "--cc is a flag of vLLM that Quire does not have; torch.compile is not used",
        ),  # vllm#32755
        (("--max_num_batched_tokens", "4096", "--swap_space", "16"), "did you mean --max-num-batched-tokens?"),
        (
            ("--swap_space", "16"),
            "--swap-space is a flag of vLLM that Quire does not have; use --kv-offloading-size GIB",
        ),  # vllm#37133
        (("folder", "--dtype auto"), "unrecognized argument: --dtype auto; did you mean --dtype?"),  # vllm#22072
    ],
)
def test_what_is_nearly_right_is_one_line(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refusal(capsys, *words)


def test_every_switch_that_is_refused_may_be_switched_off() -> None:
    for flag in REFUSED:
        if flag.startswith(SWITCHES):
            assert parsed(f"--no-{flag[2:]}").model == "folder"


def test_a_model_may_stand_behind_its_served_name_or_its_flag() -> None:
    for words in (
        ["folder", "--served-model-name", "a"],
        ["--served-model-name", "a", "folder"],
        ["--model", "folder", "--served-model-name", "a"],
    ):
        options = cluster_flags.options(_parse(["serve", *words]))
        assert (options.model, options.served_model_name) == ("folder", "a")


@pytest.mark.parametrize(
    "words",
    [
        ["folder", "--served-model-name", "a", "b"],
        ["--model", "folder", "--served-model-name", "a", "b"],
        ["--served-model-name", "a", "b", "folder"],
    ],
)
def test_further_served_names_are_names_of_the_same_model(words: list[str]) -> None:
    options = cluster_flags.options(_parse(["serve", *words]))
    assert (options.model, options.served_model_name) == ("folder", "a")
    assert options.settings["frontend"]["served_model_aliases"] == ("b",)


def test_two_models_are_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="model: a cluster serves one model, got 'one' and 'other'"):
        cluster_flags.options(_parse(["serve", "one", "--model", "other"]))


@pytest.mark.parametrize(
    "words",
    [
        # vllm#37133
        "--trust-remote-code --port 9527 --gpu-memory-utilization 0.9 --enable-prefix-caching --enable-chunked-prefill",
        # vllm-project/recipes PR 657
        "--kv-cache-dtype fp8 --max-num-batched-tokens 8192 --enable-chunked-prefill --async-scheduling",
        # vllm#39734
        "--load-format fastsafetensors --tool-call-parser gemma4 --enable-auto-tool-choice --reasoning-parser gemma4",
    ],
)
def test_command_lines_of_the_field_are_taken_or_end_at_code_of_others(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--trust-remote-code" in words:
        assert "code from a checkpoint is never executed" in refusal(capsys, "folder", *words.split())
        words = words.replace("--trust-remote-code", "")
    assert parsed(*words.split()).model == "folder"
