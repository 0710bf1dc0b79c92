"""The child process of large_bodies.py: says what is wrong with large bodies and messages, without looking at fields
that a few of them have.

Introduced with the limits, as JSON; asked where a body is and what kind it is; answers with what is wrong, as JSON, or
nothing (child.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from services.frontend.bounds import json_body, json_scan, messages, wire_scan
from services.frontend.bounds.room import Room
from services.frontend.child import answer_all
from shared.errors import InvalidArgument
from shared.pb.inference.v1 import inference_pb2 as pb
from shared.settings.request_limits import RequestLimits

JSON = "JSON"
NO_JSON, UNREAD = "no JSON", "unread"


@dataclass(frozen=True, slots=True)
class Question:
    """What is wrong with this?"""

    path: str
    num_bytes: int
    kind: str  # JSON, or a message of inference.v1
    max_model_len: int
    longest_token: int

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def begin(introduction: bytes) -> Callable[[bytes], bytes]:
    limits = RequestLimits(**json.loads(introduction))

    def answer(message: bytes) -> bytes:
        question = Question(**json.loads(message))
        try:
            _check(question, limits)
        except JSONDecodeError as error:
            return _encoded(error.msg, kind=NO_JSON, position=error.pos)
        except OSError:  # its client has left
            return _encoded("", kind=UNREAD)
        except InvalidArgument as error:
            return _encoded(error.message, field=error.field, reason=error.reason)
        return b""

    return answer


def _encoded(message: str, **more: Any) -> bytes:
    return json.dumps({"message": message, **more}).encode()


def _check(question: Question, limits: RequestLimits) -> None:
    data = Path(question.path).read_bytes()
    room = Room(question.max_model_len, question.longest_token)
    if question.kind == JSON:
        for _ in json_scan.check(data, limits):
            pass
        document = json_body.parse(data)
        json_body.check(document, data, limits)
        json_body.check_prompt(document, room)
        return
    kind: type[Message] = getattr(pb, question.kind)
    for _ in wire_scan.check(data, kind.DESCRIPTOR, limits):
        pass
    message = messages.parse(data, kind)
    messages.check(message, limits)
    messages.check_prompt(message, room)


if __name__ == "__main__":
    answer_all(begin)
