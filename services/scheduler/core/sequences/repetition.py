"""Detection of repetitive output, which ends a sequence."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RepetitionRule:
    """Pattern of min_pattern_size to max_pattern_size tokens, repeated min_count times at the end of the output."""

    min_pattern_size: int
    max_pattern_size: int
    min_count: int

    @property
    def window(self) -> int:
        """Maximum number of output tokens that the rule looks at."""
        return self.max_pattern_size * self.min_count

    def repeats(self, output: list[int]) -> bool:
        """Returns whether `output` (the last output tokens) ends with min_count copies of a pattern of an allowed
        size."""
        for size in range(self.min_pattern_size, self.max_pattern_size + 1):
            span = size * self.min_count
            if span > len(output):
                return False
            tail = output[-span:]
            if tail == tail[-size:] * self.min_count:
                return True
        return False
