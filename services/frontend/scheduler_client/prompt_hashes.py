"""Block hashes of a prompt, computed once for the prefix lookup and all submissions."""

from __future__ import annotations

from collections.abc import Sequence

from quire.shared.kv import block_hash
from quire.shared.kv.block_hash import MediaRange
from quire.shared.pb.common.v1 import model_pb2


def supported_block_size(layout: model_pb2.BlockLayout) -> int:
    """Returns the block size; 0 while no worker has reported it, or if the hash scheme is unknown to this version."""
    return layout.block_size if layout.hash_scheme == block_hash.SCHEME else 0


class PromptHashes:
    """Lazily computed block hashes of one prompt. `root` covers salt and adapter; `prompt` is an i32 column; `media`
    are its pictures, by offset."""

    __slots__ = ("_by_block_size", "_media", "_prompt", "root")

    def __init__(self, root: bytes, prompt: bytes, media: Sequence[MediaRange] = ()) -> None:
        self.root = root
        self._prompt = prompt
        self._media = media
        self._by_block_size: dict[int, list[bytes]] = {}

    def block_hashes(self, block_size: int) -> list[bytes]:
        """Returns the hashes of the prompt's full blocks of `block_size` tokens, computed at the first call per block
        size."""
        found = self._by_block_size.get(block_size)
        if found is None:
            found = self._by_block_size[block_size] = block_hash.chain_with_media(
                self.root, self._prompt, block_size, self._media
            )
        return found

    def block_hashes_with_output(self, block_size: int, tokens: bytes) -> list[bytes]:
        """Returns the hashes of the full blocks of the prompt followed by `tokens`."""
        head = self.block_hashes(block_size)
        if not tokens:
            return head
        rest = self._prompt[len(head) * block_size * block_hash.TOKEN_BYTES :] + tokens
        parent, start = head[-1] if head else self.root, len(head) * block_size
        return head + block_hash.chain_with_media(parent, rest, block_size, self._media, start)
