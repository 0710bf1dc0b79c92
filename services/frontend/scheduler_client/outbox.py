"""Outgoing messages of a session: submissions that wait for the stream are merged into one message.

In a burst a message costs both ends as much as its content does, and one scheduler serves all frontends.
"""

from __future__ import annotations

from typing import Protocol

from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb

MAX_BYTES = 1 << 20  # of a merged message; gRPC's limit is 4 MB


class Link(Protocol):
    """The session's outgoing stream, as the outbox uses it."""

    @property
    def last_unsent(self) -> pb.SessionRequest | None:
        """The last message, if it is still queued."""

    def send(self, message: pb.SessionRequest) -> None: ...


class Outbox:
    """Queues submissions on the session's stream, merged into one message while it waits; `submit` never blocks."""

    def __init__(self, link: Link, *, supports_merging: bool) -> None:
        """Wraps the link. `supports_merging`: the scheduler supports merged submissions."""
        self._link = link
        self._supports_merging = supports_merging
        self._num_bytes = 0  # size of the last message

    def submit(self, submission: pb.Submission) -> None:
        """Sends a submission, or appends it to the last message if that is a queued submission, stays within MAX_BYTES,
        and the scheduler supports merging."""
        last, num_bytes = self._link.last_unsent, submission.ByteSize()
        if self._supports_merging and last is not None and last.HasField("submission"):
            self._num_bytes += num_bytes
            if self._num_bytes <= MAX_BYTES:
                last.further_submissions.append(submission)
                return
        self._num_bytes = num_bytes
        self._link.send(pb.SessionRequest(submission=submission))
