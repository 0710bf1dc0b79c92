"""Tokenizer of the model: text to ids, ids to text at once or in pieces."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer as HfTokenizer
from tokenizers import normalizers

from quire.services.frontend.bounds.smallest_first import SmallestFirstLimiter
from quire.services.frontend.request.request import ChatPrompt
from quire.services.frontend.tokenizer import template_files
from quire.services.frontend.tokenizer.chat_rendering.chat_renderer import DEFAULT_BUDGETS, ChatRenderer
from quire.services.frontend.tokenizer.chat_rendering.prompt_renderer import RendererConfig
from quire.services.frontend.tokenizer.chat_rendering.template_runner import RenderBudgets
from quire.services.frontend.tokenizer.chat_template import ChatTemplate
from quire.services.frontend.tokenizer.config_files import read_optional_json, special_tokens
from quire.services.frontend.tokenizer.control_tokens import ControlTokens, TextSection
from quire.services.frontend.tokenizer.encoder import Encoder, Tokenized
from quire.services.frontend.tokenizer.generation_config import GenerationDefaults, read_defaults, read_eos_ids
from quire.services.frontend.tokenizer.pieces import TokenPieces, fallback_byte, is_byte_level
from quire.shared.errors import InvalidArgument
from quire.shared.models.tokenizer_file import tokenizer_file
from quire.shared.structured_output.literals import SpecialTokens

# Single tokens that model families put around their reasoning.
THINKING_TOKENS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
)

ControlTokenPolicy = Literal["none", "raw_prompts", "everywhere"]
NOWHERE, EVERYWHERE = "none", "everywhere"

DEFAULT_TOKENIZER_CLASS = (
    "PreTrainedTokenizerFast"  # Hugging Face's class for any tokenizer.json, where the folder names none
)
LIGHT_IDS = 8192  # decoded in a millisecond
IDS_IN_A_TURN = 2048  # ids decoded per turn of the event loop: 0.4 ms


class Tokenizer:
    """Conversion between text and ids, as the model's folder defines it."""

    def __init__(
        self,
        folder: Path,
        threads: int,
        chat_template: str = "",
        control_tokens: ControlTokenPolicy = "raw_prompts",
        *,
        placeholder_ids: Mapping[str, int] | None = None,
        render_budgets: RenderBudgets = DEFAULT_BUDGETS,
    ) -> None:
        """Loads the tokenizer and its templates.

        `chat_template`: a file to use instead of the folder's template. `control_tokens`: where users may write them.
        `placeholder_ids`: by modality, the tokens that stand for media; None: the model takes text only.
        `render_budgets`: time limits of chat templates.
        """
        self._hf = _read(folder)
        self.template = template_files.load(folder, chat_template)
        self.placeholders = {name: self._placeholder(name, one) for name, one in (placeholder_ids or {}).items()}
        renderer_config = self._renderer_config(self.template, guarded=control_tokens != EVERYWHERE)
        self.chat_renderer = ChatRenderer(renderer_config, render_budgets)
        self.info = {
            "tokenizer_class": DEFAULT_TOKENIZER_CLASS,
            **read_optional_json(folder / "tokenizer_config.json"),
            "chat_template": self.template.default,
        }
        self._allowed = control_tokens
        self._control = ControlTokens(
            renderer_config.added,
            self.template.source,
            renderer_config.marks,
            placeholders=[*self.placeholders.values()],
        )
        self._encoder = Encoder(self._hf, threads, () if control_tokens == EVERYWHERE else tuple(self._control.tokens))
        self.defaults: GenerationDefaults = read_defaults(folder)
        self.eos_ids = self._eos_ids(folder)
        self._added = {i: token.content for i, token in self._hf.get_added_tokens_decoder().items()}
        self._special = {token.content: i for i, token in self._hf.get_added_tokens_decoder().items() if token.special}
        self.thinking_token_ids = self._find_marks()
        self._skipped: dict[frozenset[str], frozenset[int]] = {}  # by the special tokens that are shown
        self._plain_pieces: dict[frozenset[str], TokenPieces] = {}  # by the special tokens that are shown
        self._pieces = TokenPieces(self._hf.id_to_token, frozenset())
        self.byte_level = is_byte_level(self._hf)
        self._decoding = SmallestFirstLimiter(1)
        self.longest_token = max(map(len, self._hf.get_vocab()), default=1)  # in characters; each byte is at most one

    def _renderer_config(self, template: ChatTemplate, *, guarded: bool) -> RendererConfig:
        """Returns the configuration of a rendering process; `guarded` says whether control tokens in users' texts
        are hidden."""
        return RendererConfig.of(
            template,
            added=json.loads(self._hf.to_str(pretty=False))["added_tokens"],
            marks=frozenset(mark for pair in THINKING_TOKENS for mark in pair),
            normalizer=_picklable(self._hf.normalizer),
            guarded=guarded,
            placeholders=self.placeholders,
        )

    def _placeholder(self, modality: str, token_id: int) -> str:
        """Returns the text of the token that stands for the items of a modality. Raises InvalidArgument if the
        tokenizer does not have the token."""
        text = self._hf.id_to_token(token_id)
        if text is None:
            raise InvalidArgument(f"model: tokenizer.json has no token {token_id} for {modality} items", field="model")
        return str(text)

    def encode_plainly(self, text: str) -> list[int]:
        """Encodes a short text in the calling thread; special tokens in it are recognized, none are added."""
        return self._encoder.encode_inline(text, add_special_tokens=False)

    def _eos_ids(self, folder: Path) -> tuple[int, ...]:
        """Returns the tokenizer's end-of-sequence token first, then those of generation_config.json."""
        named = special_tokens(folder).get("eos_token")
        own = self._hf.token_to_id(named) if named is not None else None
        return tuple(dict.fromkeys(([] if own is None else [own]) + read_eos_ids(folder)))

    @property
    def specials(self) -> SpecialTokens:
        """Tokens that a grammar must name."""
        ids = {content: token_id for token_id, content in self._added.items()}
        return SpecialTokens(ids, frozenset(self._added.keys() - self._special))

    @property
    def control_tokens(self) -> frozenset[str]:
        """Control tokens that messages cannot spell."""
        return frozenset(self._control.tokens)

    def _find_marks(self) -> tuple[int, int] | None:
        """Returns the ids of the tokens that begin and end reasoning, the first known pair; None if the vocabulary
        has none."""
        for start, end in THINKING_TOKENS:
            first, last = self._hf.token_to_id(start), self._hf.token_to_id(end)
            if first is not None and last is not None:
                return first, last
        return None

    async def encode(self, text: str, *, add_special_tokens: bool, stop_after: int | None = None) -> list[int]:
        """Encodes a text, in pieces if it is long.

        `stop_after`: the ids of a long text may be cut off once there are more than this.
        """
        return await self._encoder.encode(text, add_special_tokens=add_special_tokens, stop_after=stop_after)

    @property
    def frame(self) -> tuple[list[int], list[int]]:
        """Tokens that the tokenizer puts before and after a text."""
        return self._encoder.frame

    def encode_inline(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self._encoder.encode_inline(text, add_special_tokens=add_special_tokens)

    async def encode_all(self, texts: Sequence[str]) -> list[array[int]]:
        """Encodes texts separately, without the tokens that the tokenizer puts around a text."""
        return await self._encoder.encode_all(texts)

    async def encode_prompt(self, text: str, *, add_special_tokens: bool, stop_after: int | None = None) -> list[int]:
        """Encodes a raw prompt, which no template rendered. Control tokens in it are read as such only if the
        settings allow it. Stops early after more than `stop_after` ids."""
        if self._allowed != NOWHERE:
            return await self.encode(text, add_special_tokens=add_special_tokens, stop_after=stop_after)
        plain = [TextSection(text, plain=True)]
        return await self._encoder.encode_sections(plain, add_special_tokens=add_special_tokens, stop_after=stop_after)

    async def encode_pair(self, first: str, second: str, stop_after: int | None = None) -> Tokenized:
        """Encodes two texts as one prompt, with the tokens that the tokenizer puts around and between them."""
        return await self._encoder.encode_pair(first, second, plain=self._allowed == NOWHERE, stop_after=stop_after)

    async def encode_chat(self, prompt: ChatPrompt, stop_after: int | None = None) -> list[int]:
        return list((await self.tokenize_chat(prompt, stop_after)).token_ids)

    async def tokenize_chat(self, prompt: ChatPrompt, stop_after: int | None = None) -> Tokenized:
        """Renders a conversation by the chat template and encodes it; stops early after more than `stop_after` ids.
        Raises InvalidArgument if the template refuses it."""
        rendered = await self.chat_renderer.render(prompt)
        token_ids = await self._encoder.encode_sections(
            rendered.sections, add_special_tokens=prompt.add_special_tokens, stop_after=stop_after
        )
        return Tokenized(token_ids, media=rendered.media)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool, shown: frozenset[str] = frozenset()) -> str:
        """Decodes ids to their text in one call; special tokens in `shown` are kept even if others are skipped."""
        if skip_special_tokens and shown:
            skipped = self._skipped_but(shown)
            ids, skip_special_tokens = [i for i in ids if i not in skipped], False
        text: str = self._hf.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    async def decode_long(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decodes many ids, in portions or, where a token's text depends on others, in a thread."""
        if len(ids) <= LIGHT_IDS:
            return self.decode(ids, skip_special_tokens=skip_special_tokens)
        if self.byte_level:
            # one at a time: otherwise each would take a portion of every slot of the loop
            async with self._decoding.slot(len(ids)):
                return await self._decode_in_portions(ids, self.pieces(skip_special_tokens=skip_special_tokens))

        def decode(ids: list[int]) -> str:
            # A batch of one, because the GIL is released for it.
            texts: list[str] = self._hf.decode_batch([ids], skip_special_tokens=skip_special_tokens)
            return texts[0]

        return await self._encoder.in_thread(decode, list(ids), len(ids))

    @staticmethod
    async def _decode_in_portions(ids: Sequence[int], pieces: TokenPieces) -> str:
        """Decodes many ids of a byte-level vocabulary and yields to the event loop between portions; invalid UTF-8
        becomes U+FFFD."""
        decoded = bytearray()
        for start in range(0, len(ids), IDS_IN_A_TURN):
            portion = map(pieces.__getitem__, ids[start : start + IDS_IN_A_TURN])
            decoded += b"".join([piece.encode() if isinstance(piece, str) else piece for piece in portion])
            await asyncio.sleep(0)
        return decoded.decode(errors="replace")

    def _skipped_but(self, shown: frozenset[str]) -> frozenset[int]:
        """Returns the ids of all special tokens except those whose text is in `shown`, cached by `shown`."""
        if shown not in self._skipped:
            self._skipped[shown] = frozenset(i for text, i in self._special.items() if text not in shown)
        return self._skipped[shown]

    def pieces(self, *, skip_special_tokens: bool, shown: frozenset[str] = frozenset()) -> TokenPieces:
        """Returns the cached texts of single tokens, exact for byte-level vocabularies only; special tokens in
        `shown` are kept even if others are skipped."""
        if not skip_special_tokens:
            return self._pieces
        if shown not in self._plain_pieces:
            self._plain_pieces[shown] = TokenPieces(self._hf.id_to_token, self._skipped_but(shown))
        return self._plain_pieces[shown]

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token; special tokens have those of their name."""
        if not self.byte_level:
            return fallback_byte(self.token_name(token_id)) or self._text_of(token_id).encode()
        piece = self._pieces[token_id]
        return piece.encode() if isinstance(piece, str) else piece

    def _text_of(self, token_id: int) -> str:
        """Returns a token's text after another token, since decoders of this kind drop a leading space otherwise."""
        alone = self.decode([token_id], skip_special_tokens=False)
        text = self.decode([token_id, token_id], skip_special_tokens=False)
        return text[len(alone) :] if text.startswith(alone) else alone

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the tokens that skip_special_tokens omits."""
        return self._skipped_but(frozenset())

    @property
    def added_tokens(self) -> dict[str, int]:
        """Ids of the added tokens, by their literal text."""
        return {text: token_id for token_id, text in self._added.items()}

    def added_token(self, token_id: int) -> str | None:
        """Returns the literal text of an added token; None for others."""
        return self._added.get(token_id)

    def token_id(self, text: str) -> int | None:
        """Returns the id of the token that the vocabulary writes as `text`."""
        token_id: int | None = self._hf.token_to_id(text)
        return token_id

    @property
    def vocab_size(self) -> int:
        """Number of ids with a name, added tokens included; a model may have more rows."""
        size: int = self._hf.get_vocab_size()
        return size

    def token_name(self, token_id: int) -> str:
        """Returns the token as the vocabulary writes it; empty for an unknown id."""
        return self._hf.id_to_token(token_id) or ""

    def close(self) -> None:
        self._encoder.close()
        self.chat_renderer.close()


def _read(folder: Path) -> HfTokenizer:
    """Loads tokenizer.json without its truncation and padding; raises InvalidArgument if it cannot be read."""
    path = tokenizer_file(folder)
    try:
        tokenizer = HfTokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception for whatever it cannot read
        raise InvalidArgument(f"model: {path} is not a valid tokenizer.json: {error}", field="model") from None
    tokenizer.no_truncation()  # the scheduler enforces limits, and padding belongs to batches, which are not used here
    tokenizer.no_padding()
    return tokenizer


def _picklable(normalizer: normalizers.Normalizer | None) -> normalizers.Normalizer | None:
    """Returns a normalizer that does the same and can be sent to another process: a Replace alone, which Gemma has, can
    be pickled but not read again."""
    return None if normalizer is None else normalizers.Sequence([normalizer])
