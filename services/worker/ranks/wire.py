"""What goes between rank 0 and another rank of its host.

A command is its number (8 bytes), its kind (1 byte) and what belongs to it: a plan is the serialized StepPlan, a
grammar its PrepareGrammar, an order its DeviceOrder, a move its Transfer, the end of a move the transfer's id. Plans,
rests and orders are answered by their number and whether they went well (1 byte): a plan's fingerprint, why an order
was refused (nothing if it was not), or the error's text; anything else only if it went wrong.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from dataclasses import dataclass

from quire.services.worker.step.step_inputs import StepInputs

HEAD = struct.Struct("<QB")
TRANSFER_ID_BYTES = 8


class CommandKind(enum.IntEnum):
    """Of a command."""

    PLAN = 1
    END_EPOCH = 2
    RESET_CACHE = 3
    STOP = 4
    PREPARE_GRAMMAR = 5
    RELEASE_GRAMMAR = 6
    ORDER = 7
    SETTLE = 8
    MOVE_BLOCKS = 9
    BLOCKS_MOVED = 10


ANSWERED = frozenset({CommandKind.PLAN, CommandKind.END_EPOCH, CommandKind.ORDER})


@dataclass(frozen=True, slots=True)
class Command:
    """From rank 0."""

    number: int
    kind: CommandKind
    body: bytes = b""

    def encode(self) -> bytes:
        return HEAD.pack(self.number, self.kind) + self.body

    @classmethod
    def decode(cls, data: bytes) -> Command:
        number, kind = HEAD.unpack_from(data)
        return cls(number, CommandKind(kind), data[HEAD.size :])


@dataclass(frozen=True, slots=True)
class RankReply:
    """To rank 0."""

    number: int  # the command's; 0: the rank is ready
    done: bool
    text: bytes = b""  # a plan's fingerprint; why an order was refused; the error, if it is not done

    def encode(self) -> bytes:
        return HEAD.pack(self.number, self.done) + self.text

    @classmethod
    def decode(cls, data: bytes) -> RankReply:
        number, done = HEAD.unpack_from(data)
        return cls(number, bool(done), data[HEAD.size :])


def fingerprint(inputs: StepInputs) -> bytes:
    """16 bytes that are equal for two ranks if they derived the same step."""
    digest = hashlib.blake2b(digest_size=16)
    given = inputs.token_ids
    if 0 < len(inputs.prev_sampled_tokens) < len(given):
        given = given.copy()
        given[inputs.prev_sampled_tokens] = 0  # put there by ranks that sample
    arrays = (
        inputs.slots,
        given,
        inputs.positions,
        inputs.slot_mapping,
        inputs.query_start,
        inputs.seq_lens,
        inputs.prev_sampled_tokens,
        inputs.prev_sampled_slots,
        inputs.sampling_slots,
        inputs.sampling_tokens,
        inputs.sample_positions,
        inputs.completed_slots,
    )
    for array in arrays:
        digest.update(len(array).to_bytes(8, "little"))
        digest.update(array.tobytes())
    return digest.digest()
