"""Texts of the tree are in the terms of the field: docstrings are sentences about their object, no word is a riddle."""

from __future__ import annotations

import ast
import functools
import io
import itertools
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
GENERATED = ("docs/benchmarks/results/", "shared/pb/")
LISTED = "tests/architecture/test_words.py"  # names what it forbids

# A docstring that begins with one of these says what something is of, for or like, and not what it is.
NO_BEGINNING = re.compile(
    r"(Of|That|By|From|For|To|Its|They|It|Those|These|None|Nobody|Who|Whoever|Whom|Whose|What|Which|As|Also|Once|Then|"
    r"Where|While|Until|Since|Because|Behind|Beside|Besides|With|Without|In|On|At|Out|And|Or|But|So)\b(?!-)"
)
# Phrases that leave open which component does what.
RIDDLES = re.compile(
    r"\b(nobody|somebody|whoever|whomever|everybody|of late|what there (?:is|are|was)|is told|are told|was told|"
    r"tells? (?:it|them|the)|lets? in|let in|sits? out|one's own|nobody's|somebody's|goes on|go on|took in|takes in)\b",
    re.IGNORECASE,
)
# Phrases of messages that leave open what was expected or what exists.
VAGUE = re.compile(
    r"\b(not offered|(?:are|is) taken\b|there (?:is|are) \{|(?<!there )is no (?!longer\b|more\b)|the other way round|"
    r"beside [a-z]|is there and|(?:are|is) gone\b)",
    re.IGNORECASE,
)
LOG_METHODS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})
TEXT_ARGUMENTS = frozenset({"help", "description"})  # of flags and settings
# Names that were metaphors; each has a name of the field now.
RETIRED_CLASSES = frozenset(
    {
        "Letter",
        "Told",
        "Made",
        "Found",
        "Held",
        "News",
        "Behind",
        "Arrived",
        "Open",
        "Work",
        "Asked",
        "Given",
        "Kept",
        "Taken",
        "Seen",
        "Heard",
        "Door",
        "GrpcDoor",
        "HttpDoor",
        "Entrance",
        "Ink",
        "Players",
        "Lane",
        "Judge",
        "Borrowed",
        "Deposed",
        "Meeting",
        "Neighbourhood",
        "Patience",
        "Moment",
        "Passes",
        "OneByOne",
    }
)
RETIRED_FUNCTIONS = frozenset(
    {
        "told",
        "sit_out",
        "part_with",
        "believe_pages",
        "_bequeath",
        "_forgive",
        "hurry",
        "take_in",
        "sight",
        "take_away",
        "give_slot",
        "as_sent",
    }
)
FEWEST_WORDS = 5
MOST_SHORT = 0.05  # of all docstrings
WHOLE = (".md", ".yml", ".yaml", ".sh", ".rb", ".toml", "Dockerfile", "Makefile")  # files whose lines are all read
WIDEST_LINE = 200  # characters of a Markdown line, tables apart


class Docstring(NamedTuple):
    """The first paragraph of one docstring and where it stands."""

    place: str
    summary: str


@functools.cache
def tracked(*suffixes: str) -> tuple[str, ...]:
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    names = listed.stdout.splitlines() if listed.returncode == 0 else []
    names = names or [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if ".venv" not in path.parts]
    kept = [name for name in names if name.endswith(suffixes) and not name.startswith(GENERATED) and name != LISTED]
    return tuple(name for name in kept if (ROOT / name).is_file() and "_pb2" not in name)


@functools.cache
def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf8", errors="replace")


@functools.cache
def product() -> tuple[str, ...]:
    return tuple(name for name in tracked(".py") if not name.startswith(("tests/", "docs/")))


class Texts(NamedTuple):
    """Texts of the product."""

    docstrings: list[Docstring]
    riddles: list[str]  # of messages, with their places


@functools.cache
def texts() -> Texts:
    """Returns the texts of the product; every file is parsed once."""
    found = Texts([], [])
    for name in product():
        for node in ast.walk(ast.parse(text_of(name))):
            found.docstrings.extend(docstrings_of(name, node))
            found.riddles.extend(f"{name}:{line}: {text!r}" for line, text in messages(node) if has_riddle(text))
    return found


def docstrings() -> list[Docstring]:
    return texts().docstrings


def has_riddle(text: str) -> bool:
    return bool(RIDDLES.search(text) or VAGUE.search(text))


def docstrings_of(name: str, node: ast.AST) -> Iterator[Docstring]:
    body = getattr(node, "body", None)
    if isinstance(body, list):
        yield from described_values(name, body)
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text:
            owner = getattr(node, "name", "module")
            yield Docstring(f"{name}:{node.body[0].lineno} {owner}", text.strip().split("\n\n")[0])


def described_values(name: str, body: list[ast.stmt]) -> Iterator[Docstring]:
    """Yields the texts that follow the assignment of a constant or a field and describe it."""
    for target, text in itertools.pairwise(body):
        is_text = (
            isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
        )
        if isinstance(target, ast.Assign | ast.AnnAssign) and is_text:
            summary = text.value.value.strip().split("\n\n")[0]
            yield Docstring(f"{name}:{text.lineno} {ast.unparse(target)[:40]}", summary)


def messages(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line number, text) of an error that is raised, of a log line, and of a text of a flag or setting."""
    parts: list[ast.AST] = []
    if isinstance(node, ast.Raise):
        parts = [node]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOG_METHODS:
        parts = [*node.args]
    elif isinstance(node, ast.keyword) and node.arg in TEXT_ARGUMENTS:
        parts = [node.value]
    for text in (inner for part in parts for inner in ast.walk(part)):
        if isinstance(text, ast.JoinedStr):
            yield text.lineno, ast.unparse(text)
        elif isinstance(text, ast.Constant) and isinstance(text.value, str):
            yield text.lineno, text.value


def prose(name: str) -> Iterator[tuple[int, str]]:
    """Yields (line number, text) of what people read: comments and docstrings of Python, all of Markdown, manifests and
    scripts, comments of everything else."""
    if name.endswith(".py"):
        for token in tokenize.generate_tokens(io.StringIO(text_of(name)).readline):
            is_text = token.type == tokenize.STRING and token.string.startswith(('"""', 'r"""', "'''"))
            if token.type == tokenize.COMMENT or is_text:
                yield from enumerate(token.string.split("\n"), token.start[0])
        return
    for number, line in enumerate(text_of(name).split("\n"), 1):
        if name.endswith(WHOLE) or "//" in line or "/*" in line:
            yield number, line


def riddles(names: tuple[str, ...]) -> list[str]:
    return [
        f"{name}:{number}: {found[0]!r}"
        for name in names
        if RIDDLES.search(text_of(name))  # before each file is cut into tokens
        for number, line in prose(name)
        if (found := RIDDLES.search(line)) is not None
    ]


def test_docstrings_begin_with_what_the_object_is_or_does() -> None:
    found = [one.place for one in docstrings() if NO_BEGINNING.match(one.summary)]
    assert not found


def test_docstrings_are_long_enough_to_say_something() -> None:
    short = [one.place for one in docstrings() if len(one.summary.split()) < FEWEST_WORDS]
    assert len(short) < MOST_SHORT * len(docstrings()), short


KINDS = [
    (".py",),
    (".proto",),
    (".md",),
    (".js", ".html", ".css", ".h", ".cpp", ".java", ".go"),
    (".yml", ".yaml", ".sh", ".rb", ".toml", "Dockerfile", "Makefile"),
]


@pytest.mark.parametrize("kinds", KINDS)
def test_texts_have_no_riddles(kinds: tuple[str, ...]) -> None:
    assert not riddles(tracked(*kinds))


def test_messages_have_neither_riddles_nor_vague_phrases() -> None:
    assert not texts().riddles


def test_names_of_functions_do_not_begin_with_of() -> None:
    names = re.compile(r"^\s*(?:async )?def _of(?:_\w+)?\(", re.MULTILINE)
    assert not [f"{name}: {found}" for name in product() for found in names.findall(text_of(name))]


def test_retired_names_do_not_come_back() -> None:
    retired = re.compile(rf"(class|def) ({'|'.join(RETIRED_CLASSES | RETIRED_FUNCTIONS)})\b")
    found = []
    for name in tracked(".py"):
        if not retired.search(text_of(name)):
            continue
        for node in ast.walk(ast.parse(text_of(name))):
            is_class = isinstance(node, ast.ClassDef) and node.name in RETIRED_CLASSES
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name in RETIRED_FUNCTIONS
            if is_class or is_function:
                found.append(f"{name}:{node.lineno} {node.name}")
    for name in tracked(".proto"):
        found += [
            f"{name}: {word}" for word in re.findall(r"^message (\w+)", text_of(name), re.M) if word in RETIRED_CLASSES
        ]
    assert not found


def test_lines_of_documents_can_be_read() -> None:
    found = [
        f"{name}:{number}"
        for name in tracked(".md")
        for number, line in enumerate(text_of(name).split("\n"), 1)
        if len(line) > WIDEST_LINE and not line.lstrip().startswith("|")
    ]
    assert not found
