"""Guides of the vision training: labels of scenes, and a loss that reads them and nothing else."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from tools.evals.pictures.scenes import WORDS, DigitScene, DrawnShape, ShapesScene, WordScene  # noqa: E402
from tools.training.pictures.guides import MAX_LETTERS, NONE, NUM_LABELS, Guides, labels_of  # noqa: E402

SHAPES = ShapesScene((DrawnShape("circle", "red", 4),))


def test_labels_name_the_digit_or_the_word_and_its_letters() -> None:
    digit = DigitScene(0)
    assert labels_of(digit) == [digit.number, *[NONE] * (NUM_LABELS - 1)]
    word = WORDS[0]
    letters = [ord(letter) - ord("a") + 1 for letter in word]
    expected = [NONE, 0, *letters, *[0] * (MAX_LETTERS - len(word))]
    assert labels_of(WordScene(word, "red", "white")) == expected
    assert labels_of(SHAPES) == [NONE] * NUM_LABELS


def test_pictures_without_labels_have_no_loss() -> None:
    loss, recognized = Guides(8)(torch.randn(2, 5, 8), torch.tensor([labels_of(SHAPES)] * 2))
    assert loss.item() == 0
    assert recognized.tolist() == [0, 0]


def test_features_that_tell_digits_apart_are_learned() -> None:
    torch.manual_seed(0)
    features = torch.randn(10, 4, 16) + 4 * torch.nn.functional.one_hot(torch.arange(10), 16)[:, None]
    labels = torch.full((10, NUM_LABELS), NONE)
    labels[:, 0] = torch.arange(10)
    guides = Guides(16)
    optimizer = torch.optim.Adam(guides.parameters(), 0.05)
    for _ in range(60):
        optimizer.zero_grad()
        loss, recognized = guides(features, labels)
        loss.backward()
        optimizer.step()
    assert recognized[0] == 1
    assert loss < 0.1
