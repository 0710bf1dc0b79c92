"""The optimiser: Muon for matrices, AdamW for the embedding and the norms.

Muon (Keller Jordan, 2024, https://kellerjordan.github.io/posts/muon) takes the momentum of a matrix to the nearest
orthogonal one by a Newton-Schulz iteration, so that every direction learns at the same speed.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

# A quintic whose repeated use takes singular values in (0, 1] to about 1; the coefficients are those of the source.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


def orthogonalize(matrices: Tensor) -> Tensor:
    """Returns approximately the nearest semi-orthogonal matrices to [count, rows, columns] ones, in bfloat16, by
    Newton-Schulz iterations."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Muon:
    """Muon with Nesterov momentum over matrices, all of one shape in one batch of products."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        self.lr, self.momentum, self.weight_decay = lr, momentum, weight_decay
        self._groups: dict[tuple[int, int], list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            rows, columns = parameter.shape
            self._groups[min(rows, columns), max(rows, columns)].append(parameter)
        self._momenta = {key: torch.zeros(len(g), *key, device=g[0].device) for key, g in self._groups.items()}

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Updates all matrices from their gradients with the learning rate times `scale`, weight decay included."""
        for key, group in self._groups.items():
            # Tall matrices lie down: the iteration multiplies by the smaller side.
            gradients = torch.stack([_lying(p.grad) for p in group if p.grad is not None])
            momentum = self._momenta[key].lerp_(gradients, 1 - self.momentum)
            update = orthogonalize(gradients.lerp(momentum, self.momentum)).float()
            torch._foreach_mul_(group, 1 - self.lr * scale * self.weight_decay)
            steps = [-self.lr * scale * max(1.0, p.shape[0] / p.shape[1]) ** 0.5 for p in group]
            moves = [_like(u, p) * s for u, p, s in zip(update.unbind(), group, steps, strict=True)]
            torch._foreach_add_(group, moves)


def _lying(matrix: Tensor) -> Tensor:
    return matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix


def _like(update: Tensor, parameter: Tensor) -> Tensor:
    return update.mT if update.shape != parameter.shape else update


class Optimizer:
    """Muon and AdamW under one learning-rate scale."""

    def __init__(self, network: nn.Module, muon_lr: float, adam_lr: float) -> None:
        matrices = [p for name, p in network.named_parameters() if p.ndim == 2 and not name.endswith("embedding")]
        others = [p for p in network.parameters() if all(p is not matrix for matrix in matrices)]
        self._muon = Muon(matrices, muon_lr, momentum=0.95, weight_decay=0.05)
        self._adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.0)
        self._adam_lr = adam_lr
        self._network = network

    def step(self, scale: float) -> None:
        """Update every parameter with its learning rate times `scale`, and forget the gradients."""
        self._muon.step(scale)
        for group in self._adam.param_groups:
            group["lr"] = self._adam_lr * scale
        self._adam.step()
        self._network.zero_grad(set_to_none=True)
