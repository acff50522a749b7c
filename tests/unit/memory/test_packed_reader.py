"""Loading a packed model: straight into place, in pieces, and in no more memory than the model."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import save_model, tiny_model

from moestro.checkpoints import open_checkpoint
from moestro.core.errors import CheckpointError, InvalidRequest
from moestro.memory.convert import convert
from moestro.memory.loader import load_weights
from moestro.memory.policy import FormatPolicy
from moestro.memory.weights import ExpertSources, WeightSpec

KEEP = FormatPolicy.parse("")
PIECE = 1000


@pytest.fixture
def packed(tmp_path):
    tensors, specs = tiny_model()
    source = open_checkpoint(save_model(tmp_path / "source", tensors))
    convert(source, specs, tmp_path / "out", policy=KEEP)
    return open_checkpoint(tmp_path / "out"), specs


def bytes_of(weights):
    parts = (w if isinstance(w, torch.Tensor) else getattr(w, "buffer", None) for w in weights)
    return [w.data if p is None else p for w, p in zip(weights, parts, strict=True)]


def test_pieces_of_any_size_give_the_same_weights(packed, monkeypatch):
    checkpoint, specs = packed
    whole = load_weights(checkpoint, specs, policy=KEEP)
    monkeypatch.setattr("moestro.memory.packed_reader._READ_NBYTES", PIECE)
    pieces = load_weights(checkpoint, specs, policy=KEEP)
    assert list(whole) == list(pieces)
    for a, b in zip(bytes_of(whole.values()), bytes_of(pieces.values()), strict=True):
        assert torch.equal(a, b)


def test_progress_rises_to_the_total_in_the_calling_thread(packed, monkeypatch):
    checkpoint, specs = packed
    monkeypatch.setattr("moestro.memory.packed_reader._READ_NBYTES", PIECE)
    seen: list[tuple[int, int]] = []
    load_weights(checkpoint, specs, policy=KEEP, progress=lambda *step: seen.append(step))
    done, totals = zip(*seen, strict=True)
    assert done[0] == 0 and done[-1] == totals[0] and len(set(totals)) == 1
    assert list(done) == sorted(done) and len(done) > totals[0] // PIECE
    assert max(b - a for a, b in itertools.pairwise(done)) <= PIECE


def test_a_file_that_shrinks_is_noticed_while_several_threads_read(packed):
    checkpoint, specs = packed
    with open(checkpoint.path / "experts-001.bin", "r+b") as file:
        file.truncate(5000)
    with pytest.raises(CheckpointError, match=r"experts-001\.bin ends at byte 5000"):
        load_weights(checkpoint, specs, policy=KEEP)


@pytest.mark.parametrize(("start", "size"), [(-1, 4), (0, 10**6), (10**6, 0)])
def test_reading_beyond_a_weight_is_refused(packed, start, size):
    with pytest.raises(InvalidRequest, match="of norm, which has 256"):
        packed[0].read_into("norm", start, torch.zeros(size, dtype=torch.uint8))


LOAD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_packed_reader import KEEP, big_experts
from moestro.checkpoints import open_checkpoint
from moestro.memory.loader import load_weights

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))

before = status("VmRSS")
weights = load_weights(open_checkpoint(Path(sys.argv[1])), [big_experts()], policy=KEEP)
print(status("VmHWM") - before, sum(w.nbytes for w in weights.values()))
"""


def big_experts() -> WeightSpec:
    sources = {name: (name,) for name in ("gate", "up", "down")}
    return WeightSpec(
        key="layers.0.experts",
        kind="experts",
        role="experts",
        shape=(8, 2048, 1024),
        expert_sources=ExpertSources(**sources),
        layer=0,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_no_more_memory_than_the_model(tmp_path):
    shapes = {"gate": (8, 2048, 1024), "up": (8, 2048, 1024), "down": (8, 1024, 2048)}
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    source = open_checkpoint(save_model(tmp_path / "source", tensors))
    convert(source, [big_experts()], tmp_path / "out", policy=KEEP)
    here = str(Path(__file__).parent)
    run = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "out"), here],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    grown, model = map(int, run.stdout.split())
    assert model == 8 * 3 * 2048 * 1024 * 2
    # The readers' stacks and what torch touches; less than one more copy of what they read at once.
    assert grown <= model + (32 << 20)
