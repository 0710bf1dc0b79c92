"""Size limits for the parts of one request."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Checked before a part is processed. A body that reaches all of them is processed in some tens of milliseconds;
    docs/serving/limits.md explains each limit."""

    max_values: int = 262_144  # values of a JSON body or fields of a gRPC message; more than a prompt's token ids
    max_keys: int = 65_536  # names of fields among them, which cost four times as much
    max_depth: int = 128  # nesting depth
    max_messages: int = 4096  # messages of a conversation, items of `input`, documents
    max_parts: int = 16_384  # content parts and tool calls over all messages
    max_tools: int = 512
    max_form_characters: int = 1 << 20  # total of tools, schemas, template variables and the like
    max_stop: int = 128  # stop strings
    max_stop_token_ids: int = 1024
    max_bad_words: int = 128
    max_word_characters: int = 1024  # of a stop string or a bad word
    max_logit_bias: int = 1024
    max_logits_processors: int = 16
    max_choices: int = 16_384  # as many as fit into a constraint's 128 KiB
    max_metadata: int = 16  # pairs; OpenAI's own bound

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))
