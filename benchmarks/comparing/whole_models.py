"""Whole models: ours against a peer on the same file, prefill and decode, short and deep."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench_engine import Session
from limits import Probes
from make_gguf import SHAPES
from peers.worker import Worker

PREFILL = 512
DECODED = 64


class Resident:
    """A peer that stays loaded: llama.cpp (``llama_model.cpp``) or ``transformers_model.py``."""

    def __init__(self, worker: Worker, *, decoded: int) -> None:
        self._worker, self._decoded = worker, decoded

    def logits(self, ids: list[int]) -> list[float]:
        """After these tokens; llama.cpp only, as the other has weights of its own."""
        answer = self._worker.ask(f"check {' '.join(map(str, ids))}")
        return [float(logit) for logit in answer["logits"]]

    def prefill(self) -> float:
        return float(self._worker.ask(f"prefill {PREFILL}")["seconds"]) / PREFILL

    def decode(self, context: int) -> float:
        answer = self._worker.ask(f"decode {context} {self._decoded}")
        return float(answer["seconds"]) / self._decoded


def transformers_config(shape: str, layers: int) -> dict[str, Any]:
    """The configuration of the model that ``make_gguf.py`` writes."""
    facts = SHAPES[shape]
    return {
        "num_hidden_layers": layers,
        "hidden_size": facts.hidden_size,
        "intermediate_size": 3 * facts.hidden_size,
        "moe_intermediate_size": facts.moe_intermediate_size,
        "num_experts": facts.num_experts,
        "num_experts_per_tok": facts.num_experts_per_tok,
        "num_attention_heads": facts.num_attention_heads,
        "num_key_value_heads": facts.num_key_value_heads,
        "head_dim": facts.head_dim,
        "vocab_size": facts.vocab_size,
        "max_position_embeddings": facts.context_length,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "tie_word_embeddings": False,
    }


def check(session: Session, peer: Resident) -> float:
    """How far both disagree after the same tokens: root mean square difference of the log
    probabilities of our likeliest tokens, over the spread of the peer's over all tokens.
    """
    ids = [7 * index % session.spec.vocab_size for index in range(3, 35)]
    theirs = torch.tensor(peer.logits(ids)).double().log_softmax(0)
    ours = session.likeliest(ids)
    squares = [(value - float(theirs[token])) ** 2 for token, value in ours]
    return math.sqrt(statistics.fmean(squares)) / float(theirs.std())


@dataclass(frozen=True, kw_only=True)
class Row:
    """One file type and task: ``prefill-512`` or ``decode-CONTEXT``. us: per layer and token,
    medians over the rounds. ratio: peer's time over ours in the same round, median, least and
    greatest. Fractions: of decode, bytes per token over time, of the neighbouring read probes.
    """

    file_type: str
    task: str
    ours_us: float
    peer_us: float
    ratio: float
    ratio_min: float
    ratio_max: float
    ours_of_read: float | None
    peer_of_read: float | None


def measure(
    file_type: str, task: str, session: Session, peer: Resident, probes: Probes, rounds: int
) -> Row:
    """Probe, ours, probe, peer, probe, ..., each round."""
    kind, _, number = task.partition("-")
    context = int(number)
    ours: Callable[[], float]
    theirs: Callable[[], float]
    if kind == "prefill":
        nbytes = 0
        ours, theirs = (lambda: session.prefill(PREFILL)), peer.prefill
    else:
        nbytes = session.bytes.of_token(context + DECODED // 2)
        ours, theirs = (lambda: session.decode(context, DECODED)), (lambda: peer.decode(context))
    ours()
    theirs()
    samples: list[tuple[float, ...]] = []
    before = probes.read()
    for _ in range(rounds):
        mine = ours()
        between = probes.read()
        other = theirs()
        after = probes.read()
        our_rate, peer_rate = (before + between) / 2, (between + after) / 2
        samples.append((
            mine, other, other / mine, nbytes / mine / our_rate, nbytes / other / peer_rate,
        ))  # fmt: skip
        before = after
    columns = list(zip(*samples, strict=True))
    medians = [statistics.median(column) for column in columns]
    scale = 1e6 / session.spec.num_layers
    return Row(
        file_type=file_type, task=task, ours_us=medians[0] * scale, peer_us=medians[1] * scale,
        ratio=medians[2], ratio_min=min(columns[2]), ratio_max=max(columns[2]),
        ours_of_read=medians[3] if nbytes else None, peer_of_read=medians[4] if nbytes else None,
    )  # fmt: skip
