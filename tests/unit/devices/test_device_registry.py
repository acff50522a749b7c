"""Devices by name."""

from __future__ import annotations

import pytest
import torch

from moestro import devices
from moestro.core.errors import InvalidRequest, UnsupportedOp
from moestro.ops.reference import ReferenceOps


def test_reference_device():
    device = devices.get("reference")
    assert device.name == "reference"
    assert isinstance(device.ops, ReferenceOps)
    assert devices.get("reference") is device
    assert device.isa == "torch"


def test_reference_device_sets_the_threads_of_torch():
    before = torch.get_num_threads()
    devices.get("reference").set_threads(before + 1)
    assert torch.get_num_threads() == before + 1
    devices.get("reference").set_threads(before)


def test_a_device_without_all_ops_says_what_it_lacks():
    with pytest.raises(UnsupportedOp, match=r"does not run whole models yet.*device='cpu'"):
        devices.get("cuda")


def test_unknown_device_lists_the_known_ones():
    with pytest.raises(InvalidRequest, match=r"unknown device .abacus.; known: .*reference"):
        devices.get("abacus")
    with pytest.raises(InvalidRequest, match="'base'"):
        devices.get("base")
