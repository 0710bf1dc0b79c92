"""Retrieval models of pages, which compare queries with pictures of pages token by token: ColPali (arXiv 2407.01449)
and ColQwen2.

Their checkpoints hold a vision-language model and a projection of its hidden states. In the format of transformers,
config.json wraps that of the model inside in `vlm_config`; in the authors' own it is that of the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.shared.errors import InvalidArgument

INNER = "vlm_config"
PROJECTION, OWN_PROJECTION = "embedding_proj_layer", "custom_text_proj"  # of transformers, and of the authors
DIMENSIONS = 128  # of a vector, unless config.json says otherwise
NUM_BUFFERS = 10  # padding tokens after a query, which have vectors as well
DTYPES = ("dtype", "torch_dtype")


@dataclass(frozen=True, slots=True)
class PageTexts:
    """Texts around queries and pages; special tokens in them are recognized, in queries they are not."""

    lead: str  # special token before a query; empty: none
    query_prefix: str
    query_suffix: str
    page: str  # prompt of a page, with the placeholder of its picture


@dataclass(frozen=True, slots=True)
class PageModel:
    """One family of retrieval models: the model inside, and the texts with which it was trained."""

    inner: str  # architecture of the model inside
    lead: str
    query_prefix: str
    padding: str  # the tokenizer's padding token, unless its files name another
    page: str  # prompt of a page; {prompt}: the prompt in the processor's file, else the family's own
    prompt: str


COLPALI = PageModel(
    inner="ColPaliForRetrieval",
    lead="<bos>",
    query_prefix="Question: ",
    padding="<pad>",
    page="<image><bos>{prompt}\n",
    prompt="Describe the image.",
)
COLQWEN2 = PageModel(
    inner="Qwen2VLForConditionalGeneration",
    lead="",
    query_prefix="Query: ",
    padding="<|endoftext|>",
    page="{prompt}",
    prompt="<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Describe the image.<|im_end|><|endoftext|>",
)
FAMILIES = {
    "ColPali": COLPALI,
    "ColPaliForRetrieval": COLPALI,
    "ColQwen2": COLQWEN2,
    "ColQwen2ForRetrieval": COLQWEN2,
}


def page_model(config: Mapping[str, Any]) -> PageModel | None:
    """Returns the family of a retrieval model; None for other models. `config`: config.json."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else ""
    return FAMILIES.get(name) if isinstance(name, str) else None


def unwrapped(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of the model inside of a retrieval model; that of another model is returned unchanged.
    The output head, which no vector needs, counts as tied, because checkpoints may lack it. `config`: config.json."""
    family = page_model(config)
    if family is None:
        return config
    inner = config.get(INNER)
    values = inner if isinstance(inner, dict) else config
    outer = {key: config[key] for key in DTYPES if config.get(key) is not None}
    return {**values, **outer, "architectures": [family.inner], "tie_word_embeddings": True}


def page_texts(folder: Path, family: PageModel) -> PageTexts:
    """Returns the texts around queries and pages, of the processor's and the tokenizer's files where they have some."""
    processor, tokenizer = _object(folder / "processor_config.json"), _object(folder / "tokenizer_config.json")
    padding = tokenizer.get("pad_token") or family.padding
    padding = padding["content"] if isinstance(padding, dict) else padding
    prompt = processor.get("visual_prompt_prefix") or family.prompt
    return PageTexts(
        family.lead,
        str(processor.get("query_prefix") or family.query_prefix),
        str(padding) * NUM_BUFFERS + "\n",
        family.page.format(prompt=prompt),
    )


def projection(config: Mapping[str, Any]) -> tuple[str, int, int]:
    """Returns the projection of a retrieval model: the name of its tensors, hidden size, size of a vector. `config`:
    config.json. Raises InvalidArgument for sizes that are no numbers."""
    inner = config.get(INNER)
    values = inner if isinstance(inner, dict) else config
    text = values.get("text_config")
    hidden = (text if isinstance(text, dict) else values).get("hidden_size")
    size = config.get("embedding_dim", DIMENSIONS)
    if not isinstance(hidden, int) or not isinstance(size, int):
        text_of_error = f"config.json: embedding_dim is {size!r}, hidden_size {hidden!r}; whole numbers are needed"
        raise InvalidArgument(text_of_error, field="model")
    return PROJECTION if isinstance(inner, dict) else OWN_PROJECTION, hidden, size


def _object(path: Path) -> dict[str, Any]:
    """Reads a JSON object; empty if the file does not exist."""
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return values
