"""Random weights in place of a checkpoint's, for load_format "dummy"."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.services.worker.layers.placement import LoadableModel, memory_of
from quire.services.worker.models.loading.layer_storage import LayerStorage

DUMMY_PERIOD = 1_048_573  # prime, so that repeating it does not repeat a weight's rows


def fill_dummy(model: LoadableModel, seed: int) -> None:
    """Fills and finishes the model with random weights, equal for equal seeds, that keep activations near 1 at any
    depth; norms are 1, biases 0."""
    destinations = [(name, memory_of(destination)) for name, destination in model.destinations()]
    noise = torch.randn(DUMMY_PERIOD, generator=torch.Generator().manual_seed(seed))
    noise = noise.to(destinations[0][1].device)  # on the device: host threads are slow while kernels are compiled
    storage = LayerStorage(model, lambda: None)
    for position, (name, destination) in enumerate(destinations):
        storage.allocate((name,))
        if not destination.is_floating_point():
            destination.random_(generator=torch.Generator(destination.device).manual_seed(seed + position))
        elif destination.dim() == 1:
            destination.fill_(0.0 if name.endswith(".bias") else 1.0)
        else:
            _repeat(noise.roll(position * 7919), destination, scale=destination.size(1) ** -0.5)
        storage.release((name,))
    model.finish()


def _repeat(noise: Tensor, destination: Tensor, scale: float) -> None:
    """Fills a matrix by repeating the same numbers: much faster than drawing billions of them."""
    noise = (noise * scale).to(destination)
    dense = next((view for view in (destination, destination.mT) if view.is_contiguous()), None)
    filled = destination.new_empty(destination.shape) if dense is None else dense  # None: a part of larger rows
    flat = filled.view(-1)
    whole = flat.numel() // noise.numel() * noise.numel()
    flat[:whole].view(-1, noise.numel()).copy_(noise)
    flat[whole:].copy_(noise[: flat.numel() - whole])
    if dense is None:
        destination.copy_(filled)
