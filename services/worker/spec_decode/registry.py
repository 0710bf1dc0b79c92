"""Methods by name."""

from __future__ import annotations

import importlib

from services.worker.spec_decode.config import SpeculativeConfig
from services.worker.spec_decode.drafter import Drafter, Target

# Method -> class that is made of (SpeculativeConfig, Target); imported when needed.
METHODS = {
    "ngram": "services.worker.spec_decode.ngram:Ngram",
    "suffix": "services.worker.spec_decode.suffix:Suffix",
    "draft_model": "services.worker.spec_decode.draft_model:DraftModel",
    "eagle": "services.worker.spec_decode.eagle:Eagle",
    "medusa": "services.worker.spec_decode.medusa:Medusa",
    "grammar": "services.worker.spec_decode.grammar:Grammar",
}


def open_drafter(config: SpeculativeConfig, target: Target) -> Drafter:
    module, _, name = METHODS[config.method].partition(":")
    drafter: Drafter = getattr(importlib.import_module(module), name)(config, target)
    return drafter
