"""Matrix products in Triton's interpreter that sum in operand order, as a GPU's instructions do.

The interpreter uses numpy, whose library rounds a row depending on its position in the matrix.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterpreterBuilder, "create_dot", _dot)


def _dot(_builder: Any, a: Any, b: Any, d: Any, *_precision: Any) -> TensorHandle:
    out = d.data.copy()
    left, right = a.data.astype(out.dtype), b.data.astype(out.dtype)
    for k in range(left.shape[1]):
        out += left[:, k : k + 1] * right[k : k + 1]
    return TensorHandle(np.ascontiguousarray(out), d.dtype.scalar)
