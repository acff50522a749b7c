"""Moestro: run Mixture-of-Experts language models bigger than your GPU and bigger than your RAM.

    from moestro import LLM, SamplingParams

    with LLM("model-directory-or-hub-id") as llm:
        print(llm.chat([{"role": "user", "content": "Hello"}]).text)

Names load when first used: ``import moestro`` itself imports nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moestro.engine.request import SamplingParams
    from moestro.llm import LLM, load

__all__ = ["LLM", "SamplingParams", "__version__", "load"]


def __getattr__(name: str) -> Any:
    if name in ("LLM", "load"):
        from moestro import llm

        return getattr(llm, name)
    if name == "SamplingParams":
        from moestro.engine.request import SamplingParams

        return SamplingParams
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("moestro")
        except PackageNotFoundError:
            return "0+unknown"
    raise AttributeError(f"module 'moestro' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
