"""What goes to a scheduler: a submission is a message, unless several wait for the stream. Those travel together.

In a burst each message costs both ends as much as what is in it, and the scheduler is one for all frontends.
"""

from __future__ import annotations

from typing import Protocol

from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb

MAX_BYTES = 1 << 20  # in a message of several; gRPC takes 4 MB


class Link(Protocol):
    """The session's stream."""

    @property
    def last_unsent(self) -> pb.SessionRequest | None:
        """What was sent last, if it still waits to be written."""

    def send(self, message: pb.SessionRequest) -> None: ...


class Outbox:
    """`submit` never blocks."""

    def __init__(self, link: Link, *, takes_further: bool) -> None:
        """`takes_further`: the scheduler reads messages of several."""
        self._link = link
        self._takes_further = takes_further
        self._num_bytes = 0  # of the last message

    def submit(self, submission: pb.Submission) -> None:
        last, num_bytes = self._link.last_unsent, submission.ByteSize()
        if self._takes_further and last is not None and last.HasField("submission"):
            self._num_bytes += num_bytes
            if self._num_bytes <= MAX_BYTES:
                last.further_submissions.append(submission)
                return
        self._num_bytes = num_bytes
        self._link.send(pb.SessionRequest(submission=submission))
