"""Configurations of every drafting method for quire-tiny."""

from __future__ import annotations

import itertools
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

# Both trees guess more nodes than may be drafted. They do not work with batch_invariant.
EAGLE_TREE = "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)]"
MEDUSA_TREE = str([path for depth in range(1, 5) for path in itertools.product(range(2), repeat=depth)])
TREES = {
    "eagle_tree": METHODS["eagle"] | {"num_speculative_tokens": 6, "speculative_token_tree": EAGLE_TREE},
    "medusa_tree": METHODS["medusa"] | {"num_speculative_tokens": 8, "speculative_token_tree": MEDUSA_TREE},
}
