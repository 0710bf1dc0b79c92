"""Rules by which a transcript is accepted, tried again at a higher temperature, or taken for silence (arXiv
2212.04356, section 4.5)."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True, slots=True)
class QualityRules:
    """Thresholds; those that Whisper was published with."""

    most_compression: float = 2.4  # of the text: repeated words compress well
    least_logprob: float = -1.0  # mean of the tokens
    most_no_speech: float = 0.6  # probability of no speech
    # The same for a text that no attempt is sure of. Measured with tiny.en: music 0.35 to 0.41, speech below 0.08.
    most_no_speech_of_guess: float = 0.3
    least_tokens_per_s: float = 1.0  # of sound that may be speech: fewer are no sign of speech

    def is_silence(self, avg_logprob: float, no_speech_prob: float | None) -> bool:
        """Returns whether there is no speech: the model thinks so, and has no confidence in the text."""
        likely = no_speech_prob is not None and no_speech_prob > self.most_no_speech
        return likely and avg_logprob < self.least_logprob

    def is_guess(self, avg_logprob: float, no_speech_prob: float | None) -> bool:
        """Returns whether a text that was not accepted at any temperature is a guess about sound without speech."""
        likely = no_speech_prob is not None and no_speech_prob > self.most_no_speech_of_guess
        return likely and avg_logprob < self.least_logprob

    def is_sparse(self, num_tokens: int, loud_s: float) -> bool:
        """Returns whether a text is much shorter than `loud_s` seconds of speech."""
        return num_tokens < self.least_tokens_per_s * (loud_s - 1.0)

    def is_accepted(self, text: str, avg_logprob: float, no_speech_prob: float | None = None) -> bool:
        """Returns whether a text is neither a repetition nor a guess; silence is accepted."""
        if self.is_silence(avg_logprob, no_speech_prob):
            return True
        return compression_ratio(text) <= self.most_compression and avg_logprob >= self.least_logprob


def compression_ratio(text: str) -> float:
    """Returns the size of a text in UTF-8, divided by its size after compression; 0 for an empty text."""
    content = text.encode()
    return len(content) / len(zlib.compress(content)) if content else 0.0
