"""Devices that whole models are run on."""

from __future__ import annotations

import pytest

from moestro import devices
from moestro.devices.base import Device


@pytest.fixture(params=["reference", "cpu"])
def device(request: pytest.FixtureRequest) -> Device:
    if request.param not in devices.names():
        pytest.skip(f"this build has no device {request.param}")
    try:
        return devices.get(request.param)
    except ImportError as error:  # the native extension is not built
        pytest.skip(f"device {request.param} cannot be opened: {error}")
