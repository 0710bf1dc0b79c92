"""Access to the rows of this worker's media items from its event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.services.worker.engine.commands import ReadRows
from quire.services.worker.step.fetched_item import Rows
from quire.shared.errors import FailedPrecondition

if TYPE_CHECKING:
    from quire.services.worker.engine.engine import Engine


class RowPort:
    """RowReader of one worker: turns calls into commands for the device thread and awaits them."""

    def __init__(self, engine: Engine, layout: bytes) -> None:
        """`layout`: digest of what the rows depend on."""
        self._engine = engine
        self.layout = layout

    async def read_rows(self, epoch: int, identifier: bytes) -> Rows:
        """Returns rows in host memory, uint8 [num_rows, bytes of a row]. Raises FailedPrecondition if the worker is not
        in that epoch, NotFound for items that are not kept."""
        receiver = self._engine.receiver
        ours = 0 if receiver is None else receiver.epoch
        if receiver is None or ours != epoch:
            raise FailedPrecondition(f"epoch: this worker is in epoch {ours}, not {epoch}", field="epoch")
        rows: Rows = await self._engine.run_on_device(lambda reply: ReadRows(receiver, identifier, reply))
        return rows
