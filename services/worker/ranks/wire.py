"""Messages between rank 0 and another rank of its host.

A command is its number (8 bytes), its kind (1 byte) and its body: the serialized StepPlan of a plan, PrepareGrammar of
a grammar, DeviceOrder of an order, Transfer of a block transfer, a transfer id for its end, media items
(media_codec.py), or the identifier of one. Plans, ends of epochs and orders are answered by the number, whether they
succeeded (1 byte), and a text: a plan's fingerprint, an order's refusal (empty if it was executed) or the error. Other
commands are answered only if they fail."""

from __future__ import annotations

import enum
import hashlib
import struct
from dataclasses import dataclass

from quire.services.worker.step.step_inputs import StepInputs

HEAD = struct.Struct("<QB")
TRANSFER_ID_BYTES = 8


class CommandKind(enum.IntEnum):
    """Kinds of commands."""

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
    ENCODE_MEDIA = 11
    RELEASE_MEDIA = 12


ANSWERED = frozenset({CommandKind.PLAN, CommandKind.END_EPOCH, CommandKind.ORDER})


@dataclass(frozen=True, slots=True)
class Command:
    """A command from rank 0."""

    number: int
    kind: CommandKind
    body: bytes = b""

    def to_bytes(self) -> bytes:
        return HEAD.pack(self.number, self.kind) + self.body

    @classmethod
    def parse(cls, data: bytes) -> Command:
        number, kind = HEAD.unpack_from(data)
        return cls(number, CommandKind(kind), data[HEAD.size :])


@dataclass(frozen=True, slots=True)
class RankReply:
    """A reply to rank 0."""

    number: int  # number of the command; 0: the rank is ready
    done: bool
    text: bytes = b""  # a plan's fingerprint, an order's refusal, or the error if not done

    def to_bytes(self) -> bytes:
        return HEAD.pack(self.number, self.done) + self.text

    @classmethod
    def parse(cls, data: bytes) -> RankReply:
        number, done = HEAD.unpack_from(data)
        return cls(number, bool(done), data[HEAD.size :])


def fingerprint(inputs: StepInputs) -> bytes:
    """Returns 16 bytes that are equal for two ranks if they derived the same step: a digest of slots, tokens, positions
    and sampling. Tokens sampled in the previous step count as 0 in a mixed step."""
    digest = hashlib.blake2b(digest_size=16)
    token_ids = inputs.token_ids
    if 0 < len(inputs.prev_sampled_tokens) < len(token_ids):
        token_ids = token_ids.copy()
        token_ids[inputs.prev_sampled_tokens] = 0  # filled in only on ranks that sample
    arrays = (
        inputs.slots,
        token_ids,
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
