"""Which experts a model's tokens chose: counts that fade, kept per model in the cache directory.

Placements by frequency, the plan's rate of misses and caches of experts start from them. Nothing
depends on them but speed: a profile that is missing, damaged or of another model is an empty one.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from moestro.checkpoints.base import Checkpoint
from moestro.checkpoints.files import read_json
from moestro.checkpoints.packed import PackedCheckpoint, new_digest, source_digest
from moestro.core import env, log
from moestro.core.errors import CheckpointError, InvalidRequest

#: the two are counted apart: a prompt's tokens are other text than answers, and many experts that
#: rarely answer read
Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = get_args(Phase)
#: tokens after which a selection counts half. With one of 16 experts chosen per token, an expert's
#: count rests on some 1500 selections then: good to 3 % where all are chosen equally often.
HALF_LIFE = 16384

_VERSION = 1
_MARK = "moestro_profile"


class SelectionProfile:
    """Faded selection counts, float64 [num_experts] for each phase and layer.

    num_experts: by layer. half_life: in tokens of the layer and phase.
    """

    def __init__(self, num_experts: Mapping[int, int], *, half_life: float = HALF_LIFE) -> None:
        if not 0 < half_life < math.inf:
            raise ValueError(f"a half-life of {half_life} tokens")
        self.half_life = half_life
        self._counts = {
            phase: {layer: torch.zeros(n, dtype=torch.float64) for layer, n in num_experts.items()}
            for phase in PHASES
        }

    @property
    def num_experts(self) -> dict[int, int]:
        return {layer: found.numel() for layer, found in self._counts[PHASES[0]].items()}

    @property
    def is_empty(self) -> bool:
        return not any(found.any() for phase in self._counts.values() for found in phase.values())

    def observe(self, phase: Phase, layer: int, ids: Tensor) -> None:
        """Count what the router chose, int [tokens, top_k], the newest token last. How tokens are
        cut into calls makes no difference but rounding.
        """
        tokens, top_k = ids.shape
        age = torch.arange(tokens - 1, -1, -1, dtype=torch.float64)
        weights = torch.exp2(age / -self.half_life).repeat_interleave(top_k)
        counts = self._counts[phase][layer]
        flat = ids.reshape(-1).to(torch.int64)
        self._fade(counts, tokens).index_add_(0, flat, weights)

    def add(self, phase: Phase, layer: int, selections: Tensor, *, tokens: int) -> None:
        """Count ``selections`` [num_experts] that others counted over so many tokens, all as if
        made by the last one.
        """
        self._fade(self._counts[phase][layer], tokens).add_(selections.to(torch.float64))

    def _fade(self, counts: Tensor, tokens: int) -> Tensor:
        return counts.mul_(2.0 ** (-tokens / self.half_life))

    def counts(self, phase: Phase) -> dict[int, list[float]]:
        """Faded counts by layer and expert: ``placement.Counts``."""
        return {layer: found.tolist() for layer, found in self._counts[phase].items()}

    def write(self, path: Path, *, model: str) -> None:
        """Write a JSON file in one step: whoever reads it sees the old one or the new one.

        Raises InvalidRequest when it cannot be written.
        """
        layers = {
            str(layer): {phase: self._counts[phase][layer].tolist() for phase in PHASES}
            for layer in self.num_experts
        }
        content = {_MARK: _VERSION, "model": model, "half_life": self.half_life, "layers": layers}
        temporary = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(content, file, separators=(",", ":"))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            if temporary is not None and os.path.exists(temporary):
                os.unlink(temporary)
            raise InvalidRequest(
                f"the profile {path} cannot be written: {error.strerror}"
            ) from error

    @staticmethod
    def read(
        path: Path, num_experts: Mapping[int, int], *, model: str | None = None
    ) -> SelectionProfile:
        """What ``write`` wrote. model: of which it must be; None takes one of any model with the
        same experts, for example of another quantization.

        Raises CheckpointError for a file that is missing, damaged, of another version or model.
        """
        raw = read_json(path, strict=True)
        if raw.get(_MARK) != _VERSION:
            raise CheckpointError(f"{path} is no profile of version {_VERSION}")
        if model is not None and raw.get("model") != model:
            raise CheckpointError(f"{path} is a profile of another model")
        half_life: Any = raw.get("half_life")
        layers: Any = raw.get("layers")
        if not _is_number(half_life) or half_life == 0 or not isinstance(layers, dict):
            raise CheckpointError(f"{path} lacks half_life or layers; it is damaged")
        if layers.keys() != {str(layer) for layer in num_experts}:
            raise CheckpointError(f"{path} has other layers of experts than the model")
        profile = SelectionProfile(num_experts, half_life=half_life)
        for layer, count in num_experts.items():
            for phase in PHASES:
                values = _numbers(layers[str(layer)], phase)
                if len(values) != count:
                    raise CheckpointError(
                        f"{path}: layer {layer} has no {count} {phase} counts; it is damaged or of "
                        "another model"
                    )
                profile._counts[phase][layer].copy_(torch.tensor(values, dtype=torch.float64))
        return profile


def model_id(checkpoint: Checkpoint) -> str:
    """What profiles of a checkpoint are kept under: its configuration and tensors, hashed. A packed
    model has that of its source.
    """
    if isinstance(checkpoint, PackedCheckpoint):
        # Of one written by others than ``convert`` nothing is known but its own name.
        return str(checkpoint.manifest.source.get("digest") or checkpoint.manifest.fingerprint)
    return source_digest(checkpoint)


def profile_path(model: str) -> Path:
    """Where the profile of a ``model_id`` is kept."""
    if not re.fullmatch("[0-9a-f]{1,64}", model):  # out of a stranger's moestro.json
        digest = new_digest()
        digest.update(model.encode(errors="replace"))
        model = digest.hexdigest()
    return env.cache_dir() / "profiles" / f"{model}.json"


def load_profile(model: str, num_experts: Mapping[int, int]) -> SelectionProfile:
    """The kept profile of a ``model_id``, or an empty one. A file that is there but cannot be used
    is said in one line of the log, and replaced at the next ``save_profile``.
    """
    path = profile_path(model)
    if path.exists():
        try:
            return SelectionProfile.read(path, num_experts, model=model)
        except CheckpointError as error:
            log.get(__name__).warning("%s; expert selections are counted anew", error)
    return SelectionProfile(num_experts)


def save_profile(model: str, profile: SelectionProfile) -> bool:
    """Keep it for the next start. Of several processes the last one's stays. False if the cache
    directory cannot be written, which is said in one line of the log.
    """
    try:
        profile.write(profile_path(model), model=model)
    except InvalidRequest as error:
        log.get(__name__).warning("%s", error)
        return False
    return True


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _numbers(raw: Any, key: str) -> list[float]:
    """A list of counts; empty if it is anything else."""
    values = raw.get(key) if isinstance(raw, dict) else None
    if not isinstance(values, list) or not all(map(_is_number, values)):
        return []
    return values
