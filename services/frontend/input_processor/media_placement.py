"""Placement of a request's media in its tokenized prompts."""

from __future__ import annotations

from collections.abc import Sequence

from quire.services.frontend.bounds.prompts import check_length
from quire.services.frontend.input_processor import prompt_limits
from quire.services.frontend.media.pipeline import MediaUse, Placed, PromptMedia
from quire.services.frontend.media.store import MediaHolds
from quire.services.frontend.request.media import MediaPart
from quire.services.frontend.request.request import Request
from quire.services.frontend.tokenizer.encoder import Tokenized


async def place_media(
    media: PromptMedia,
    tokenized: Tokenized,
    parts: Sequence[MediaPart],
    request: Request,
    holds: MediaHolds,
    *,
    max_model_len: int,
) -> Placed:
    """Returns the tokens of a prompt with its media in their places, and the items, which `holds` holds. Raises
    QuireError, before anything is fetched where the text alone is too long."""
    is_continued = request.pooling is None
    check_length(len(tokenized.token_ids), max_model_len, is_continued=is_continued)
    shown = [parts[index] for index in tokenized.media]
    use = MediaUse(request.media_options, request.tenant, request.deadline_s)
    token_ids, items = await media.place(tokenized.token_ids, shown, use, holds)
    prompt_limits.check_uncut(len(token_ids), request, max_model_len)
    return token_ids, items
