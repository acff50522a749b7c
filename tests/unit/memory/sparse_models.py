"""Checkpoints of any size that take no room on disk: all their weights are zero, by holes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import gguf
import numpy as np
from tiny_checkpoints import matrix

from moestro.memory.weights import ExpertSources, WeightSpec

EXPERTS = 2
_Shapes = dict[str, tuple[int, ...]]


def big_model(embedding_mib: int, expert_mib: int) -> tuple[_Shapes, list[WeightSpec]]:
    """Shapes and specs: an embedding and experts of so many MiB each as two bytes per weight."""
    hidden = 2048
    vocab, intermediate = embedding_mib * 256, expert_mib * 256 // 3
    intermediate -= intermediate % 32
    shapes: _Shapes = {"embed": (vocab, hidden)}
    shapes["gate_up"] = (EXPERTS, 2 * intermediate, hidden)
    for expert in range(EXPERTS):
        shapes[f"down.{expert}"] = (hidden, intermediate)
    experts = WeightSpec(
        key="experts",
        kind="experts",
        role="experts",
        shape=(EXPERTS, intermediate, hidden),
        expert_sources=ExpertSources(gate_up=("gate_up",), down=("down.{e}",)),
        layer=0,
    )
    return shapes, [matrix("embed", vocab, hidden, role="embedding"), experts]


def write_safetensors(directory: Path, shapes: _Shapes, shards: int = 1) -> Path:
    """bfloat16 tensors in one file or, with an index, in several."""
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "tiny"}')
    names = list(shapes)
    where = {}
    for shard in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{shard}.safetensors"
        where |= dict.fromkeys(names[shard::shards], file)
        _write_file(directory / file, {name: shapes[name] for name in names[shard::shards]})
    if shards > 1:
        index = directory / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return directory


def _write_file(path: Path, shapes: _Shapes) -> None:
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


def write_gguf(path: Path, shapes: _Shapes) -> Path:
    """Q8_0 tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    end = 0
    for name, shape in shapes.items():
        raw = (*shape[:-1], shape[-1] // 32 * 34)
        writer.add_tensor_info(
            name, raw, np.dtype(np.uint8), math.prod(raw), gguf.GGMLQuantizationType.Q8_0
        )
        end += -(-math.prod(raw) // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with open(path, "r+b") as file:
        start = file.seek(0, 2)
        file.truncate(-(-start // 32) * 32 + end)
    return path
