"""Commands in the operations pages parse, and the pages that they link to exist."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.cli.main import _parse

ROOT = Path(__file__).parents[3]
OPERATIONS = ROOT / "docs" / "operations"
PAGES = tuple(OPERATIONS / name for name in ("walkthrough.md", "runbooks.md", "security.md"))
ENDS = ("|", "||", "&", "&&", ";", ">", ">>", ")", "#")


def commands(text: str) -> Iterator[tuple[str, ...]]:
    """Of shell blocks, from each `quire` to where it ends."""
    blocks = re.findall(r"^```sh\n(.*?)^```|^    (quire .*)$", text, re.MULTILINE | re.DOTALL)
    for line in re.sub(r"\\\n", " ", "\n".join(block + line for block, line in blocks)).splitlines():
        for start in re.finditer(r"(?:^|[ (])quire ", line):
            yield tuple(_words(line[start.start() :].lstrip(" (")))


def _words(line: str) -> Iterator[str]:
    lexer = shlex.shlex(re.sub(r"\b2>", ">", line), posix=True, punctuation_chars="|&;()<>")
    lexer.whitespace_split = True
    for word in lexer:
        if word in ENDS:
            return
        yield word


TYPED = list(dict.fromkeys(words for page in PAGES for words in commands(page.read_text())))


@pytest.mark.parametrize("words", TYPED, ids=" ".join)
def test_commands_are_understood(words: tuple[str, ...]) -> None:
    _parse(words[1:])


def test_every_command_for_operators_is_shown() -> None:
    assert {"doctor", "up", "health", "chat", "status", "top", "scheduler", "worker", "frontend"} <= {
        w[1] for w in TYPED
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_that_it_leads_to_are_there(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / target).exists(), target
