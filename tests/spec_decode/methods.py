"""Every method, set up for quire-tiny."""

from __future__ import annotations

from typing import Any

from quire import bundled

DRAFTERS = bundled.FOLDER.parent / "drafters"
_METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 6},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 4, "model": str(DRAFTERS / "draft")},
    "eagle": {"method": "eagle", "num_speculative_tokens": 4, "model": str(DRAFTERS / "eagle")},
    "medusa": {"method": "medusa", "num_speculative_tokens": 4, "model": str(DRAFTERS / "medusa")},
}
METHODS = {name: config | {"adaptive_length": False} for name, config in _METHODS.items()}
