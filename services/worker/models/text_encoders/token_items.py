"""Token ids of encoder prompts, as items of an encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.models.vision.port import MediaInput

MAX_TOKENS = 16_384  # computed at once, so that the memory of activations is bounded


def encode_prompts(
    items: Sequence[MediaInput], encode: Callable[[Tensor], Tensor], *, vocab_size: int, max_tokens: int
) -> list[Tensor]:
    """Computes the rows of prompts, [num_tokens, hidden_size] each: those of equal length together, by `encode` from
    int64 [num_prompts, num_tokens] to [num_prompts, num_tokens, hidden_size]. Raises InvalidArgument for items that
    are no prompt of at most `max_tokens` tokens of the vocabulary."""
    import torch

    prompts = [_token_ids(item, vocab_size, max_tokens) for item in items]
    rows: dict[int, Tensor] = {}
    for length in dict.fromkeys(len(prompt) for prompt in prompts):
        numbers = [number for number, prompt in enumerate(prompts) if len(prompt) == length]
        whole = torch.stack([prompts[number] for number in numbers])
        parts = [encode(batch) for batch in whole.split(max(1, MAX_TOKENS // length))]
        rows |= dict(zip(numbers, torch.cat(parts).unbind(0), strict=True))
    return [rows[number] for number in range(len(prompts))]


def _token_ids(item: MediaInput, vocab_size: int, max_tokens: int) -> Tensor:
    """Returns the token ids of an item, int64 [num_tokens]. Raises InvalidArgument."""
    shape = list(item.pixels.shape)
    if len(shape) != 3 or shape[:2] != [1, 1] or not 1 <= shape[2] <= max_tokens:
        text = f"media: token ids of shape {shape}, and the encoder takes [1, 1, 1 to {max_tokens}]; shorten the prompt"
        raise InvalidArgument(text, field="media")
    ids = item.pixels.reshape(-1).long()
    least, most = (int(bound) for bound in ids.aminmax())
    if least < 0 or most >= vocab_size:
        text = f"media: token ids from {least} to {most}, and the vocabulary has {vocab_size}; send ids of this model"
        raise InvalidArgument(text, field="media")
    return ids
