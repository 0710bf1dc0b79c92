"""What StructuredOutput of sampling.proto may hold, and what it means: one grammar text for every kind of constraint.

Text only. Frontends check at the door what workers will compile, so both read it here.
"""

from quire.shared.structured_output.checks import check, check_size, compile_refusal, refuse
from quire.shared.structured_output.grammar import lark

__all__ = ["check", "check_size", "compile_refusal", "lark", "refuse"]
