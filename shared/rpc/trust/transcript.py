"""Computes and verifies the proofs of a handshake. Pure functions."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

NONCE_BYTES = 32
CONTEXT = "quire/handshake/1"

Side = Literal["client", "server"]


@dataclass(frozen=True, slots=True)
class HandshakeTranscript:
    """Parties, address and nonces of a handshake, which its proofs cover. Names are role and id."""

    service: str
    client: str
    server: str
    dialled: str
    client_nonce: bytes
    server_nonce: bytes

    def proof(self, secret: bytes, side: Side) -> bytes:
        """Returns the HMAC-SHA-256 of the transcript and the proving side under the secret; every part is preceded
        by its length."""
        texts = (CONTEXT, side, self.service, self.client, self.server, self.dialled)
        parts = (*(text.encode() for text in texts), self.client_nonce, self.server_nonce)
        message = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
        return hmac.digest(secret, message, "sha256")

    def is_proved(self, proof: bytes, secrets: Iterable[bytes], side: Side) -> bool:
        """Whether a proof matches one of the secrets, in constant time."""
        found = [hmac.compare_digest(self.proof(secret, side), proof) for secret in secrets]
        return any(found)
