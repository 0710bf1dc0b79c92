"""Legacy names of renamed vLLM fields."""

from __future__ import annotations

from quire.services.frontend.openai_edge.body.bodies import GenerationBody
from quire.services.frontend.openai_edge.body.structured_outputs import StructuredOutputsBody
from quire.shared.errors import InvalidArgument

GUIDED = ("json", "regex", "choice", "grammar")


def guided_constraint(body: GenerationBody) -> StructuredOutputsBody | None:
    """Returns structured_outputs, or the constraint under a legacy name such as guided_json; raises InvalidArgument
    if several are set."""
    given = {name: value for name in GUIDED if (value := getattr(body, f"guided_{name}")) is not None}
    if not given:
        return body.structured_outputs
    field = f"guided_{next(iter(given))}"
    if body.structured_outputs is not None or len(given) > 1:
        raise InvalidArgument(f"{field}: send one constraint, as structured_outputs", field=field)
    return StructuredOutputsBody(**given)
