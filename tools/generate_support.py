"""Writes docs/SUPPORT.md from the registries of formats, checkpoint types, models and ops.

python tools/generate_support.py           # write it
python tools/generate_support.py --check   # exit 1 if it is not up to date
"""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path

from moestro import formats, models
from moestro.checkpoints.quant_configs import KNOWN_METHODS, READ_METHODS
from moestro.checkpoints.safetensors import DTYPE_BITS
from moestro.ops.contracts import Ops

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/SUPPORT.md"
#: a matrix width that every group size divides
COLS = 4096

HEADER = """\
# What is supported

Written by `tools/generate_support.py` from the registries; do not edit. Anything not listed is
refused by name, never read as something else.
"""


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def format_table() -> str:
    rows = []
    for name in formats.names():
        one = formats.get(name)
        group = f"{one.group_size}" if one.group_size else "row"
        exact = ", ".join(one.exact_from) or "-"
        rows.append([f"`{name}`", group, f"{one.bits_per_weight(COLS):.2f}", exact])
    head = ["Format", "Input channels per group", f"Bits per weight ({COLS} wide)", "Exact from"]
    return table(head, rows)


def source_types() -> str:
    exact = {kind for name in formats.names() for kind in formats.get(name).exact_from}
    plain = exact & DTYPE_BITS.keys()
    return f"safetensors: {', '.join(sorted(plain))}. GGUF: {', '.join(sorted(exact))}."


def quantizations() -> str:
    rows = [[f"`{name}`", what, "yes"] for name, what in READ_METHODS.items()]
    rows += [[f"`{name}`", what, "no, refused by name"] for name, what in KNOWN_METHODS.items()]
    return table(["quant_method", "What it is", "Read"], sorted(rows))


def op_table() -> str:
    rows = []
    for name, function in inspect.getmembers(Ops, inspect.isfunction):
        if not name.startswith("_") and name != "record":
            first = (inspect.getdoc(function) or "").split("\n\n")[0].split(";")[0]
            rows.append([f"`{name}`", " ".join(first.split()).rstrip(".")])
    return table(["Op", "What it computes"], rows)


def isa_names() -> list[str]:
    definitions = (ROOT / "csrc/isa/isa.def").read_text(encoding="utf-8").splitlines()
    start = "MOESTRO_ISA("
    return [line[len(start) : -1] for line in definitions if line.startswith(start)]


def model_table() -> str:
    rows = []
    for name in models.families():
        source = Path(inspect.getfile(models)).with_name(f"{name}.py")
        doc = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
        rows.append([f"`{name}`", " ".join(doc.split("\n\n")[0].split())])
    return table(["model_type", "What it is"], rows)


def accelerator() -> str:
    """From the source: reading it needs no accelerator's libraries."""
    folder = ROOT / "src/moestro/devices/cuda"
    table_of = ast.parse((folder / "formats.py").read_text(encoding="utf-8"))
    stems = next(
        [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
        for node in table_of.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)
    )
    ops = [
        node.name
        for node in ast.walk(ast.parse((folder / "ops.py").read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(d, ast.Name) and d.id == "op" for d in node.decorator_list)
    ]
    return (
        "Kernels for NVIDIA and AMD cards, checked without one so far and not yet used by whole "
        "models ([decision](decisions/0009-accelerator-kernels.md)). Ops: "
        + ", ".join(f"`{name}`" for name in ops)
        + ". Weight formats, in all their groups: "
        + ", ".join(f"`{stem}`" for stem in sorted(map(str, stems)))
        + "."
    )


def page() -> str:
    sections = {
        "Models": model_table(),
        "Weight types in checkpoints": "Read without loss, in any mix. " + source_types(),
        "Quantized safetensors": "By `quantization_config` of config.json; the settings that are "
        "read are in the [guide](guide/checkpoints.md).\n\n" + quantizations(),
        "Weight formats": "What kernels run, in RAM and on disk.\n\n" + format_table(),
        "Instruction sets": "Chosen when the program starts; `MOESTRO_ISA` forces one: "
        + ", ".join(f"`{name}`" for name in isa_names())
        + ".",
        "Accelerators": accelerator(),
        "Ops": op_table(),
    }
    body = "".join(f"\n## {title}\n\n{text}\n" for title, text in sections.items())
    return HEADER + body


def main(arguments: list[str]) -> int:
    text = page()
    if arguments == ["--check"]:
        if not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != text:
            print(f"{PAGE.relative_to(ROOT)} is not up to date: python tools/generate_support.py")
            return 1
        return 0
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
