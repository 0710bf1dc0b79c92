"""Classifiers of what the tower sees, used in training only.

Through the frozen text network alone the tower learns shapes within minutes, but digits and words stay at chance: the
loss says only which answer was wrong. The guides train the tower directly to recognize which digit, word and letters a
picture has.
"""

from __future__ import annotations

import string

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tools.evals.pictures.scenes import WORDS, DigitScene, PictureScene, WordScene

MAX_LETTERS = max(map(len, WORDS))
NUM_LABELS = 2 + MAX_LETTERS
NONE = -1
NUM_DIGITS, NUM_LETTERS = 10, 1 + len(string.ascii_lowercase)
LETTER_WEIGHT = 0.5
_PLACES = {word: place for place, word in enumerate(WORDS)}


def labels_of(scene: PictureScene) -> list[int]:
    """Returns the digit, the place of the word in WORDS, and its letters, 0 behind the last one; NONE where the picture
    has none."""
    if isinstance(scene, DigitScene):
        return [scene.number] + [NONE] * (NUM_LABELS - 1)
    if isinstance(scene, WordScene):
        letters = [1 + string.ascii_lowercase.index(letter) for letter in scene.word]
        return [NONE, _PLACES[scene.word], *letters, *[0] * (MAX_LETTERS - len(letters))]
    return [NONE] * NUM_LABELS


class Guides(nn.Module):
    """Learned queries that gather features of patches, and a classifier for each label."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(NUM_LABELS, hidden_size) * 0.1)
        self.digits = nn.Linear(hidden_size, NUM_DIGITS)
        self.words = nn.Linear(NUM_LABELS * hidden_size, len(WORDS))
        self.letters = nn.Linear(hidden_size, NUM_LETTERS)

    def forward(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the loss, and the shares of digits and words that are recognized. features [num_pictures,
        num_patches, hidden_size], labels [num_pictures, NUM_LABELS]."""
        x = F.layer_norm(features.float(), features.shape[-1:])
        attention = (x @ self.queries.T).softmax(dim=1)
        gathered = attention.transpose(1, 2) @ x  # [num_pictures, NUM_LABELS, hidden_size]
        digits, words = self.digits(gathered[:, 0]), self.words(gathered.flatten(1))
        letters = self.letters(gathered[:, 2:]).flatten(0, 1)
        loss = _loss(digits, labels[:, 0]) + _loss(words, labels[:, 1])
        loss = loss + LETTER_WEIGHT * _loss(letters, labels[:, 2:].flatten())
        return loss, torch.stack((_share(digits, labels[:, 0]), _share(words, labels[:, 1])))


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean cross-entropy over the pictures that have the label."""
    total = F.cross_entropy(logits, labels, ignore_index=NONE, reduction="sum")
    return total / (labels != NONE).sum().clamp_min(1)


def _share(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(-1) == labels).sum() / (labels != NONE).sum().clamp_min(1)
