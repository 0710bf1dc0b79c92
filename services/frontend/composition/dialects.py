"""The table of dialects: a new one is a package and an entry here. Errors of paths without a dialect are formatted like
those of the first."""

from __future__ import annotations

from quire.services.frontend.anthropic_edge.dialect import ANTHROPIC
from quire.services.frontend.cohere_edge.dialect import COHERE
from quire.services.frontend.http.dialects import Dialects
from quire.services.frontend.kserve_edge.dialect import OPEN_INFERENCE
from quire.services.frontend.ollama_edge.dialect import OLLAMA
from quire.services.frontend.openai_edge.dialect import OPENAI
from quire.services.frontend.sglang_edge.dialect import SGLANG

DIALECTS = Dialects((OPENAI, ANTHROPIC, COHERE, OLLAMA, SGLANG, OPEN_INFERENCE))
