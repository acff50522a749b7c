"""Models from GGUF files of every quantized type: the logits of transformers on decoded weights."""

from __future__ import annotations

from pathlib import Path

import model_logits
import pytest
import tiny_models
import torch

# One block of the widest types per row.
SIZES = {
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "head_dim": 64,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize("source_type", tiny_models.QUANTIZED_BLOCKS)
def test_logits_of_a_quantized_file(source_type: str, tmp_path: Path) -> None:
    reference = tiny_models.make("qwen3_moe", **SIZES)
    path = tiny_models.write_quantized_gguf(reference, tmp_path / "model.gguf", source_type)
    ids = torch.randint(101, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        want = reference(torch.tensor([ids])).logits[0]
    exact = model_logits.sequence_logits(model_logits.load(path, device="reference"), ids)
    assert float((exact - want).abs().max() / want.abs().max()) < 1e-4
    # The integer core rounds activations to eight bits, so a token may be routed elsewhere.
    rounded = model_logits.sequence_logits(model_logits.load(path, device="cpu"), ids)
    similar = torch.nn.functional.cosine_similarity(rounded, want, dim=-1)
    assert float(similar.median()) > 0.999
