"""Builds the minimal runtime base: of a Debian root only what Python needs, without shell and package manager.

dpkg's own lists define each package's files, so what remains is what Debian shipped, and its bill of materials is
accurate.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

# base-files: os-release, /tmp; libc-bin: the locale C.UTF-8; libstdc++6: many extension modules
ROOTS = ("python-is-python3", "libstdc++6", "ca-certificates", "tzdata", "base-files", "libc-bin")
OF_INSTALLING = {"awk", "debconf", "dpkg"}  # only maintainer scripts call them
GENERATED = re.compile(r"etc/(passwd|group|nsswitch\.conf|localtime|ssl/certs/.+)")  # by maintainer scripts
COMPILED = re.compile(r"(.+)/__pycache__/([^/.]+)\.[^/]+\.pyc")
STATUS = "var/lib/dpkg/status"
LISTS = re.compile(r"var/lib/dpkg/info/([^/:]+)(?::[^/]+)?\.list")


@dataclass(frozen=True, slots=True)
class Package:
    """A package in dpkg's status file: `fields` parsed from `text`."""

    text: str
    fields: Message

    @property
    def provides(self) -> list[str]:
        return [_first_word(one) for one in _split(self.fields.get("Provides", ""), ",")]

    @property
    def dependencies(self) -> Iterator[list[str]]:
        """Returns groups of alternatives, one of which is required."""
        for field in ("Pre-Depends", "Depends"):
            for alternatives in _split(self.fields.get(field, ""), ","):
                yield [_first_word(one) for one in _split(alternatives, "|")]


Packages = Mapping[str, Package]


def select(full: Path, small: Path) -> None:
    """Writes the required part of the tar archive `full` to `small`."""
    with tarfile.open(full) as root:
        members = {_name(member): member for member in root}
        packages = _needed(_installed(_text(root, members[STATUS])), full)
        kept = _with_parents([STATUS, *_files(root, members, packages)])
        with tarfile.open(small, "w", format=tarfile.PAX_FORMAT) as out:
            for name, member in members.items():
                if name == STATUS:
                    _write_status(out, member, packages)
                elif _is_kept(name, kept):
                    out.addfile(member, root.extractfile(member) if member.isreg() else None)


def _needed(installed: Packages, where: Path) -> Packages:
    """Returns the root packages and their dependencies. Raises ValueError if one is not installed."""
    virtual = {name: package for package, its in installed.items() for name in its.provides}
    provided = virtual | {package: package for package in installed}
    needed: dict[str, Package] = {}
    waiting = [[root] for root in ROOTS]
    while waiting:
        alternatives = waiting.pop()
        name = next((provided[one] for one in alternatives if one in provided), None)
        if name is None:
            raise ValueError(f"no package of {where} is or provides {' or '.join(alternatives)}")
        if name not in needed:
            needed[name] = installed[name]
            waiting += [names for names in needed[name].dependencies if OF_INSTALLING.isdisjoint(names)]
    return needed


def _split(text: str, separator: str) -> list[str]:
    return [part.strip() for part in text.split(separator) if part.strip()]


def _first_word(text: str) -> str:
    return re.split(r"[\s(:]", text, maxsplit=1)[0]


def _installed(status: str) -> Packages:
    packages = [Package(text, HeaderParser().parsestr(text)) for text in status.strip().split("\n\n")]
    return {its.fields["Package"]: its for its in packages if "installed" in its.fields.get("Status", "").split()}


def _files(root: tarfile.TarFile, members: Mapping[str, tarfile.TarInfo], packages: Packages) -> Iterator[str]:
    """Returns the files of these packages; their lists may say /lib for /usr/lib."""
    links = {name: member.linkname for name, member in members.items() if member.issym() and "/" not in name}
    for name, member in members.items():
        of = LISTS.fullmatch(name)
        if of and of[1] in packages:
            for path in _text(root, member).splitlines():
                first, _, rest = path.lstrip("/").partition("/")
                yield f"{links.get(first, first)}/{rest}" if rest else first


def _with_parents(paths: Iterable[str]) -> Set[str]:
    return {str(one) for path in paths for one in (PurePosixPath(path), *PurePosixPath(path).parents)}


def _is_kept(name: str, kept: Set[str]) -> bool:
    if name in kept or GENERATED.fullmatch(name):
        return True
    if (compiled := COMPILED.fullmatch(name)) is not None:
        return f"{compiled[1]}/{compiled[2]}.py" in kept
    return False


def _write_status(out: tarfile.TarFile, member: tarfile.TarInfo, packages: Packages) -> None:
    text = "".join(f"{package.text}\n\n" for package in packages.values()).encode()
    member.size = len(text)
    out.addfile(member, io.BytesIO(text))


def _text(root: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    found = root.extractfile(member)
    assert found is not None
    return found.read().decode()


def _name(member: tarfile.TarInfo) -> str:
    return str(PurePosixPath(member.name))
