"""Models with learned position embeddings and no rotation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from quire.services.worker.layers.embedding import Embedding
from quire.services.worker.models.causal_lm import CausalLM

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.attention.port import AttentionBackend
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.layers.placement import Destination, LayerPlacement
    from quire.services.worker.models.config.decoder_config import DecoderConfig


class LearnedPositions(CausalLM):
    """Decoder that adds a learned vector for the position to each token's embedding, on the first pipeline stage."""

    positions_name: ClassVar[str]
    first_row: ClassVar[int] = 0  # table row of position 0

    def __init__(
        self, config: DecoderConfig, backend: AttentionBackend, place: LayerPlacement, num_positions: int
    ) -> None:
        super().__init__(config, backend, place, num_positions)
        if not self.stage.is_first:
            return
        rows = self.first_row + config.max_positions
        self._positions = Embedding(self.positions_name, rows, config.hidden_size, place, sharded=False)

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield from super().destinations()
        if self.stage.is_first:
            yield from self._positions.destinations()

    def embed(self, batch: ForwardBatch) -> Tensor:
        """Returns token embeddings plus position embeddings, [num_tokens, hidden_size], in new memory."""
        rows = batch.positions + self.first_row if self.first_row else batch.positions
        return super().embed(batch).add_(self._positions(rows))
