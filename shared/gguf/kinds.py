"""Element types of GGUF tensors and token types of GGUF vocabularies, by the format's numbers."""

from __future__ import annotations

import enum
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ElementKind:
    """Storage format: `block_bytes` bytes hold `block_size` consecutive elements of a row."""

    name: str
    block_size: int
    block_bytes: int

    @property
    def is_quantized(self) -> bool:
        return self.block_size > 1


KINDS = {
    0: ElementKind("F32", 1, 4),
    1: ElementKind("F16", 1, 2),
    2: ElementKind("Q4_0", 32, 18),
    3: ElementKind("Q4_1", 32, 20),
    6: ElementKind("Q5_0", 32, 22),
    7: ElementKind("Q5_1", 32, 24),
    8: ElementKind("Q8_0", 32, 34),
    12: ElementKind("Q4_K", 256, 144),
    13: ElementKind("Q5_K", 256, 176),
    14: ElementKind("Q6_K", 256, 210),
    30: ElementKind("BF16", 1, 2),
}

# Formats that are not supported, by name for error messages.
UNSUPPORTED_KINDS = {
    **{9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"},
}


class TokenKind(enum.IntEnum):
    """Token types (tokenizer.ggml.token_type)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6
