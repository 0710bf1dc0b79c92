"""`quire up --config FILE`: flags from YAML in addition to the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from quire.cli.main import _parse, main
from quire.cluster import ClusterOptions
from quire.flags import cluster_flags

Options = Callable[..., ClusterOptions]


@pytest.fixture
def config(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "quire.yaml"
        path.write_text(text)
        return str(path)

    return write


def options(*words: str) -> ClusterOptions:
    return cluster_flags.options(_parse(["up", *words]))


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        _parse(["up", *words])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1, told
    return told


def test_a_setting_that_services_agree_on_is_set_for_all_of_them() -> None:
    settings = options("--language-model-only").settings
    assert {service for service, values in settings.items() if values.get("language_model_only")} == {
        "frontend",
        "worker",
    }


def test_keys_are_flags_with_dashes_or_underscores(config: Callable[[str], str]) -> None:
    path = config("host: 0.0.0.0\nport: 6379\nmax-num-seqs: 32\nmax_model_len: 4k\ngpu-memory-utilization: 0.5\n")
    found = options("--config", path)
    assert (found.host, found.http_port) == ("0.0.0.0", 6379)
    assert found.settings["worker"] == {"max_num_seqs": 32, "max_model_len": 4000, "gpu_memory_utilization": 0.5}


@pytest.mark.parametrize("first", [True, False])
def test_the_command_line_wins_wherever_the_file_is_named(config: Callable[[str], str], first: bool) -> None:
    """vllm#8947: the order of arguments mattered."""
    named = ["--config", config("max-num-seqs: 32\nport: 1\nlora: {a: /a, b: /b}\n")]
    flags = ["--max-num-seqs", "8", "--lora=c=/c"]
    found = options(*(named + flags if first else flags + named))
    assert found.settings["worker"] == {"max_num_seqs": 8, "lora": {"c": "/c"}}
    assert found.http_port == 1


def test_the_file_may_be_named_in_one_word(config: Callable[[str], str]) -> None:
    """vllm#43252: --config=FILE was taken and not read."""
    assert options(f"--config={config('port: 7')}").http_port == 7


def test_false_switches_off_what_is_on(config: Callable[[str], str]) -> None:
    """vllm#51401: false was dropped."""
    found = options("--config", config("enable-prefix-caching: false\ncuda-graphs: off\nbatch-invariant: true\n"))
    assert found.settings["scheduler"] == {"enable_prefix_caching": False}
    assert found.settings["worker"] == {"cuda_graphs": False, "batch_invariant": True}
    found = options("--config", config("no-cuda-graphs: true\n"))
    assert found.settings["worker"] == {"cuda_graphs": False}


def test_the_model_may_stand_in_the_file_alone(config: Callable[[str], str]) -> None:
    """vllm#14819, and vllm#15798: one of the command line wins."""
    path = config("model: ORG/IN-FILE\nserved-model-name: [small]\n")
    found = options("--config", path)
    assert (found.model, found.served_model_name) == ("ORG/IN-FILE", "small")
    assert options("ORG/TYPED", "--config", path).model == "ORG/TYPED"
    assert options("--config", path, "--model", "ORG/TYPED").model == "ORG/TYPED"


def test_lists_and_mappings_are_those_of_yaml(config: Callable[[str], str]) -> None:
    """vllm#23468: a list became one word."""
    text = """
cors-origins:
  - https://a.example
  - https://b.example
limits:
  max_depth: 3
speculative-config:
  method: ngram
  num_speculative_tokens: 3
"""
    found = options("--config", config(text))
    assert found.settings["frontend"]["cors_origins"] == ("https://a.example", "https://b.example")
    assert found.settings["frontend"]["limits"] == {"max_depth": "3"}
    assert found.settings["worker"]["speculative_config"] == '{"method": "ngram", "num_speculative_tokens": 3}'


def test_switches_of_vllm_that_mean_nothing_here_are_taken(config: Callable[[str], str]) -> None:
    assert options("--config", config("async-scheduling: true\ndisable-cascade-attn: false\n")) == options()


def test_a_key_of_the_command_line_is_not_merged_but_still_checked(
    config: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    path = config("dtype: bfloat\n")
    assert f"{path}, line 1: argument --dtype: invalid choice" in refusal(
        capsys, "--config", path, "--dtype", "float32"
    )


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("port: 1\n# why\ngpu-memory-utilisation: 1\n", 3, "gpu-memory-utilisation; did you mean --gpu-memory-util"),
        ("max_num_sequences: 1\n", 1, "max_num_sequences; did you mean --max-num-seqs?"),
        ("dtype: half16\n", 1, "argument --dtype: invalid choice: 'half16'"),
        ("port: 1\nmax-num-seqs: many\n", 2, "argument --max-num-seqs: 'many' is not a whole number"),
        ("max-num-seqs:\n", 1, "max-num-seqs has no value"),
        (
            "quantization: no\n",
            1,
            "argument --quantization: false is not a valid value; put words such as 'off' in quotes",
        ),
        ("config: other.yaml\n", 1, "config can only be given on the command line"),
        ("worker: {num_blocks: 10}\n", 1, "worker is a section of a settings file, not a flag; set QUIRE_CONFIG"),
        (
            "trust-remote-code: true\n",
            1,
            "--trust-remote-code is a flag of vLLM that Quire does not have; code from a checkpoint is never executed",
        ),
        ("uvicorn-log-level: info\n", 1, "uvicorn-log-level"),
    ],
)
def test_what_is_wrong_is_said_with_file_line_and_key(
    config: Callable[[str], str], capsys: pytest.CaptureFixture[str], text: str, line: int, said: str
) -> None:
    path = config(text)
    told = refusal(capsys, "--config", path)
    assert f"{path}, line {line}: " in told
    assert said in told


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- port\n", "must be a mapping of flag names to values"),
        ("port: 1\nhost: [\n", "is not YAML: line 3: "),
        ("port: 1\nhttp-port: 2\nport: 3\n", "line 3: port is also given in line 1"),
        ("max-num-seqs: 1\nmax_num_seqs: 2\n", "line 2: max_num_seqs is also given in line 1"),
    ],
)
def test_a_file_that_holds_no_flags_is_refused_in_one_line(
    config: Callable[[str], str], capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    assert main(["up", "--config", config(text)]) == 1
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


def test_a_file_that_is_not_there_is_refused_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["up", "--config", str(tmp_path / "none.yaml")]) == 1
    assert "none.yaml': No such file or directory" in capsys.readouterr().err


def test_an_empty_file_changes_nothing(config: Callable[[str], str]) -> None:
    assert options("--config", config("# nothing yet\n")) == options()


def test_a_secret_may_stand_in_a_file(config: Callable[[str], str]) -> None:
    """Others cannot read it there, as they can on a command line."""
    assert options("--config", config("api-key: hunter2\n")).settings["frontend"] == {"api_key": "hunter2"}
