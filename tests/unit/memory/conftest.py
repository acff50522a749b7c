"""The model that the conversion tests share."""

import pytest
from tiny_checkpoints import save_model, tiny_model

from moestro.checkpoints import open_checkpoint


@pytest.fixture
def model(tmp_path):
    """(opened safetensors checkpoint, specs, tensors)."""
    tensors, specs = tiny_model()
    return open_checkpoint(save_model(tmp_path / "source", tensors)), specs, tensors
