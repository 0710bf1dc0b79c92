"""Layout of recurrent states in the pages that hold other layers' keys and values.

A page has two parts of one size, a block's keys and its values in layers with attention. A recurrent layer stores in
the first the last inputs of its convolution, then the states of its first heads, and in the second the other heads'
states. Everything is float32, independent of the model's dtype, because a state sums over the whole past. The numbers
of heads minimize the larger part. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # sizes are also read without torch
    from torch import Tensor

WORD_BYTES = 4


@dataclass(frozen=True)
class StateShape:
    """Sizes of one layer's state."""

    num_channels: int  # of the convolution
    conv_width: int  # tokens it covers, including the current one
    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_inputs(self) -> int:
        """Words of the convolution's inputs, [conv_width - 1, num_channels], the oldest token first."""
        return (self.conv_width - 1) * self.num_channels

    @property
    def head_words(self) -> int:
        """Words of a head's state, [key_dim, value_dim]."""
        return self.key_dim * self.value_dim

    @property
    def num_words(self) -> int:
        return self.num_inputs + self.num_heads * self.head_words

    @cached_property
    def num_first(self) -> int:
        """Number of heads with states in the first part."""
        return min(range(self.num_heads + 1), key=self._larger_part)

    @cached_property
    def part_words(self) -> int:
        """Words that each part has to hold."""
        return self._larger_part(self.num_first)

    def _larger_part(self, num_first: int) -> int:
        first = self.num_inputs + num_first * self.head_words
        return max(first, (self.num_heads - num_first) * self.head_words)


@dataclass(frozen=True, slots=True)
class StatePages:
    """View of one layer's part of all pages."""

    first: Tensor  # float32 [num_blocks, words], contiguous rows of at least part_words
    second: Tensor  # the same
    shape: StateShape

    @property
    def inputs(self) -> Tensor:
        """Inputs of the convolution, [num_blocks, conv_width - 1, num_channels]."""
        shape = self.shape
        return self.first[:, : shape.num_inputs].unflatten(1, (shape.conv_width - 1, shape.num_channels))

    @property
    def heads(self) -> tuple[Tensor, Tensor]:
        """States of the first heads and of the others, [num_blocks, number of heads, key_dim, value_dim]."""
        shape = self.shape
        size = (shape.key_dim, shape.value_dim)
        end = shape.num_inputs + shape.num_first * shape.head_words
        rest = shape.num_heads - shape.num_first
        return (
            self.first[:, shape.num_inputs : end].unflatten(1, (shape.num_first, *size)),
            self.second[:, : rest * shape.head_words].unflatten(1, (rest, *size)),
        )
