"""Validation of StructuredOutput (sampling.proto) and its conversion to one grammar text for every kind of constraint.

Text only. Frontends validate what workers will compile, so both use this package.
"""

from quire.shared.structured_output.checks import check, check_size, compile_refusal, refuse
from quire.shared.structured_output.grammar import lark

__all__ = ["check", "check_size", "compile_refusal", "lark", "refuse"]
