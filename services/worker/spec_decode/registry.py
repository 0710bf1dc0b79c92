"""Methods by name."""

from __future__ import annotations

from services.worker.spec_decode.config import GROUP, METHODS, SpeculativeConfig
from services.worker.spec_decode.drafter import Drafter, DraftTarget
from shared import plugins


def open_drafter(config: SpeculativeConfig, target: DraftTarget) -> Drafter:
    drafter: Drafter = plugins.load(plugins.known(GROUP, METHODS)[config.method])(config, target)
    return drafter
