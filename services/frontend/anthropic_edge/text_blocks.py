"""Conversion of other blocks that hold text to blocks of type text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Block = Mapping[str, Any]


def to_text_block(block: Block) -> Block:
    """Returns a block of type text for a block whose text can be read, and any other block unchanged."""
    text = _text(block)
    return block if text is None else {"type": "text", "text": text}


def _text(block: Block) -> str | None:
    """Returns the text of a tool reference, document, search result or compaction; None for other types and for
    blocks whose content is not text."""
    match block.get("type"):
        case "tool_reference":  # result of a tool search: all tools are shown to the model
            return f"The tool {block.get('tool_name') or ''} is available."
        case "document":
            return _document(block)
        case "search_result":
            body = _texts(block.get("content"))
            return None if body is None else _under(body, block.get("title"), block.get("source"))
        case "compaction":  # replaces the turns before it
            return _texts(block.get("content") or "")
    return None


def _document(block: Block) -> str | None:
    """Returns the text of a document with its title and context; None for documents without text, such as PDFs."""
    source = block.get("source")
    if not isinstance(source, Mapping) or source.get("type") not in ("text", "content"):
        return None
    body = _texts(source.get("data" if source["type"] == "text" else "content"))
    return None if body is None else _under(body, block.get("title"), block.get("context"))


def _texts(content: Any) -> str | None:
    """Returns the joined text of text blocks; None if other blocks are among them."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    block_texts = [block.get("text") if isinstance(block, Mapping) else None for block in content]
    texts = [text for text in block_texts if isinstance(text, str)]
    return "\n".join(texts) if len(texts) == len(block_texts) else None


def _under(body: str, *heads: Any) -> str:
    return "\n".join([*(head for head in heads if isinstance(head, str) and head), body])
