"""Request bodies that keep unknown fields and refuse those whose silent omission would change the answer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from quire.services.frontend.http.fields.nested_fields import Shape, check_objects
from quire.services.frontend.http.fields.unknown_fields import MAX_NAMES, UnknownFields, too_many_names
from quire.services.frontend.input_processor.sampling.unsupported_fields import (
    reject_unsupported,
    without_inactive_windows,
)
from quire.shared.errors import Unimplemented


class CheckedBody(BaseModel):
    """A JSON object of one API: a body, or a nested object with a policy of its own."""

    model_config = ConfigDict(extra="allow")

    ignored_fields: ClassVar[frozenset[str]] = frozenset()  # accepted without effect
    not_offered: ClassVar[
        Mapping[str, Sequence[Any]]
    ] = {}  # field name -> values without effect; other values are refused
    unavailable: ClassVar[Mapping[str, Sequence[Any]]] = {}  # the same for fields of this API only
    remedy: ClassVar[str] = ""  # appended to the error about an `unavailable` field
    reasons: ClassVar[Mapping[str, str]] = {}  # error reasons of `unavailable` fields
    objects: ClassVar[Mapping[str, Shape]] = {}  # fields with nested objects that have no pydantic model

    @classmethod
    def known_fields(cls) -> Collection[str]:
        """Returns the names of the fields that have an effect."""
        return cls.model_fields.keys()

    def refuse_unknown(self, unknown: UnknownFields, place: str = "") -> None:
        """Checks the undeclared fields of the body and of nested objects, then its own rules. `place`: prefix of the
        names, such as `options.`. Raises InvalidArgument for a misspelt field, Unimplemented for an unsupported one."""
        extra = self.model_extra or {}
        known = self.ignored_fields | self.not_offered.keys() | self.unavailable.keys() | {*self.known_fields()}
        unknown.check(extra.keys() - known, known, place)
        reject_unsupported(without_inactive_windows(extra, self), self.not_offered, place)
        for name, value in extra.items():
            if name in self.unavailable and value not in self.unavailable[name]:
                text = f"{name} is not supported by this server{self.remedy}"
                raise Unimplemented(text, field=name, reason=self.reasons.get(name, ""))
        _check_models(unknown, self)
        for name, shape in self.objects.items():
            check_objects(unknown, getattr(self, name), shape, name)
        self.check_rules(unknown)

    def check_rules(self, unknown: UnknownFields) -> None:
        """Raises QuireError if a rule specific to this body is violated."""


def _check_models(unknown: UnknownFields, model: BaseModel) -> None:
    """Raises InvalidArgument for a refused field in nested models; those that are a CheckedBody apply their own
    policy."""
    nested = list(_models(model, ""))
    for place, one in nested:
        if isinstance(one, CheckedBody):
            one.refuse_unknown(unknown, place)
    nested = [(place, one) for place, one in nested if not isinstance(one, CheckedBody)]
    if len({name for _, one in nested for name in one.model_extra or ()}) > MAX_NAMES:
        raise too_many_names("")
    for place, one in nested:
        fields = {field.alias or name for name, field in type(one).model_fields.items()}
        unknown.check((one.model_extra or {}).keys(), fields, place)


def _models(model: BaseModel, place: str) -> Iterator[tuple[str, BaseModel]]:
    """Yields the nested models of all depths, each with the prefix of its fields, such as `messages[0].`."""
    for name in model.model_fields_set & type(model).model_fields.keys():
        value = getattr(model, name)
        entries = {f"{place}{name}.": value}
        if isinstance(value, list) and value and isinstance(value[0], BaseModel):
            entries = {f"{place}{name}[{number}].": entry for number, entry in enumerate(value)}
        for prefix, one in entries.items():
            if isinstance(one, BaseModel):
                yield prefix, one
                yield from _models(one, prefix)
