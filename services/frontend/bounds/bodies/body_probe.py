"""Child process of large_bodies.py: checks large bodies and messages outside the event loop.

The parent sends the limits as JSON once, then one BodyCheck per body; the answer is an error as JSON, or empty
(shared/process/child.py). A long list of ids in an accepted body is moved to the end of the file; the answer then
holds the offset at which the ids begin.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from quire.services.frontend.bounds import messages, wire_scan
from quire.services.frontend.bounds.bodies import json_body, json_scan, long_ids
from quire.services.frontend.bounds.prompts import PromptLimit
from quire.shared.errors import InvalidArgument
from quire.shared.process.child import serve_requests
from quire.shared.settings.request_limits import RequestLimits

JSON = "JSON"
NO_JSON, UNREAD = "no JSON", "unread"
IDS_BEGIN = "ids_begin"


@dataclass(frozen=True, slots=True)
class BodyCheck:
    """Question to the checking process: one body in a file, and the limits of the prompt in it."""

    path: str
    num_bytes: int  # length of the part to check, from the start of the file
    is_whole: bool  # that part is the whole file
    kind: str  # JSON, or the full name of a protobuf message
    max_model_len: int
    longest_token: int

    def encode(self) -> bytes:
        """Returns the question as JSON, the input of begin()'s function."""
        return json.dumps(asdict(self)).encode()


def begin(introduction: bytes) -> Callable[[bytes], bytes]:
    """Returns the function of the child process that answers one encoded BodyCheck: empty if the body is valid, else
    JSON with the offset of extracted ids, or with the error's message and field. `introduction`: the RequestLimits as
    JSON."""
    limits = RequestLimits(**json.loads(introduction))

    def answer(message: bytes) -> bytes:
        """Checks the body of one encoded BodyCheck and returns the encoded result; only unexpected errors are
        raised."""
        question = BodyCheck(**json.loads(message))
        try:
            begins = _check(question, limits)
        except JSONDecodeError as error:
            return _encoded(error.msg, kind=NO_JSON, position=error.pos)
        except OSError:  # the client has disconnected
            return _encoded("", kind=UNREAD)
        except InvalidArgument as error:
            return _encoded(error.message, field=error.field, reason=error.reason)
        return b"" if begins is None else json.dumps({IDS_BEGIN: begins}).encode()

    return answer


def _encoded(message: str, **more: Any) -> bytes:
    return json.dumps({"message": message, **more}).encode()


def _check(question: BodyCheck, limits: RequestLimits) -> int | None:
    """Checks the body in the file; returns the offset of extracted ids, or None. Raises JSONDecodeError, OSError,
    InvalidArgument."""
    with Path(question.path).open("rb") as file:
        data = file.read(question.num_bytes)
    prompt_limit = PromptLimit(question.max_model_len, question.longest_token)
    if question.kind == JSON:
        for _ in json_scan.check(data, limits):
            pass
        return _check_json(question, data, limits, prompt_limit)
    kind = messages.KINDS[question.kind]
    for _ in wire_scan.check(data, kind.DESCRIPTOR, limits):
        pass
    message = messages.parse(data, kind)
    del data  # before the message's texts are decoded, which takes as much memory again
    messages.check(message, limits)
    messages.check_prompt(message, prompt_limit)
    return None


def _check_json(question: BodyCheck, data: bytes, limits: RequestLimits, prompt_limit: PromptLimit) -> int | None:
    """Checks a JSON body. A long list of ids is moved to the end of the file, as i32 after the body with an emptied
    list; returns its offset, or None if there is no such list. Raises JSONDecodeError, InvalidArgument."""
    extracted = long_ids.extract_ids(data) if question.is_whole else None
    document = json_body.parse(data if extracted is None else extracted.body)
    if extracted is not None and (not isinstance(document, dict) or document.get(long_ids.FIELD) != []):
        extracted, document = None, json_body.parse(data)  # a nested object's field of that name
    json_body.check(document, data, limits)
    json_body.check_prompt(document, prompt_limit)
    if extracted is None:
        return None
    with Path(question.path).open("r+b") as file:
        file.write(extracted.body)
        file.write(extracted.ids)
        file.truncate()
    return len(extracted.body)


if __name__ == "__main__":
    serve_requests(begin)
