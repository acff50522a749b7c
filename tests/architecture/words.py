"""Words that may appear only in certain rooms. Comments and docstrings are free to explain."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from architecture import source


@dataclass(frozen=True, kw_only=True)
class WordRule:
    """``pattern`` may appear in code below ``searched`` only under one of ``rooms``."""

    name: str
    pattern: str
    searched: tuple[str, ...]
    rooms: tuple[str, ...]

    def violations(self, root: Path) -> list[str]:
        regex = re.compile(self.pattern)
        found = []
        for path in source.files(root, {".py"} | source.CPP_SUFFIXES, *self.searched):
            relative = path.relative_to(root).as_posix()
            if any(relative == room or relative.startswith(room + "/") for room in self.rooms):
                continue
            for number, line in enumerate(source.code(path), 1):
                if match := regex.search(line):
                    found.append(f"{path}:{number}: {match.group()!r} ({self.name})")
        return found


SRC = "src/moestro"
_QUOTED = r"""["'](?:f32|f16|bf16|k[2-6]|iq[123]\w+|ternary|nvfp4)["']"""
_GROUPED = r"(?i:\b(?:int[48][zm]?|lut4|fp8)[-_]?(?:g(?:32|64|128)|row)\b)"
_FAMILIES = r"(?i)llama|mixtral|qwen|deepseek|smollm|gpt[-_]?oss|kimi|minimax|olmoe|\bglm"

RULES: Sequence[WordRule] = (
    WordRule(
        name="intrinsics live in csrc/simd, csrc/micro and csrc/isa",
        pattern=r"\b_mm\d*_|\b__m\d+|__AVX",
        searched=("csrc",),
        rooms=("csrc/simd", "csrc/micro", "csrc/isa"),
    ),
    WordRule(
        name="format names live in the formats rooms",
        pattern=f"{_GROUPED}|{_QUOTED}",
        searched=(SRC, "csrc"),
        rooms=(
            f"{SRC}/formats",
            f"{SRC}/checkpoints/quant_configs.py",
            f"{SRC}/devices/cuda/formats.py",
            "csrc/formats",
        ),
    ),
    WordRule(
        name="model names live in models/",
        pattern=_FAMILIES,
        searched=(SRC, "csrc"),
        # GGUF names its pre-tokenizers after the model that first used them.
        rooms=(f"{SRC}/models", f"{SRC}/text/pretokenizers.py"),
    ),
    WordRule(
        name="cuda and triton live in devices/cuda, machine and integrations",
        pattern=r"(?i)cuda|triton",
        searched=(SRC, "csrc"),
        rooms=(f"{SRC}/devices/cuda", f"{SRC}/machine", f"{SRC}/integrations"),
    ),
    WordRule(
        name="environment variables are read in core/env.py alone",
        pattern=r"\benviron\b|\b(?:secure_)?getenv\b|\bputenv\b|\bsetenv\b",
        searched=(SRC, "csrc"),
        rooms=(f"{SRC}/core/env.py",),
    ),
    WordRule(
        name="the native library never prints or aborts",
        pattern=r"\b[fv]*printf\b|\bputs\b|\babort\b|\bstd::(?:cout|cerr|clog|terminate|exit)\b",
        searched=("csrc",),
        rooms=(),
    ),
    WordRule(
        name="print is for the command line",
        pattern=r"(?<![\w.])print\(",
        searched=(SRC,),
        rooms=(f"{SRC}/cli",),
    ),
)
