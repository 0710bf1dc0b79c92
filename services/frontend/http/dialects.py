"""All dialects of a server, looked up by the path of a call."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence

from starlette.responses import Response
from starlette.routing import compile_path

from quire.services.frontend.http.dialect import Dialect, ErrorFormat, InferencePath
from quire.services.frontend.http.document.schemas import Schema
from quire.shared.errors import QuireError


class Dialects:
    """Holds the dialects; errors of paths without one are formatted by the first."""

    def __init__(self, dialects: Sequence[Dialect]) -> None:
        self.all = tuple(dialects)
        self._work = {work.path: work for dialect in dialects for work in dialect.inference_paths}
        self._errors = {path: dialect.errors for dialect in dialects for path in _own_paths(dialect)}
        self._prefixes = [(prefix, dialect.errors) for dialect in dialects for prefix in dialect.prefixes]
        self._templates = _templates(self._work)

    def errors_of(self, path: str) -> ErrorFormat:
        """Returns the error format of a path: of the path itself, else of its prefix, else the first dialect's."""
        known = self._errors.get(path)
        if known is not None:
            return known
        words = (words for prefix, words in self._prefixes if path.startswith(prefix))
        return next(words, self.all[0].errors)

    def refusal(self, path: str, error: QuireError) -> Response:
        """Returns an error response in the format of `path`."""
        return self.errors_of(path).of_error(error)

    def status(self, path: str, status: int, detail: str) -> Response:
        """Returns an HTTP status response in the format of `path`."""
        return self.errors_of(path).of_status(status, detail)

    def error_schema(self, path: str) -> Schema:
        """Returns the schema of error bodies of `path`."""
        return self.errors_of(path).schema

    def documented_paths(self) -> dict[str, InferencePath]:
        """Returns the inference paths by their spelling in the OpenAPI document."""
        return {compile_path(path)[1]: work for path, work in self._work.items()}

    def inference_path(self, path: str) -> str:
        """Returns the route template, used as metric label; empty if calls of `path` are not subject to admission.
        Templates with the same last part and the same text before the first parameter share one label."""
        if path in self._work:
            return path
        prefix, name = self._templates.get(path.rpartition("/")[2], ("", ""))
        return name if prefix and path.startswith(prefix) else ""

    def takes_file(self, path: str) -> bool:
        """Returns whether the body of `path` is a file, which its route reads."""
        work = self._work.get(path)
        return work is not None and work.is_file

    def in_client_terms(self, path: str, error: QuireError, structured_output_field: str = "") -> QuireError:
        """Returns the error with its field renamed as in the bodies of `path`, also at its first mention in the
        message. `structured_output_field`: the field that requested structured output, where several can."""
        work = self._work.get(path)
        name = None if work is None else work.field_names.get(error.field)
        if error.field == "structured_output" and structured_output_field:
            name = structured_output_field
        if name is None:
            return error
        renamed = copy.copy(error)
        renamed.field = name
        renamed.message = re.sub(rf"\b{re.escape(error.field)}\b", name, error.message, count=1)
        return renamed


def _own_paths(dialect: Dialect) -> Sequence[str]:
    return [*(work.path for work in dialect.inference_paths), *dialect.paths]


def _templates(work: Mapping[str, InferencePath]) -> dict[str, tuple[str, str]]:
    """Maps the last part of each parametrized path to the text before its first parameter and the path."""
    found: dict[str, tuple[str, str]] = {}
    for path in work:
        if "{" in path:
            found.setdefault(path.rpartition("/")[2], (path.partition("{")[0], path))
    return found
