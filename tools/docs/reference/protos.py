"""Pages of the protocols, from the comments of the .proto files."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parents[3] / "protos"
# Field numbers of the descriptors, which form the paths of comments.
MESSAGES, ENUMS, SERVICES = 4, 5, 6
FIELDS, INNER_MESSAGES, INNER_ENUMS, VALUES, METHODS, SYNTAX = 2, 3, 4, 2, 2, 12
MESSAGE_TYPES = (FieldDescriptorProto.TYPE_MESSAGE, FieldDescriptorProto.TYPE_ENUM)

Place = tuple[int, ...]


def described() -> FileDescriptorSet:
    """Compiles all proto files with their comments; exits with an error if protoc fails."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    well_known = str(resources.files("grpc_tools") / "_proto")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "descriptors.bin"
        arguments = [f"-I{PROTOS}", f"-I{well_known}", "--include_source_info", f"--descriptor_set_out={out}"]
        if protoc.main(["protoc", *arguments, *sources]) != 0:
            sys.exit("protos: protoc failed")
        return FileDescriptorSet.FromString(out.read_bytes())


class Described(NamedTuple):
    """A proto file with the comments of its parts."""

    file: FileDescriptorProto
    comments: dict[Place, str]

    @classmethod
    def of(cls, file: FileDescriptorProto) -> Described:
        return cls(file, {tuple(one.path): _one_line(one.leading_comments) for one in file.source_code_info.location})

    def says(self, *place: int) -> str:
        return self.comments.get(place, "")


def _one_line(comment: str) -> str:
    return " ".join(comment.split()).replace("|", "\\|").replace("<", "&lt;")


def pages() -> dict[str, str]:
    """Returns the pages' Markdown by name: one per area of quire's protocols, one per other dialect."""
    areas: dict[str, list[Described]] = {}
    for file in described().file:
        first, *rest = file.name.split("/")
        areas.setdefault(rest[0] if first == "quire" else first, []).append(Described.of(file))
    anchors = _anchors(areas)
    return {area: "\n".join(_page(area, files, anchors)) for area, files in areas.items()}


def _anchors(areas: dict[str, list[Described]]) -> dict[str, tuple[str, str]]:
    """Returns the page and anchor of each message and enum, by full name with a leading dot."""
    found = {}
    for area, files in areas.items():
        for one in files:
            package = f".{one.file.package}"
            for name in [*_named("", one.file.message_type), *(kind.name for kind in one.file.enum_type)]:
                found[f"{package}.{name}"] = (area, name)
    return found


def _named(prefix: str, messages: Iterable[DescriptorProto]) -> Iterator[str]:
    """Yields the full names of messages, their enums and nested messages, recursively."""
    for message in messages:
        name = prefix + message.name
        yield name
        yield from (f"{name}.{kind.name}" for kind in message.enum_type)
        yield from _named(f"{name}.", message.nested_type)


class _Writer(NamedTuple):
    """Writes the reference of one file."""

    one: Described
    area: str
    anchors: dict[str, tuple[str, str]]

    def type_of(self, field: FieldDescriptorProto, message: DescriptorProto) -> str:
        """Returns a field's type as Markdown: a scalar's name, a map, or a link to the message."""
        if field.type not in MESSAGE_TYPES:
            return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
        for entry in message.nested_type:
            if entry.options.map_entry and field.type_name.endswith(f".{message.name}.{entry.name}"):
                key, value = (self.type_of(part, entry) for part in entry.field)
                return f"map of {key} to {value}"
        return self.link(field.type_name)

    def link(self, type_name: str) -> str:
        """Returns a link to a type's section, on this or another page; types without a section become code."""
        if type_name not in self.anchors:
            return f"`{type_name.removeprefix('.')}`"
        area, name = self.anchors[type_name]
        page = "" if area == self.area else f"{area}.md"
        return f"[{name}]({page}#{name.lower().replace('.', '')})"

    def service(self, service: ServiceDescriptorProto, place: Place) -> Iterator[str]:
        """Yields a service's section: comment and a table of its methods."""
        yield f"### {self.one.file.package}.{service.name}\n\n{self.one.says(*place)}\n"
        yield "| method | takes | gives | |\n|---|---|---|---|"
        for number, method in enumerate(service.method):
            takes, gives = self.link(method.input_type), self.link(method.output_type)
            takes = f"stream of {takes}" if method.client_streaming else takes
            gives = f"stream of {gives}" if method.server_streaming else gives
            yield f"| `{method.name}` | {takes} | {gives} | {self.one.says(*place, METHODS, number)} |"
        yield ""

    def message(self, message: DescriptorProto, prefix: str, place: Place) -> Iterator[str]:
        """Yields a message's section: comment and fields, then its enums and nested messages."""
        name = prefix + message.name
        yield f"### {name}\n\n{self.one.says(*place)}\n"
        if message.field:
            yield "| field | type | number | |\n|---|---|---|---|"
        for number, field in enumerate(message.field):
            comment = self.one.says(*place, FIELDS, number)
            yield f"| `{field.name}` | {self._kind(field, message)} | {field.number} | {comment} |"
        yield ""
        for number, kind in enumerate(message.enum_type):
            yield from self.enum(kind, f"{name}.", (*place, INNER_ENUMS, number))
        for number, inner in enumerate(message.nested_type):
            if not inner.options.map_entry:
                yield from self.message(inner, f"{name}.", (*place, INNER_MESSAGES, number))

    def _kind(self, field: FieldDescriptorProto, message: DescriptorProto) -> str:
        """Returns a field's type with optional, one of, or list of."""
        kind = self.type_of(field, message)
        if field.proto3_optional:
            return f"optional {kind}"
        if field.HasField("oneof_index"):
            return f"{kind}, one of `{message.oneof_decl[field.oneof_index].name}`"
        is_list = field.label == FieldDescriptorProto.LABEL_REPEATED and not kind.startswith("map of ")
        return f"list of {kind}" if is_list else kind

    def enum(self, kind: EnumDescriptorProto, prefix: str, place: Place) -> Iterator[str]:
        """Yields an enum's section: comment and a table of its values."""
        yield f"### {prefix}{kind.name}\n\n{self.one.says(*place)}\n"
        yield "| value | number | |\n|---|---|---|"
        for number, value in enumerate(kind.value):
            yield f"| `{value.name}` | {value.number} | {self.one.says(*place, VALUES, number)} |"
        yield ""


def _page(area: str, files: list[Described], anchors: dict[str, tuple[str, str]]) -> Iterator[str]:
    """Yields the page of an area: for each file its services, messages and enums."""
    yield f"# quire.{area}\n" if area != "dialects" else "# Protocols of other servers\n"
    for one in files:
        writer = _Writer(one, area, anchors)
        yield f"## {one.file.name}\n\n{one.says(SYNTAX)}\n"
        for number, service in enumerate(one.file.service):
            yield from writer.service(service, (SERVICES, number))
        for number, message in enumerate(one.file.message_type):
            yield from writer.message(message, "", (MESSAGES, number))
        for number, kind in enumerate(one.file.enum_type):
            yield from writer.enum(kind, "", (ENUMS, number))
