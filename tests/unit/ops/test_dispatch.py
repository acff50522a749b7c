"""Recording, replay, and the error for an op that a device lacks."""

from __future__ import annotations

import pytest
import torch

from moestro.core.errors import InvalidRequest, UnsupportedOp
from moestro.ops.contracts import Ops
from moestro.ops.dispatch import OP_NAMES, PythonOps, op
from moestro.ops.reference import ReferenceOps

ROWS = torch.tensor([2], dtype=torch.int32)


class Halves(PythonOps):
    """A device with one op."""

    device = "halves"

    @op
    def sigmoid(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        x[: int(rows)] /= 2


def test_recorded_ops_run_at_replay_with_what_the_buffers_hold_then():
    ops, x, rows = ReferenceOps(), torch.zeros(3, 1), ROWS.clone()
    with ops.record() as program:
        ops.sigmoid(x, rows)
        ops.sigmoid(x, rows)
    assert not x.any() and len(program) == 2
    program.replay()
    once = torch.tensor(0.5).sigmoid()
    torch.testing.assert_close(x[:, 0], torch.tensor([once, once, 0.0]))
    rows.fill_(3)
    x.zero_()
    program.replay()
    torch.testing.assert_close(x[:, 0], torch.full((3,), float(once)))


def test_ops_run_at_once_after_a_recording_and_after_one_that_failed():
    ops, x = ReferenceOps(), torch.zeros(2, 1)
    with ops.record():
        pass
    with pytest.raises(InvalidRequest), ops.record():
        raise InvalidRequest("stopped")
    ops.sigmoid(x, ROWS)
    assert x.tolist() == [[0.5], [0.5]]


def test_recordings_do_not_nest():
    ops = ReferenceOps()
    with (
        ops.record(),
        pytest.raises(UnsupportedOp, match="reference is already recording"),
        ops.record(),
    ):
        pass


def test_a_missing_op_is_named_with_its_device_and_what_there_is():
    ops = Halves()
    with pytest.raises(UnsupportedOp, match=r"halves does not implement the op 'moe'.*: sigmoid$"):
        ops.moe(1, 2, 3)
    with pytest.raises(AttributeError, match="'Halves' object has no attribute 'moes'"):
        ops.moes  # noqa: B018


def test_the_reference_implements_every_op():
    assert {"attention", "moe", "route", "linear"} <= OP_NAMES
    assert "record" not in OP_NAMES
    ops: Ops = ReferenceOps()
    for name in OP_NAMES:
        assert callable(getattr(ops, name))
