"""Engine options: each knob is defined once, here, with its help and its check.

The command line options are generated from these fields, so a knob is never spelled twice.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from moestro.core import units
from moestro.core.errors import InvalidRequest
from moestro.machine.placement import PINS
from moestro.memory.pins import Pin

#: positions per KV page must be a multiple of this (see ``ops.contracts.KvLayer``)
PAGE_MULTIPLE = 16
#: policies of ``memory.placement`` that need no measured selections
PLACEMENTS = ("uniform", "front", "random")
KV_DTYPES = ("float16", "bfloat16", "float32", "int8")
#: context used where the model allows more and nothing was asked: enough for long chats, and the
#: KV cache stays small beside the weights
DEFAULT_CONTEXT = 8192


def _knob(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the engine runs. Raises InvalidRequest for a value that cannot work."""

    context: int | None = _knob(
        None,
        "tokens a sequence may reach, prompt and answer together; default: what the model allows, "
        f"at most {DEFAULT_CONTEXT}, less where memory is short",
    )
    max_sequences: int = _knob(8, "sequences computed at the same time; others wait")
    max_batch_tokens: int = _knob(
        512, "tokens computed per step; longer prompts are prefilled in chunks of this size"
    )
    kv_dtype: str = _knob(
        "float16",
        f"type of the KV cache: {', '.join(KV_DTYPES)}; int8 holds twice the context in the same "
        "memory, for a small loss",
    )
    page_size: int = _knob(32, f"positions per KV page, a multiple of {PAGE_MULTIPLE}")
    threads: int | None = _knob(
        None, "compute threads; default: one per physical core this process may use"
    )
    pin: str | None = _knob(
        None,
        f"where compute threads are kept: {', '.join(PINS)}; default: auto, which is core when the "
        "threads have all cores this process may use",
    )
    numa_nodes: int | None = _knob(
        None,
        "NUMA nodes that weights are sliced over, 1 for no slicing; default: those this process "
        "may use",
    )
    same_bits: bool = _knob(
        True,
        "integer formats give the same bits on every instruction set and for any batch; without, "
        "processors with AMX multiply long prompts in fewer steps, rounded to bfloat16",
    )
    memory: str | None = _knob(
        None,
        "memory budget for weights, KV cache and buffers, for example 24GiB; default: what is "
        "available now",
    )
    accelerator_memory: str | None = _knob(
        None,
        "memory budget on an accelerator, for example 10GiB: dense weights, KV cache and buffers "
        "come first, experts fill the rest; default: all experts",
    )
    placement: str | None = _knob(
        None,
        f"which experts the accelerator gets first: {', '.join(PLACEMENTS)}; default: uniform, as "
        "many of every layer",
    )
    expert_pins: tuple[str, ...] = _knob(
        (),
        "where some experts are, for example layers.0-9.experts=accelerator or "
        "layers.*.experts.0-7=ram; may be repeated",
    )

    def __post_init__(self) -> None:
        for name in (
            "context",
            "max_sequences",
            "max_batch_tokens",
            "page_size",
            "threads",
            "numa_nodes",
        ):
            value = getattr(self, name)
            if value is None and name in ("context", "threads", "numa_nodes"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidRequest(f"{name} must be a positive whole number, got {value!r}")
        if not isinstance(self.same_bits, bool):
            raise InvalidRequest(f"same_bits must be True or False, got {self.same_bits!r}")
        if self.context is not None and self.context < 2:
            raise InvalidRequest(
                f"context must hold at least a prompt token and an answer token, got {self.context}"
            )
        if self.page_size % PAGE_MULTIPLE:
            raise InvalidRequest(
                f"page_size must be a multiple of {PAGE_MULTIPLE}, got {self.page_size}"
            )
        if self.kv_dtype not in KV_DTYPES:
            raise InvalidRequest(
                f"kv_dtype must be one of {', '.join(KV_DTYPES)}, got {self.kv_dtype!r}"
            )
        if self.pin is not None and self.pin not in PINS:
            raise InvalidRequest(f"pin must be one of {', '.join(PINS)}, got {self.pin!r}")
        if self.max_batch_tokens < self.max_sequences:
            raise InvalidRequest(
                f"max_batch_tokens ({self.max_batch_tokens}) must be at least max_sequences "
                f"({self.max_sequences}): every running sequence gets a token per step"
            )
        if self.placement is not None and self.placement not in PLACEMENTS:
            raise InvalidRequest(
                f"placement must be one of {', '.join(PLACEMENTS)}, got {self.placement!r}"
            )
        if isinstance(self.expert_pins, str):
            raise InvalidRequest(
                f"expert_pins must be a list of pins, got the text {self.expert_pins!r}"
            )
        for pin in self.expert_pins:
            Pin.parse(pin)
        self.memory_bytes()
        self.accelerator_bytes()

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Build from loose options; an unknown name is an error that suggests the nearest."""
        known = [f.name for f in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise InvalidRequest(
                    f"unknown engine option {name!r}{hint} (known: {', '.join(known)})"
                )
        return cls(**options)

    def memory_bytes(self) -> int | None:
        """The budget in bytes, or None for what is available."""
        return _bytes("memory", self.memory)

    def accelerator_bytes(self) -> int | None:
        """The accelerator's budget in bytes, or None for what it has."""
        return _bytes("accelerator_memory", self.accelerator_memory)

    def replace(self, **changes: Any) -> EngineConfig:
        """A copy with some knobs changed."""
        return dataclasses.replace(self, **changes)


def _bytes(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} must be text such as '24GiB', got {text!r}")
    return units.parse_bytes(text)
