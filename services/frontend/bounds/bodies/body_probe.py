"""The child process of large_bodies.py: says what is wrong with large bodies and messages, without looking at fields
that a few of them have.

Introduced with the limits, as JSON; asked where a body is and what kind it is; answers with what is wrong, as JSON, or
nothing (child.py). A long list of ids in a body that is let in is taken out: then the answer says where it begins
behind the rest of the body, which is shorter than it was.
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
from quire.services.frontend.bounds.prompt_limit import PromptLimit
from quire.shared.errors import InvalidArgument
from quire.shared.process.child import serve_requests
from quire.shared.settings.request_limits import RequestLimits

JSON = "JSON"
NO_JSON, UNREAD = "no JSON", "unread"
IDS_BEGIN = "ids_begin"


@dataclass(frozen=True, slots=True)
class BodyCheck:
    """What is wrong with this?"""

    path: str
    num_bytes: int  # so many of the file's first
    is_whole: bool  # there are no others
    kind: str  # JSON, or the full name of a message
    max_model_len: int
    longest_token: int

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def begin(introduction: bytes) -> Callable[[bytes], bytes]:
    limits = RequestLimits(**json.loads(introduction))

    def answer(message: bytes) -> bytes:
        question = BodyCheck(**json.loads(message))
        try:
            begins = _check(question, limits)
        except JSONDecodeError as error:
            return _encoded(error.msg, kind=NO_JSON, position=error.pos)
        except OSError:  # its client has left
            return _encoded("", kind=UNREAD)
        except InvalidArgument as error:
            return _encoded(error.message, field=error.field, reason=error.reason)
        return b"" if begins is None else json.dumps({IDS_BEGIN: begins}).encode()

    return answer


def _encoded(message: str, **more: Any) -> bytes:
    return json.dumps({"message": message, **more}).encode()


def _check(question: BodyCheck, limits: RequestLimits) -> int | None:
    """Where ids begin that were taken out."""
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
    del data  # before its texts are read, which takes as much again
    messages.check(message, limits)
    messages.check_prompt(message, prompt_limit)
    return None


def _check_json(question: BodyCheck, data: bytes, limits: RequestLimits, prompt_limit: PromptLimit) -> int | None:
    taken = long_ids.extract_ids(data) if question.is_whole else None
    document = json_body.parse(data if taken is None else taken.body)
    if taken is not None and (not isinstance(document, dict) or document.get(long_ids.FIELD) != []):
        taken, document = None, json_body.parse(data)  # the field of something within
    json_body.check(document, data, limits)
    json_body.check_prompt(document, prompt_limit)
    if taken is None:
        return None
    with Path(question.path).open("r+b") as file:
        file.write(taken.body)
        file.write(taken.ids)
        file.truncate()
    return len(taken.body)


if __name__ == "__main__":
    serve_requests(begin)
