"""How fast a placed model runs, predicted from bytes and operations: pure arithmetic.

A part of a step takes as long as the slower of two things that overlap: bringing its bytes, and its
operations. What one part waits for another is added up, across layers and between devices, which is
a little more than hybrid execution takes where an accelerator and the CPU compute at the same time.
So every rate that is higher, and every expert in a faster tier, can only make a step shorter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moestro.machine.rates import READ_SHARE, CpuRates, KernelRate, MachineRates
from moestro.memory.model_shape import Cache, Experts, Group, ModelShape, Product
from moestro.memory.pins import Tier

#: what a step waits for, as it is said to people
RAM, CPU, DISK = "RAM bandwidth", "CPU compute", "disk"
ACCELERATOR_READ, ACCELERATOR_COMPUTE = "accelerator memory", "accelerator compute"
BUS, FIXED = "bus", "fixed costs"

# What kernels reach of the peak of their instruction where they were not measured: the first token
# of a product, which decodes the weights, and each further one (docs/BENCHMARKS.md).
_ONE_SHARE = {False: 0.2, True: 0.4}
_MORE_SHARE = {False: 0.6, True: 0.75}
# What attention reaches of the peak of float multiply-adds; where only that of products of pairs is
# known, it is taken for twice the former.
_ATTENTION_SHARE = 0.9
# Seconds that were found to remain of whole models beside the above, on two cores of Zen 4: of each
# layer's barriers, of each step's scheduling and sampling, and of sampling for each token of the
# vocabulary; and core seconds of what is done row by row (norms, rope, routing, quantizing,
# activations): of each row of a layer, and of each number in it.
_LAYER_SECONDS = 15e-6
_STEP_SECONDS = 80e-6
_LOGIT_SECONDS = 1.5e-9
_ROW_SECONDS = 6e-6
_NUMBER_SECONDS = 0.3e-9
_ACCELERATOR_ATTENTION_SHARE = 0.25
# Seconds that a hand-over between an accelerator and the CPU costs in a layer, and starting what an
# accelerator computes of one.
_BUS_SECONDS = 30e-6
_LAUNCH_SECONDS = 20e-6


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """tokens_per_second: of all sequences together. shares: of the time, by what is waited for,
    the largest first.
    """

    tokens_per_second: float
    shares: Mapping[str, float]

    @property
    def limit(self) -> str:
        """What most of the time goes to."""
        return next(iter(self.shares), FIXED)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Where a model's parts are. groups: tier by key. selected: for each layer of experts and tier,
    the probabilities that a token chooses an expert, with how many experts there have it.
    """

    groups: Mapping[str, Tier]
    selected: Mapping[int, Mapping[Tier, Mapping[float, int]]]

    @property
    def uses_accelerator(self) -> bool:
        """Anything is there, so that activations have to cross for what is not."""
        return "accelerator" in self.groups.values() or any(
            tiers.get("accelerator") for tiers in self.selected.values()
        )


class Seconds(dict[str, float]):
    """Time by what is waited for."""

    def wait(self, name: str, seconds: float) -> None:
        self[name] = self.get(name, 0.0) + seconds

    def join(self, other: Seconds) -> None:
        for name, seconds in other.items():
            self.wait(name, seconds)


class SpeedModel:
    """Predicts for one model on one machine."""

    def __init__(self, shape: ModelShape, machine: MachineRates, placed: Placed) -> None:
        self._shape, self._machine, self._placed = shape, machine, placed

    def decode(self, *, depth: int, sequences: int) -> Prediction:
        """One token for each sequence, after ``depth`` others."""
        step = self._step(tokens=sequences, sequences=sequences, depth=depth, logits=sequences)
        return _prediction(step, sequences)

    def prefill(self, *, tokens: int, chunk: int) -> Prediction:
        """A prompt in chunks, up to its first answer token."""
        total: Seconds = Seconds()
        for start in range(0, tokens, chunk):
            size = min(chunk, tokens - start)
            step = self._step(
                tokens=size,
                sequences=1,
                depth=start + size / 2,
                logits=1 if start + size == tokens else 0,
            )
            total.join(step)
        return _prediction(total, tokens)

    def load_seconds(self) -> float | None:
        """Reading the files, of packed models without the experts that stay on disk."""
        if self._machine.disk is None:
            return None
        left = 0
        if self._shape.packed:
            left = sum(
                sum(self._placed.selected[e.layer].get("disk", {}).values()) * e.nbytes
                for e in self._shape.experts
            )
        return max(0, self._shape.stored_nbytes - left) / self._machine.disk

    def _step(self, *, tokens: int, sequences: int, depth: float, logits: int) -> Seconds:
        """Seconds by what is waited for."""
        total: Seconds = Seconds()
        for group in self._shape.groups:
            count = logits if group.per_logit else tokens
            if group.products and count:
                total.join(self._products(group.products, 1, count, self._tier(group)))
        for experts in self._shape.experts:
            total.join(self._experts(experts, tokens))
        for cache in self._shape.caches:
            total.join(self._attention(cache, tokens, sequences, depth))
        total.wait(FIXED, _STEP_SECONDS + logits * self._shape.vocab_size * _LOGIT_SECONDS)
        total.wait(FIXED, self._layers_seconds())
        total.wait(CPU, tokens * self._rows_seconds())
        return total

    def _tier(self, group: Group) -> Tier:
        return self._placed.groups[group.key]

    def _layers_seconds(self) -> float:
        on = sum(
            self._placed.groups.get(f"layers.{cache.layer}.attention") == "accelerator"
            for cache in self._shape.caches
        )
        return on * _LAUNCH_SECONDS + (len(self._shape.caches) - on) * _LAYER_SECONDS

    def _rows_seconds(self) -> float:
        """Of one token in all layers, of what the CPU does row by row."""
        threads, chosen = self._machine.cpu.threads, {e.layer: e for e in self._shape.experts}
        total = 0.0
        for cache in self._shape.caches:
            if self._placed.groups.get(f"layers.{cache.layer}.attention") == "accelerator":
                continue
            numbers = self._shape.scratch_per_token / 4
            if (experts := chosen.get(cache.layer)) is not None:
                hidden = self._shape.hidden_size
                width = sum(p.operations for p in experts.products) / (6 * hidden)
                numbers += experts.top_k * (3 * width + 2 * hidden)
            total += (_ROW_SECONDS + numbers * _NUMBER_SECONDS) / threads
        return total

    def _experts(self, experts: Experts, tokens: int) -> Seconds:
        """Those that any of the tokens chooses, each with the tokens that chose it."""
        total: Seconds = Seconds()
        disk_seconds = 0.0
        cpu: Seconds = Seconds()
        for tier, selected in self._placed.selected[experts.layer].items():
            for chance, number in selected.items():
                distinct = number * (1 - (1 - chance) ** tokens)
                rows = number * chance * tokens
                if tier == "accelerator":
                    total.join(self._products(experts.products, distinct, rows, tier))
                else:
                    cpu.join(self._products(experts.products, distinct, rows, "ram"))
                if tier == "disk" and self._machine.disk is not None:
                    disk_seconds += distinct * experts.nbytes / self._machine.disk
        cpu_seconds = sum(cpu.values())
        total.join(cpu)
        # Misses are read while resident experts are computed.
        total.wait(DISK, max(0.0, disk_seconds - cpu_seconds))
        if cpu_seconds and self._placed.uses_accelerator:
            total.join(self._bus(experts, tokens))
        return total

    def _bus(self, experts: Experts, tokens: int) -> Seconds:
        """Activations to the CPU and each chosen expert's result back, in float32."""
        rates = self._machine.accelerator
        if rates is None:
            return Seconds()
        row = 4.0 * tokens * self._shape.hidden_size
        moved = row / rates.to_host + experts.top_k * row / rates.to_device
        return Seconds({BUS: moved + _BUS_SECONDS})

    def _products(
        self, products: tuple[Product, ...], count: float, rows: float, tier: Tier
    ) -> Seconds:
        """``count`` copies of the products for ``rows`` tokens in total."""
        nbytes = count * sum(p.nbytes for p in products)
        rates = self._machine.accelerator
        if tier == "accelerator" and rates is not None:
            compute = rows * sum(p.operations for p in products) / rates.compute
            return _longer(ACCELERATOR_READ, nbytes / rates.read, ACCELERATOR_COMPUTE, compute)
        cpu = self._machine.cpu
        read = compute = 0.0
        for product in products:
            rate = kernel_rate(cpu, product)
            read += count * product.nbytes / (cpu.read.median * rate.from_memory)
            compute += count * product.operations / rate.one
            compute += max(0.0, rows - count) * product.operations / rate.more
        return _longer(RAM, read, CPU, compute)

    def _attention(self, cache: Cache, tokens: int, sequences: int, depth: float) -> Seconds:
        seen = cache.seen(depth)
        nbytes = sequences * seen * cache.nbytes
        operations = tokens * seen * cache.operations
        rates = self._machine.accelerator
        on = self._placed.groups.get(f"layers.{cache.layer}.attention")
        if on == "accelerator" and rates is not None:
            return _longer(
                ACCELERATOR_READ,
                nbytes / rates.read,
                ACCELERATOR_COMPUTE,
                operations / (rates.compute * _ACCELERATOR_ATTENTION_SHARE),
            )
        cpu = self._machine.cpu
        return _longer(
            RAM,
            nbytes / (cpu.read.median * READ_SHARE),
            CPU,
            operations / ((cpu.fma or cpu.pairs / 2) * _ATTENTION_SHARE),
        )


def kernel_rate(cpu: CpuRates, product: Product) -> KernelRate:
    """What was measured of a format, else a share of the peak of its instruction."""
    known = cpu.kernels.get(product.format_name)
    if known is not None:
        return known
    peak = cpu.pairs if product.is_float else cpu.dot
    return KernelRate(
        one=peak * _ONE_SHARE[product.is_float],
        more=peak * _MORE_SHARE[product.is_float],
        from_memory=READ_SHARE,
    )


def _longer(read: str, read_seconds: float, compute: str, compute_seconds: float) -> Seconds:
    """The slower of two things that overlap."""
    if read_seconds >= compute_seconds:
        return Seconds({read: read_seconds})
    return Seconds({compute: compute_seconds})


def _prediction(step: Seconds, tokens: int) -> Prediction:
    seconds = sum(step.values())
    longest = sorted(step.items(), key=lambda item: -item[1])
    shares = {name: value / seconds for name, value in longest if value > 0}
    return Prediction(tokens_per_second=tokens / seconds, shares=shares)
