"""Prompts of encoder-decoder models of text: workers fetch and encode them as they do media, and decoders attend to the
result."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.services.frontend.media import identity
from quire.services.frontend.media.pipeline import NoMedia
from quire.services.frontend.media.store import MediaHolds, MediaStore
from quire.services.frontend.media.tiles import MediaTiles
from quire.shared.columns import i32_bytes
from quire.shared.media.modalities import TEXT
from quire.shared.media.processor import TileLayout
from quire.shared.metrics.media import MediaStatus
from quire.shared.models.text_encoders import TextEncoderInfo
from quire.shared.pb.common.v1 import media_pb2


class EncoderPrompts(NoMedia):
    """PromptMedia of a model whose encoder gets the prompts, as items of one row for each token; it takes no other
    media."""

    modalities: Sequence[str] = ()

    def __init__(self, info: TextEncoderInfo, digest: bytes, store: MediaStore) -> None:
        """Takes the sizes of the encoder, and the store that keeps items. `digest`: identity.model_digest()."""
        self.encoder = self
        self.store, self._info, self._digest = store, info, digest

    @property
    def max_tokens(self) -> int:
        """Most tokens of an encoder prompt."""
        return self._info.max_tokens

    def holding(self) -> MediaHolds:
        return self.store.holding()

    def status(self) -> MediaStatus:
        """Numbers for the metrics page."""
        store = self.store
        return MediaStatus(store.num_queries, store.num_hits, 0, store.held_bytes, store.idle_bytes)

    def decoder_prompt(self, given: Sequence[int] | None) -> Sequence[int]:
        """Returns the tokens of the decoder: those that the model's files name, or those of a request, after the one
        with which the decoder starts."""
        start = self._info.decoder_start
        if given is None:
            return start
        return given if list(given[:1]) == [start[0]] else [start[0], *given]

    async def item(self, token_ids: Sequence[int], holds: MediaHolds) -> media_pb2.MediaItem:
        """Returns the item of an encoder prompt, which `holds` holds. It is part of the hashes of all blocks, as its
        range is the first token. Raises ResourceExhausted if requests hold too many bytes."""

        async def make() -> MediaTiles:
            layout = TileLayout(1, 1, len(token_ids), is_sound=True)
            return MediaTiles(layout, np.asarray(token_ids, np.float32).tobytes())

        identifier = identity.prompt_identifier(self._digest, i32_bytes(token_ids))
        await holds.hold(identifier, make, b"")
        return media_pb2.MediaItem(
            identifier=identifier, length=1, num_embeddings=len(token_ids), modality=TEXT, is_attended=True
        )

    def warm_up(self) -> None:
        """Does nothing: no process prepares prompts."""

    async def close(self) -> None:
        await self.store.close()
