"""Decides from the tensors whether a checkpoint's output head is tied to its embedding, as transformers does.

A config.json with tie_word_embeddings may come with an lm_head.weight of other values, for instance if a wrapper's
default hides its text model's value. transformers then does not tie; neither must a worker.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.models.loading.loader import TensorSource, named_tensors
from quire.services.worker.models.loading.tensor_names import EMBEDDING, HEAD
from quire.services.worker.models.transformers_backend.transformers_config import TransformersConfig
from quire.shared.errors import InvalidArgument
from quire.shared.logs import logger

log = logger("worker.build")

MOST_ROWS = 8192  # rows compared at a time
TIE = "tie_word_embeddings"


def resolve_output_head(config: DecoderConfig, folder: Path) -> DecoderConfig:
    """Returns `config`, untied if the folder's files have an output head whose values differ from the embedding's.

    Logs a warning then. Folders that cannot be read leave it tied: the loader reports them later.
    """
    if not config.tie_word_embeddings or config.num_classes:
        return config
    head, embedding = _both(folder)
    if head is None or embedding is None or _are_equal(head, embedding):
        return config
    log.warning("the output head is not tied: lm_head.weight differs from the embedding", model=str(folder))
    if isinstance(config, TransformersConfig):
        return replace(config, tie_word_embeddings=False, values={**config.values, TIE: False})
    return replace(config, tie_word_embeddings=False)


def _both(folder: Path) -> tuple[TensorSource | None, TensorSource | None]:
    """Returns the sources of output head and embedding; None for a missing one, or for both if the folder is
    invalid."""
    head = embedding = None
    try:
        for name, source in named_tensors(folder):
            if name.endswith(HEAD):
                head = source
            elif name.endswith(EMBEDDING):
                embedding = source
    except InvalidArgument:  # the loader reports invalid files later
        return None, None
    return head, embedding


def _are_equal(one: TensorSource, other: TensorSource) -> bool:
    """Compares shapes, then values, MOST_ROWS rows at a time."""
    if list(one.shape) != list(other.shape):
        return False
    for first in range(0, one.shape[0], MOST_ROWS):
        rows = (slice(first, first + MOST_ROWS), slice(None))
        if not torch.equal(one.parts[rows], other.parts[rows]):
            return False
    return True
