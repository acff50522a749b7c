"""The MoE operator alone: ours against a peer's, on the same weights, inputs and routing."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bench_moe import Shape
from comparing.weights import DISTINCT, PARTS, Case
from limits import Probes
from moestro import formats, native
from moestro.memory.expert_bank import BlobLayout, ExpertBank
from peers.worker import Worker

#: seconds of work that one measurement of one side should take
_SLICE = 0.12
_MOST_CALLS = 200
_CHECKED_TOKENS = 4

Ids = npt.NDArray[np.int32]


class OurOperator:
    """Banks of several layers with the same experts, and recorded programs over all of them."""

    def __init__(self, case: Case, layers: int) -> None:
        self.shape = case.shape
        name = case.kind.format
        hidden, inter = case.shape.hidden_size, case.shape.intermediate_size
        sizes = [(name, inter, hidden), (name, inter, hidden), (name, hidden, inter)]
        layout = BlobLayout.plan(sizes)
        self.expert_nbytes = sum(formats.get(f).nbytes(r, c) for f, r, c in sizes)
        self.banks = [ExpertBank(layout, case.shape.num_experts) for _ in range(layers)]
        for bank in self.banks:
            for e in range(case.shape.num_experts):
                parts = [case.parts[part].packed[e % DISTINCT] for part in PARTS]
                layout.fill(bank.blob(e), parts)

    def check(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The first layer's output."""
        out = torch.zeros_like(x)
        rows = torch.tensor([len(x)], dtype=torch.int32)
        self._issue(None, self.banks[0], x, ids, weights, out, rows)
        return out

    def run(self, ids: Ids) -> list[float]:
        """Seconds of each call over all layers; ids int32 [calls, layers, tokens, top_k]."""
        calls, layers, tokens, top_k = ids.shape
        x = torch.randn(tokens, self.shape.hidden_size)
        out = torch.zeros_like(x)
        weights = torch.full((tokens, top_k), 1 / top_k)
        rows = torch.tensor([tokens], dtype=torch.int32)
        chosen = [torch.zeros(tokens, top_k, dtype=torch.int32) for _ in range(layers)]
        program = native.Program()
        for bank, layer_ids in zip(self.banks, chosen, strict=True):
            self._issue(program, bank, x, layer_ids, weights, out, rows)
        routings = torch.from_numpy(ids)
        seconds = []
        for call in range(calls):
            for layer in range(layers):
                chosen[layer].copy_(routings[call, layer])
            start = time.perf_counter()
            program.replay()
            seconds.append(time.perf_counter() - start)
        return seconds

    @staticmethod
    def _issue(
        program: native.Program | None, bank: ExpertBank, x: Tensor, ids: Tensor, weights: Tensor,
        out: Tensor, rows: Tensor,
    ) -> None:  # fmt: skip
        projections = [(p.format_name, p.rows, p.cols, p.offset) for p in bank.projections]
        native.core.moe(program, x, ids, weights, bank.pointers, projections, "silu", out, rows)


def reference(case: Case, weights_of: str, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The operator in float64 on ``source`` weights or on the ``decoded`` ones."""

    def matrix(part: str, expert: int) -> Tensor:
        values = case.source[part] if weights_of == "source" else case.parts[part].values
        if values is None:
            raise ValueError(f"{case.name} has no codes that both sides read")
        return values[expert % DISTINCT].double()

    out = torch.zeros(x.shape, dtype=torch.float64)
    for token, row in enumerate(x.double()):
        for slot, expert in enumerate(ids[token].tolist()):
            gate, up = matrix("gate", expert) @ row, matrix("up", expert) @ row
            h = torch.nn.functional.silu(gate) * up
            out[token] += float(weights[token, slot]) * (matrix("down", expert) @ h)
    return out


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Relative errors (norm over norm): to the weights before quantization, and to what the shared
    codes stand for, which is the error of the arithmetic alone.
    """

    source: float
    decoded: float | None

    def __str__(self) -> str:
        text = f"{self.source:.5f} to the source weights"
        return text if self.decoded is None else f"{text} ({self.decoded:.5f} to the decoded)"


def check(case: Case, ours: OurOperator, peer: Worker) -> tuple[Errors, Errors]:
    """Errors of ours and of the peer on the same four tokens."""
    generator = torch.Generator().manual_seed(1)
    shape, count = case.shape, _CHECKED_TOKENS
    x = torch.randn(count, shape.hidden_size, generator=generator).bfloat16().float()
    ids = _draw(shape, (count,), generator)
    weights = torch.rand(count, shape.top_k, generator=generator)
    weights /= weights.sum(1, keepdim=True)
    names = []
    for name, data in (("x", x), ("ids", ids), ("weights", weights)):
        path = case.folder / f"check.{name}"
        data.numpy().tofile(path)
        names.append(str(path))
    result = case.folder / "check.out"
    peer.ask(f"check {count} {' '.join(names)} {result}")
    theirs = torch.from_numpy(np.fromfile(result, np.float32)).view(count, -1)
    mine = ours.check(x, ids, weights)
    wanted = {"source": reference(case, "source", x, ids, weights)}
    if all(part.values is not None for part in case.parts.values()):
        wanted["decoded"] = reference(case, "decoded", x, ids, weights)
    return _errors(mine, wanted), _errors(theirs, wanted)


def _errors(found: Tensor, wanted: dict[str, Tensor]) -> Errors:
    relative = {
        name: float((found.double() - want).norm() / want.norm()) for name, want in wanted.items()
    }
    return Errors(source=relative["source"], decoded=relative.get("decoded"))


def _draw(shape: Shape, sizes: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform routing: int32 [*sizes, top_k], distinct experts for each token."""
    scores = torch.rand(*sizes, shape.num_experts, generator=generator)
    return scores.topk(shape.top_k, dim=-1).indices.int()


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind and number of tokens. us: per layer, medians over the rounds. ratio: peer's time
    over ours in the same round (above one: we are faster), median, least and greatest. Fractions
    are of the neighbouring probes: of read bandwidth, and of the arithmetic that ``peak`` names.
    """

    kind: str
    tokens: int
    ours_us: float
    peer_us: float
    ratio: float
    ratio_min: float
    ratio_max: float
    ours_of_read: float
    peer_of_read: float
    peak: str
    ours_of_peak: float
    peer_of_peak: float


def measure(
    case: Case, ours: OurOperator, peer: Worker, tokens: int, probes: Probes, rounds: int
) -> Row:
    """Probe, ours, probe, peer, probe, ...: each side's time beside the probes around it."""
    shape, layers = case.shape, len(ours.banks)
    generator = torch.Generator().manual_seed(tokens)
    first = _draw(shape, (1, layers, tokens), generator).numpy()
    ours.run(first)
    our_calls = _calls(ours.run(first)[0])
    _ask(peer, case.folder, first)
    peer_calls = _calls(_ask(peer, case.folder, first)[0])
    operations = 2 * 3 * tokens * shape.top_k * shape.hidden_size * shape.intermediate_size
    samples = []
    peak = probes.peak_of(formats.get(case.kind.format))
    read, top = probes.read(), probes.take(peak)
    for _ in range(rounds):
        ids = _draw(shape, (max(our_calls, peer_calls), layers, tokens), generator).numpy()
        nbytes = _distinct(ids) * ours.expert_nbytes
        mine = statistics.median(ours.run(ids[:our_calls])) / layers
        between = probes.read()
        theirs = statistics.median(_ask(peer, case.folder, ids[:peer_calls])) / layers
        read_after, top_after = probes.read(), probes.take(peak)
        limit = (top + top_after) / 2
        samples.append((
            mine * 1e6, theirs * 1e6, theirs / mine,
            nbytes / mine / ((read + between) / 2), nbytes / theirs / ((between + read_after) / 2),
            operations / mine / limit, operations / theirs / limit,
        ))  # fmt: skip
        read, top = read_after, top_after
    columns = list(zip(*samples, strict=True))
    medians = [statistics.median(column) for column in columns]
    return Row(
        kind=case.name, tokens=tokens, ours_us=medians[0], peer_us=medians[1], ratio=medians[2],
        ratio_min=min(columns[2]), ratio_max=max(columns[2]), ours_of_read=medians[3],
        peer_of_read=medians[4], peak=peak, ours_of_peak=medians[5], peer_of_peak=medians[6],
    )  # fmt: skip


def _calls(seconds: float) -> int:
    return max(1, min(_MOST_CALLS, int(_SLICE / seconds)))


def _ask(peer: Worker, folder: Path, ids: Ids) -> list[float]:
    path = folder / "run.ids"
    ids.tofile(path)
    return peer.ask(f"run {ids.shape[2]} {ids.shape[0]} {path}")["seconds"]


def _distinct(ids: Ids) -> float:
    """Experts that one layer of one call reads, on average."""
    rows = ids.reshape(-1, ids.shape[2] * ids.shape[3])
    return float(np.mean([len(np.unique(row)) for row in rows]))
