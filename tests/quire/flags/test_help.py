"""Output of `--help` for many flags, and suggestions for misspelled ones."""

from __future__ import annotations

import pytest

from quire.cli.main import COMMANDS, _parse
from quire.flags.groups import GROUPS
from quire.shared.settings import SERVICES

GROUPED = ("up", *SERVICES)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        _parse(words)
    assert ended.value.code == 0
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        _parse(words)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1, told
    assert "usage" not in told
    return told


def flags(text: str) -> list[str]:
    return [line.split()[0].replace("[no-]", "").rstrip(",") for line in text.splitlines() if line.startswith("  --")]


@pytest.mark.parametrize("command", GROUPED)
def test_help_shows_at_most_forty_flags_in_a_line_each(capsys: pytest.CaptureFixture[str], command: str) -> None:
    text = shown(capsys, command, "--help")
    listed = flags(text)
    assert 10 < len(listed) == len(set(listed)) <= 40
    assert max(map(len, text.splitlines())) <= 80
    assert text == shown(capsys, command, "-h")
    assert {"--help-all", "--log-level"} <= set(listed)


@pytest.mark.parametrize("command", GROUPED)
def test_all_flags_are_in_one_group_each(capsys: pytest.CaptureFixture[str], command: str) -> None:
    everything = flags(shown(capsys, command, "--help-all"))
    by_group = [flags(shown(capsys, command, f"--help={name}")) for name in GROUPS if _has(capsys, command, name)]
    assert sorted(everything) == sorted(flag for group in by_group for flag in group)
    assert set(flags(shown(capsys, command, "--help"))) - {"--help", "--help-all"} <= set(everything)


def _has(capsys: pytest.CaptureFixture[str], command: str, group: str) -> bool:
    return f"(--help={group})" in shown(capsys, command, "--help-all")


@pytest.mark.parametrize("service", SERVICES)
def test_every_setting_has_a_group(service: str) -> None:
    grouped = {name for group in GROUPS.values() for name in group.names}
    settings = {name.replace("_", "-") for name in SERVICES[service].model_fields}
    assert settings - grouped <= {"api-key"}, "the secret one is in no help"


def test_a_group_shows_the_whole_text_of_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "up", "--help=kv")
    assert text.startswith("KV cache:\n")
    assert "--block-size" in text
    assert "0: by device and" in text
    assert "--max-num-seqs" not in text


@pytest.mark.parametrize("flag", ["max-num-seqs", "max_num_seqs", "--max-num-seqs"])
def test_a_flag_shows_its_whole_text(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    text = shown(capsys, "up", f"--help={flag}")
    assert "sequences running at a time; 0: by device" in text
    assert flags(text) == ["--max-num-seqs"]


@pytest.mark.parametrize(
    ("asked", "near"),
    [("kvcache", ""), ("step", "steps"), ("max-num-sequences", "max-num-seqs"), ("simulate", "simulated")],
)
def test_an_unknown_group_names_those_that_are_there(capsys: pytest.CaptureFixture[str], asked: str, near: str) -> None:
    told = refusal(capsys, "up", f"--help={asked}")
    assert "nor one of the groups model, answers, device, kv," in told
    assert (f"did you mean {near}" in told) == bool(near)


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("up", "--max-num-seq", "3"), "did you mean --max-num-seqs?"),
        (("up", "--tensor_paralel_size=2"), "did you mean --tensor-parallel-size?"),
        (("worker", "--modle", "x"), "did you mean --model?"),
        (("frontend", "--http-prot", "1"), "did you mean --http-port?"),
        (("up", "--dtype", "bfloat-16"), "did you mean bfloat16?"),
        (("serv", "x"), "did you mean serve?"),
        (("benhc",), "did you mean bench?"),
        (("bench", "thruput"), "did you mean throughput?"),
    ],
)
def test_what_is_misspelled_is_answered_in_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], meant: str
) -> None:
    assert meant in refusal(capsys, *words)


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in GROUPED])
def test_commands_with_few_flags_show_all_of_them(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert shown(capsys, command, "--help").startswith(f"usage: quire {command}")
