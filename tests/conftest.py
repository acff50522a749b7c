"""Before any test is collected: without a card, Triton's kernels run in its interpreter.

Triton reads this once, when it is first imported, which a library of another test may do.
"""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
