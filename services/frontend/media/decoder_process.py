"""A child process that decodes pictures under bounds of memory and processor time; decoder.py owns it.

Introduced with the bounds; asked with a JSON line that says the wanted size and, after it, a file's bytes; answers with
a JSON line and, if it could, the pixels after it.
"""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from dataclasses import asdict

import numpy as np

from quire.services.frontend.media import pictures
from quire.services.frontend.media.pictures import Picture
from quire.services.frontend.media.policy import MediaBounds
from quire.shared.errors import InvalidArgument
from quire.shared.media.picture_sizes import FixedSize
from quire.shared.process.child import serve_requests
from quire.shared.process.resource_limits import CpuTimeExceeded, cpu_time_limit, limit_memory

END = b"\n"  # of the JSON


def introduction(bounds: MediaBounds) -> bytes:
    return json.dumps(asdict(bounds)).encode()


def begin(introduced: bytes) -> Callable[[bytes], bytes]:
    """Limits the memory of this process and returns the function that answers a question with an encoded picture or a
    refusal. `introduced`: the MediaBounds as JSON."""
    bounds = MediaBounds(**json.loads(introduced))
    limit_memory(bounds.decode_bytes)

    def answer(message: bytes) -> bytes:
        """Decodes the picture of one question within the bounds on processor time and memory; returns it or the
        refusal, encoded."""
        head, _, content = message.partition(END)
        wanted = json.loads(head)
        try:
            with cpu_time_limit(bounds.decode_s):
                picture = pictures.decode(content, bounds, wanted and FixedSize(**wanted))
            return encode(picture)
        except InvalidArgument as error:
            return json.dumps({"refused": error.message}).encode() + END
        except CpuTimeExceeded:
            return json.dumps({"refused": over_time(bounds)}).encode() + END
        except MemoryError:
            return json.dumps({"refused": OVER_MEMORY}).encode() + END

    return answer


def question(content: bytes, size: FixedSize | None) -> bytes:
    return json.dumps(None if size is None else asdict(size)).encode() + END + content


OVER_MEMORY = "Failed to load image: decoding it takes too much memory"


def over_time(bounds: MediaBounds) -> str:
    return f"Failed to load image: decoding it takes more than {bounds.decode_s:g} s"


def encode(picture: Picture) -> bytes:
    return json.dumps({"shape": picture.pixels.shape}).encode() + END + picture.pixels.tobytes()


def decode(answer: bytes) -> Picture:
    """Returns the picture of an encoded answer. Raises InvalidArgument with the refusal of the process."""
    head, _, pixels = answer.partition(END)
    found = json.loads(head)
    if "refused" in found:
        raise InvalidArgument(found["refused"], field="messages")
    return Picture(np.frombuffer(pixels, dtype=np.uint8).reshape(found["shape"]))


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # it writes no file
    serve_requests(begin)
