"""Tensor names of Medusa checkpoints in the authors' and in vLLM's format. Does not import torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.spec_decode.config import MAX_DRAFT_TOKENS
from quire.shared.errors import InvalidArgument

PREFIX, BLOCKS = "medusa_heads.", "blocks."  # of vLLM's format
TOKEN_MAP = "token_map"


@dataclass(frozen=True, slots=True)
class MedusaLayout:
    """Tensor names of a checkpoint, without `.weight` and `.bias`."""

    num_heads: int
    linears: tuple[tuple[str, ...], ...]  # residual blocks of each head
    has_biases: bool
    outputs: tuple[str, ...]  # output embeddings: one per head, one for all, or none to use the model's
    vocab_size: int  # rows of an output embedding
    token_map: str | None = None  # tensor with the model's id of each row; None: the first ids
    passed_over: tuple[str, ...] = ()


def read_layout(config: ConfigFile, names: Collection[str], hidden_size: int, vocab_size: int) -> MedusaLayout:
    """Detects whether a checkpoint has the authors' or vLLM's format, and returns its layout.

    `names`: tensor names of the checkpoint, empty for random weights; `hidden_size`, `vocab_size`: those of the model
    that drafts are for. Raises InvalidArgument if the heads' sizes differ from these, and for numbers of heads and
    layers out of range.
    """
    if config.integer("hidden_size", hidden_size) != hidden_size:
        raise head_error(
            f"the heads' hidden_size is {config.integer('hidden_size')}, the model's {hidden_size}; both must be equal"
        )
    is_vllms = any(name.removeprefix(PREFIX).startswith(BLOCKS) for name in names)
    if is_vllms or (not names and not config.has("medusa_num_heads")):
        return _vllms(config, names, vocab_size)
    return _authors(config, names, vocab_size)


def _authors(config: ConfigFile, names: Collection[str], vocab_size: int) -> MedusaLayout:
    """Reads the authors' format: N.0.linear, N.1.linear, ... are residual blocks of head N, and the last number is its
    output embedding."""
    blocks = _count(config, "medusa_num_layers", 1)
    stated = _count(config, "medusa_num_heads")
    head_ids = {int(name.split(".")[0]) for name in names if name.split(".")[0].isdecimal()}
    if max(head_ids, default=0) >= MAX_DRAFT_TOKENS:
        raise head_error(f"a tensor of head {max(head_ids)}; there are at most {MAX_DRAFT_TOKENS} heads")
    heads = range(max(stated, 1 + max(head_ids, default=0)))  # some published configs state too few
    own = any(f"{head}.{blocks}.weight" in names for head in heads)
    return MedusaLayout(
        len(heads),
        tuple(tuple(f"{head}.{block}.linear" for block in range(blocks)) for head in heads),
        has_biases=True,
        outputs=tuple(f"{head}.{blocks}" for head in heads) if own else (),
        vocab_size=vocab_size,
    )


def _vllms(config: ConfigFile, names: Collection[str], vocab_size: int) -> MedusaLayout:
    """Reads vLLM's format: heads may share an output embedding, and may cover a part of the vocabulary."""
    heads, blocks = range(_count(config, "num_heads")), range(_count(config, "num_hidden_layers", 1))
    stated = config.integer("vocab_size", vocab_size)
    if stated != vocab_size:
        raise head_error(f"the heads' vocab_size is {stated}, the model's {vocab_size}; both must be equal")
    rows = config.integer("truncated_vocab_size", vocab_size)
    if not 1 <= rows <= vocab_size:
        raise head_error(f"truncated_vocab_size is {rows}, the model has {vocab_size} tokens; at least 1 is needed")
    prefix = PREFIX if any(name.startswith(PREFIX) for name in names) else ""
    outputs = tuple(f"{prefix}lm_heads.{head}" for head in heads)
    shared, passed_over = config.flag("original_lm_head"), []
    if shared:
        one = f"{prefix}lm_head"
        outputs = (one,) if f"{one}.weight" in names else outputs[:1]
        passed_over.append(f"{prefix}lm_heads.")  # copies of the shared one
    token_map = f"{prefix}{TOKEN_MAP}"
    is_mapped = bool(names) and rows < vocab_size
    if not is_mapped:
        passed_over.append(token_map)
    return MedusaLayout(
        len(heads),
        tuple(tuple(f"{prefix}{BLOCKS}{head}.layers.{block}" for block in blocks) for head in heads),
        has_biases=config.flag("medusa_fc_bias"),
        outputs=outputs,
        vocab_size=rows,
        token_map=token_map if is_mapped else None,
        passed_over=tuple(passed_over),
    )


def _count(config: ConfigFile, name: str, default: int | None = None) -> int:
    """Reads an integer of config.json. Raises InvalidArgument unless it is 1 to MAX_DRAFT_TOKENS."""
    value = config.integer(name, default)
    if not 1 <= value <= MAX_DRAFT_TOKENS:
        raise head_error(f"{name} is {value}; it must be 1 to {MAX_DRAFT_TOKENS}")
    return value


def head_error(reason: str) -> InvalidArgument:
    """Returns an InvalidArgument about speculative_config.model with this reason, to be raised."""
    return InvalidArgument(f"speculative_config.model: {reason}", field="speculative_config")
