"""Optional grammar libraries by name; llguidance is always installed and compiles in the worker itself."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING

from quire.shared.structured_output.backends import LM_FORMAT_ENFORCER, OUTLINES_CORE, XGRAMMAR

if TYPE_CHECKING:
    from quire.services.worker.structured.backends.grammar_library import OpenGrammarLibrary

# name -> (module of the package, our module, our class)
MODULES = {
    XGRAMMAR: ("xgrammar", "xgrammar_backend", "XGrammar"),
    OUTLINES_CORE: ("outlines_core", "outlines_backend", "Outlines"),
    LM_FORMAT_ENFORCER: ("lmformatenforcer", "lm_format_enforcer_backend", "FormatEnforcer"),
}


def is_installed(name: str) -> bool:
    """Tells whether the library's package can be imported."""
    return find_spec(MODULES[name][0]) is not None


def library_class(name: str) -> OpenGrammarLibrary:
    """Imports our adapter of the library `name` and returns its class. Raises ImportError if the package is missing."""
    _, module, class_name = MODULES[name]
    opener: OpenGrammarLibrary = getattr(importlib.import_module(f"{__package__}.{module}"), class_name)
    return opener
