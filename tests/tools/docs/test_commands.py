"""Commands and code in the README and the pages are understood by the programs that they name."""

from __future__ import annotations

import ast
import importlib.util
import re
from contextlib import nullcontext, suppress

import pytest

from quire.cli.main import COMMANDS, _parse, main
from tests.tools.docs.blocks import PAGES, ROOT, Block, Words, blocks, commands, inline_commands

TYPED, NAMED = commands(), inline_commands()
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
OURS = ("quire", "tests", "tools")
NUMBERS = {"N": "2", "M": "2", "K": "1", "P": "29500", "S": "5", "GIB": "1"}  # placeholders where a number is parsed
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
OTHERS = set(  # of docker, kubectl, curl, prometheus, auditwheel, other engines, and programs of tests and tools
    FLAG.findall(
        """--arch --build --build-arg --cacert --cases --clusters --count --data-urlencode --edge --examples --fixed
        --kill-every-s --minutes --namespace --pause-s --profile --programs --replicas --rounds --same-cores --seconds
        --storage --streams --target --times --wait --web --wheel-dir --write --api-key --disaggregation-mode --dp
        --enable-lora --lora-modules --max-batch-prefill-tokens --max-concurrent-requests --max-total-tokens
        --mem-fraction-static --model-id --model-path --num-shard --pp-size --prefix --quantize --schedule-policy
        --tail --tp --trust-remote-code --no-build-isolation"""
    )
)
OUTPUT = {("quire", "ready")}  # lines that begin like a command


def of(found: dict[Words, str], *programs: str) -> list[object]:
    return [
        pytest.param(words, id=f"{place}: {' '.join(words)}")
        for words, place in found.items()
        if words[0] in programs and words[:2] not in OUTPUT
    ]


@pytest.mark.parametrize("words", of(TYPED, "quire"))
def test_quire_parses_the_command(words: Words) -> None:
    shows_text = any(word.startswith("--help") or word == "--version" for word in words)
    with suppress(SystemExit) if shows_text else nullcontext():
        _parse([NUMBERS.get(word, word) for word in words[1:]])


@pytest.mark.parametrize("words", of(NAMED, "quire"))
def test_quire_has_the_command_and_its_flags(words: Words, capsys: pytest.CaptureFixture[str]) -> None:
    command = words[1]
    if command == "COMMAND" or words[-1] == "...":
        return
    assert command in COMMANDS or command.startswith("--")
    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
    for text in ("--help-all", "--help"):
        with pytest.raises(SystemExit):
            main([*words[1:2], *([words[2]] if command == "bench" and len(words) > 2 else ()), text])
    known = set(re.findall(r"--[a-z][\w-]*", capsys.readouterr().out))
    assert flags - known - {"--help", "--help-all", "--version"} == set()


def test_every_flag_exists(capsys: pytest.CaptureFixture[str]) -> None:
    """Pages name flags in prose and tables, too."""
    modes = [["bench", mode] for mode in ("throughput", "serve", "latency", "embed", "startup", "scheduler")]
    for command in [*([name] for name in COMMANDS), *modes]:
        for text in ("--help-all", "--help"):
            with pytest.raises(SystemExit):
                main([*command, text])
    known = set(FLAG.findall(capsys.readouterr().out.replace("--[no-]", "--"))) | OTHERS
    named = {(str(page.relative_to(ROOT)), flag) for page in PAGES for flag in FLAG.findall(page.read_text())}
    assert {(page, flag) for page, flag in named if flag not in known} == set()


@pytest.mark.parametrize("words", [*of(TYPED, "make"), *of(NAMED, "make")])
def test_make_has_the_target(words: Words) -> None:
    assert next(word for word in words[1:] if "=" not in word) in TARGETS


@pytest.mark.parametrize("words", [*of(TYPED, "python", "python3"), *of(NAMED, "python", "python3")])
def test_the_program_exists(words: Words) -> None:
    if words[2].partition(".")[0] in OURS:
        assert importlib.util.find_spec(words[2]) is not None


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.name)
def test_python_blocks_compile(block: Block) -> None:
    ast.parse(block.text)


def test_every_command_for_operators_is_shown() -> None:
    shown = {words[1] for words, place in TYPED.items() if place.startswith("docs/operations/")}
    assert {"doctor", "up", "health", "chat", "status", "top", "scheduler", "worker", "frontend"} <= shown


def test_there_is_something_to_check() -> None:
    assert len(of(TYPED, "quire")) > 40
    assert len(of(NAMED, "quire")) > 40
    assert len(of(TYPED, "make")) > 8
    assert len(blocks("bash")) > 8
