"""Reference page of the error codes."""

from __future__ import annotations

from quire.shared import errors
from quire.shared.pb.common.v1 import finish_pb2
from tools.docs.reference.markdown import cell, code, table

HEAD = """# Error codes

Every error names what is wrong, the field, and what to do. Over gRPC it is a status with details:
`google.rpc.BadRequest` names the field, and `google.rpc.RetryInfo` the time to wait. Over HTTP the body has the shape
of the API that was called, and `Retry-After` has the time in seconds.
"""
COLUMNS = ("Error", "gRPC status", "HTTP status", "OpenAI type", "Meaning")


def page() -> str:
    """Returns the page: a row per error class with its codes for gRPC, HTTP and OpenAI."""
    rows = []
    for kind in _kinds(errors.QuireError):
        transport = errors.transport_of(kind)
        name = finish_pb2.ErrorCode.Name(kind.code).removeprefix("ERROR_CODE_")
        rows.append(
            (
                code(name),
                code(transport.grpc_code.name),
                str(transport.http_status),
                code(transport.openai_type),
                cell(kind.__doc__ or ""),
            )
        )
    return HEAD + "\n" + table(COLUMNS, dict.fromkeys(rows))


def _kinds(base: type[errors.QuireError]) -> list[type[errors.QuireError]]:
    """Returns the classes of shared/errors.py below `base`, each before its own subclasses."""
    found = (kind for child in base.__subclasses__() for kind in (child, *_kinds(child)))
    return [kind for kind in found if kind.__module__ == errors.__name__]
