"""Where the states of recurrent layers lie: in the pages that hold other layers' keys and values.

A page has two parts of one size, which are a block's keys and its values in layers with attention. A recurrent layer
has in the first the last inputs of its convolution, then the states of its first heads, in the second those of the
others; all of it float32, whatever the model's dtype: a state is the sum of all that came before. Numbers of heads are
chosen so that the larger part is as small as can be. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # sizes are also read where there is no torch
    from torch import Tensor

WORD_BYTES = 4


@dataclass(frozen=True)
class StateShape:
    """Sizes of one layer's state."""

    num_channels: int  # of the convolution
    conv_width: int  # tokens that it sees, the present one included
    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_inputs(self) -> int:
        """Words of the convolution's inputs, [conv_width - 1, num_channels], the oldest token first."""
        return (self.conv_width - 1) * self.num_channels

    @property
    def head_words(self) -> int:
        """Of a head's state, [key_dim, value_dim]."""
        return self.key_dim * self.value_dim

    @property
    def num_words(self) -> int:
        return self.num_inputs + self.num_heads * self.head_words

    @cached_property
    def num_first(self) -> int:
        """Heads whose states are in the first part."""
        return min(range(self.num_heads + 1), key=self._larger_part)

    @cached_property
    def part_words(self) -> int:
        """What each part must have room for."""
        return self._larger_part(self.num_first)

    def _larger_part(self, num_first: int) -> int:
        first = self.num_inputs + num_first * self.head_words
        return max(first, (self.num_heads - num_first) * self.head_words)


@dataclass(frozen=True, slots=True)
class StatePages:
    """A layer's share of all pages."""

    first: Tensor  # float32 [num_blocks, words], rows side by side, at least part_words of each
    second: Tensor  # the same
    shape: StateShape

    @property
    def inputs(self) -> Tensor:
        """[num_blocks, conv_width - 1, num_channels]"""
        shape = self.shape
        return self.first[:, : shape.num_inputs].unflatten(1, (shape.conv_width - 1, shape.num_channels))

    @property
    def heads(self) -> tuple[Tensor, Tensor]:
        """[num_blocks, number of heads, key_dim, value_dim]: of the first heads, and of the others."""
        shape = self.shape
        size = (shape.key_dim, shape.value_dim)
        end = shape.num_inputs + shape.num_first * shape.head_words
        rest = shape.num_heads - shape.num_first
        return (
            self.first[:, shape.num_inputs : end].unflatten(1, (shape.num_first, *size)),
            self.second[:, : rest * shape.head_words].unflatten(1, (rest, *size)),
        )
