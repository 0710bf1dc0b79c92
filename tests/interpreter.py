"""Without CUDA Triton's interpreter runs the kernels: it has to be asked before anything imports them.

Conftests of folders with such tests import this first.
"""

from __future__ import annotations

import os

import torch

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
