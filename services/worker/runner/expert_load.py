"""Token counts of experts, accumulated on the device and read periodically."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

LoadByLayer = Mapping[int, npt.NDArray[np.int64]]  # tokens of each expert


class ExpertLoad:
    """Reads a model's token counts without waiting for its steps. Used on the device thread."""

    def __init__(self, counts: Tensor, layers: Sequence[int]) -> None:
        """Takes the layers' own counters, int64 [len(layers), num_experts]."""
        self._counts, self._layers = counts, layers
        self._arriving: tuple[Tensor, torch.cuda.Event] | None = None
        self._known: Tensor = torch.zeros_like(counts, device="cpu")

    def read(self) -> LoadByLayer:
        """Returns the token counts of each expert by layer, accumulated since the model was built, without waiting for
        the device.

        On CUDA each call starts a copy and returns the last copy that has arrived, zeros at first.
        """
        if self._counts.is_cuda:
            self._take_what_arrived()
        else:
            self._known = self._counts.clone()
        return dict(zip(self._layers, self._known.numpy(), strict=True))

    def _take_what_arrived(self) -> None:
        """Stores the pending copy as the known counts and starts the next one; does nothing while a copy is in
        flight."""
        if self._arriving is not None:
            copy, event = self._arriving
            if not event.query():
                return
            self._known = copy
        copy = torch.empty_like(self._known, pin_memory=True)
        copy.copy_(self._counts, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._arriving = copy, event
