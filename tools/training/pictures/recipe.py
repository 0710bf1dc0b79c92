"""All choices of the vision training, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field

MEAN = STD = 0.5
"""Mean and standard deviation of the pixels, scaled to 0 to 1, for all channels."""


SCENES: dict[str, float] = {"digit": 0.2, "word": 0.3, "single": 0.16, "alike": 0.14, "different": 0.2}
"""Share of the pictures of each kind of scene."""


@dataclass(frozen=True, slots=True)
class TowerShape:
    """Sizes of the vision tower, in the words of its config.json."""

    hidden_size: int = 192
    intermediate_size: int = 704
    num_hidden_layers: int = 6
    num_attention_heads: int = 6
    image_size: int = 96
    patch_size: int = 8
    layer_norm_eps: float = 1e-6

    @property
    def num_patches(self) -> int:
        """Patches of a picture, which is the number of its embeddings as well."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True, slots=True)
class PictureRecipe:
    """Training settings. Of `seconds` and `steps`, the one that is reached first ends the training; the schedule
    follows it."""

    seconds: float
    steps: int | None = None
    seed: int = 1
    pictures: int = 512  # of a step
    text_tokens: int = 88  # of one picture's conversation, on average, at most
    targets: int = 22  # of one picture's conversation, on average, at most
    workers: int = 14
    muon_lr: float = 0.02
    adam_lr: float = 0.003
    guide_lr: float = 0.002
    guided: float = 0.0  # first share of the run, without the text network
    warm_up: float = 0.02
    decay: float = 0.6
    shape: TowerShape = field(default_factory=TowerShape)
    scenes: dict[str, float] = field(default_factory=lambda: dict(SCENES))

    @property
    def batch_tokens(self) -> int:
        """Number of positions of a batch."""
        return self.pictures * (self.shape.num_patches + self.text_tokens)

    @property
    def batch_targets(self) -> int:
        """Number of positions of a batch that the loss uses."""
        return self.pictures * self.targets

    def lr_scale(self, progress: float) -> float:
        """Returns the share of the peak learning rate at this share of the run: linear up, level, linear down to
        zero."""
        return max(0.0, min(1.0, progress / self.warm_up, (1.0 - progress) / self.decay))


MOST_QUESTIONS = 4
"""About one picture, in one conversation."""

DOCUMENT_SHARE, LATER_SHARE, EARLIER_SHARE = 0.1, 0.05, 0.1
"""Share of conversations with a text before the first question; with a question about that text as well; and with a
turn without a picture before."""
