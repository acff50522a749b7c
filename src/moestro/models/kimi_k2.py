"""Kimi-K2: the architecture of DeepSeek-V3 under another name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from moestro.models import deepseek_v3
from moestro.models.deepseek_v3 import build, weights

__all__ = ["Config", "build", "claims_gguf", "tiny", "weights"]


@dataclass(frozen=True, kw_only=True)
class Config(deepseek_v3.Config):
    model_type: ClassVar[str] = "kimi_k2"


def claims_gguf(metadata: Mapping[str, Any]) -> bool:
    return False  # its GGUF files do not differ from those of the family it shares


def tiny() -> dict[str, Any]:
    """One group of experts, as published."""
    return {**deepseek_v3.tiny(), "model_type": "kimi_k2", "n_group": 1, "topk_group": 1}
