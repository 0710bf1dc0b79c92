"""Creates drafters by method name."""

from __future__ import annotations

from quire.services.worker.spec_decode.config import GROUP, METHODS, SpeculativeConfig
from quire.services.worker.spec_decode.drafter import Drafter, DraftTarget
from quire.shared import plugins


def open_drafter(config: SpeculativeConfig, target: DraftTarget) -> Drafter:
    """Creates the drafter of the configured method, from this package or an installed plugin; it loads its weights.
    Raises InvalidArgument if they do not fit."""
    drafter: Drafter = plugins.load(plugins.known(GROUP, METHODS)[config.method])(config, target)
    return drafter
