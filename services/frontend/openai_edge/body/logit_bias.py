"""Conversion of `logit_bias`, whose keys are texts in JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping

from quire.shared.errors import InvalidArgument

TOKEN_ID = re.compile(r"-?[0-9]{1,10}")


def logit_bias(written: Mapping[str, float]) -> dict[int, float]:
    """Converts the keys to token ids; raises InvalidArgument for a key that is not a decimal number."""
    for token_id in written:
        if not TOKEN_ID.fullmatch(token_id):
            message = f"logit_bias must map token ids to numbers; {token_id[:32]!r} is not a token id."
            raise InvalidArgument(message, field="logit_bias")
    return {int(token_id): bias for token_id, bias in written.items()}
