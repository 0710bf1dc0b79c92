"""Parses Dockerfiles as far as the tests need."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Stage:
    """Instructions between one FROM and the next."""

    base: str  # an image from elsewhere, also where other stages of the file lie between
    name: str
    instructions: list[tuple[str, str]] = field(default_factory=list)  # (keyword, arguments), those of its base first
    needs: set[str] = field(default_factory=set)  # stages that it is made of

    def all(self, keyword: str) -> list[str]:
        return [arguments for word, arguments in self.instructions if word == keyword]

    def one(self, keyword: str) -> str:
        (arguments,) = self.all(keyword)
        return arguments

    def words(self, keyword: str) -> list[str]:
        """Returns the words of an instruction in JSON form."""
        words: list[str] = json.loads(self.one(keyword))
        return words

    @property
    def environment(self) -> dict[str, str]:
        return dict(word.split("=", 1) for arguments in self.all("ENV") for word in shlex.split(arguments))

    @property
    def ports(self) -> set[int]:
        return {int(port) for port in self.one("EXPOSE").split()}

    @property
    def health_command(self) -> list[str]:
        command: list[str] = json.loads(self.one("HEALTHCHECK").split("CMD", 1)[1])
        return command

    @property
    def copied(self) -> list[str]:
        """Returns the paths copied from the build context."""
        sources = []
        for arguments in self.all("COPY"):
            words = arguments.split()
            if not words[0].startswith("--from"):
                sources += words[:-1]
        return sources


def read(path: Path) -> list[Stage]:
    """Returns the stages of a Dockerfile, with defaults of global ARGs substituted."""
    lines = [line for line in path.read_text().splitlines() if not re.match(r"\s*#", line)]
    text = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    defaults: dict[str, str] = {}
    stages: list[Stage] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        keyword, _, arguments = line.partition(" ")
        if keyword == "FROM":
            base, *name = re.split(r"\s+AS\s+", arguments)
            below = next((stage for stage in stages if stage.name == base), None)
            made = Stage(_expand(base, defaults), name[0] if name else "")
            if below is not None:
                made = Stage(below.base, made.name, [*below.instructions], {*below.needs, base})
            stages.append(made)
        elif stages:
            stages[-1].instructions.append((keyword, arguments.strip()))
            stages[-1].needs |= set(re.findall(r"--from=(\S+)", arguments)) if keyword == "COPY" else set()
        elif keyword == "ARG":
            argument, value = arguments.split("=", 1)
            defaults[argument] = _expand(value, defaults)
    return stages


def target(path: Path, name: str) -> Stage:
    """Returns the stage that becomes the image."""
    return next(stage for stage in read(path) if stage.name == name)


def needed(path: Path, name: str) -> list[Stage]:
    """Returns the stages needed to build a target, itself included."""
    by_name = {stage.name: stage for stage in read(path)}
    found, open_ = set(), {name}
    while open_:
        one = open_.pop()
        found.add(one)
        open_ |= by_name[one].needs - found
    return [stage for stage in by_name.values() if stage.name in found]


def _expand(text: str, values: dict[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], text)
