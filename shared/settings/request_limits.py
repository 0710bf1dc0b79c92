"""How large the parts of one request may be."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Checked before a part costs anything. A body of all of them together is worked on in some tens of milliseconds;
    docs/serving/limits.md says what each is for."""

    max_values: int = 262_144  # a JSON body's values, and the fields of a gRPC message: more than a prompt's token ids
    max_keys: int = 65_536  # of these, names of fields, which cost four times as much as other values
    max_depth: int = 128  # brackets in brackets
    max_messages: int = 4096  # of a conversation; items of `input`, documents
    max_parts: int = 16_384  # of all messages together: content parts and tool calls
    max_tools: int = 512
    max_form_characters: int = 1 << 20  # of tools, schemas, template variables and the like together
    max_stop: int = 128  # stop strings
    max_stop_token_ids: int = 1024
    max_bad_words: int = 128
    max_word_characters: int = 1024  # of a stop string, and of a bad word
    max_logit_bias: int = 1024
    max_logits_processors: int = 16
    max_choices: int = 16_384  # as many as fit in a constraint's 128 KiB
    max_metadata: int = 16  # pairs; OpenAI's own bound

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))
