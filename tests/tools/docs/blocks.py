"""Fenced code blocks of the README and the pages, by the language of their fence.

| fence | what a test does with the block |
|---|---|
| `sh` | a script for clusters of its own: tests/e2e/operations and tests/e2e/page.py run it |
| `bash` | test_running.py runs it against a cluster of `quire up` with its default addresses |
| `python` | test_running.py runs it against the same cluster; blocks of FRAGMENTS are only compiled |
| others | commands of `quire`, `make` and `python -m` in them are parsed |
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^|[;&(] ?|-- |^[A-Z_]+=\S+ )(?:\.venv/bin/)?(quire(?= )|make(?= )|python3? -m(?= ))")
INLINE = re.compile(r"`((?:quire|make|python -m) [^`]+)`")
ENDS = ("|", "||", "&", "&&", ";", ">", ">>", ")", "#")
FRAGMENTS = {  # schematic, or in need of a trainer
    "docs/contributing/releases.md",
    "docs/design/cpu-kernels.md",
    "docs/features/weights-and-sleep.md",
}
Words = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block; `page` is its path in the repository."""

    page: str
    language: str
    text: str
    line: int

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(*languages: str) -> list[Block]:
    """Returns the blocks with one of these fences, all of them without an argument."""
    return [block for page in PAGES for block in _blocks(page) if not languages or block.language in languages]


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in FENCE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield Block(str(page.relative_to(ROOT)), found[2], found[3], line)


def commands() -> dict[Words, str]:
    """Returns every command of `quire`, `make` and `python -m` in a block as words, with the block's name."""
    shell = blocks("", "sh", "bash", "console", "text")
    return {words: block.name for block in shell for line in _lines(block.text) for words in _commands(line)}


def inline_commands() -> dict[Words, str]:
    """Returns those between backquotes in prose and tables, which may name a command without its arguments."""
    inline = ((page, text) for page in PAGES for text in INLINE.findall(FENCE.sub("", page.read_text())))
    return {words: str(page.relative_to(ROOT)) for page, text in inline for words in _commands(text)}


def _lines(text: str) -> Iterator[str]:
    """Yields the lines of a script; a line with an open quotation is joined with the lines up to its end."""
    begun = ""
    for line in re.sub(r"\\\n", " ", text).splitlines():
        begun = f"{begun} {line}" if begun else line.removeprefix("$ ")
        try:
            shlex.split(begun, comments=True)
        except ValueError:
            continue
        yield begun
        begun = ""


def _commands(line: str) -> Iterator[Words]:
    for start in COMMAND.finditer(line.partition(" #")[0]):
        words = tuple(_words(line[start.start(1) :]))
        if len(words) > 1:
            yield words


def _words(line: str) -> Iterator[str]:
    lexer = shlex.shlex(re.sub(r"\b2>", ">", line), posix=True, punctuation_chars="|&;()<>")
    lexer.whitespace_split = True
    for word in lexer:
        if word in ENDS:
            return
        yield word
