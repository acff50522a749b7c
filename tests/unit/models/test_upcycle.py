"""Upcycling a dense model into a mixture: names, values, determinism, refusals, no leftovers."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from moestro.checkpoints import open_checkpoint
from moestro.core.errors import CheckpointError, InvalidRequest, UnsupportedArchitecture
from moestro.models import describe, llama
from moestro.models.upcycle import Recipe, demo_source, upcycle

HIDDEN, WIDTH, VOCAB = 48, 40, 101


def weights(layers=2, seed=3):
    random = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=random)

    state = {
        "model.embed_tokens.weight": normal(VOCAB, HIDDEN),
        "model.norm.weight": normal(HIDDEN),
        "lm_head.weight": normal(VOCAB, HIDDEN),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for name, shape in {
            "self_attn.q_proj": (48, HIDDEN),
            "self_attn.k_proj": (16, HIDDEN),
            "self_attn.v_proj": (16, HIDDEN),
            "self_attn.o_proj": (HIDDEN, 48),
            "mlp.gate_proj": (WIDTH, HIDDEN),
            "mlp.up_proj": (WIDTH, HIDDEN),
            "mlp.down_proj": (HIDDEN, WIDTH),
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
        }.items():
            state[f"{at}.{name}.weight"] = normal(*shape)
    return state


@pytest.fixture
def dense(tmp_path):
    """A tiny dense checkpoint; ``dense(key=value)`` changes its configuration."""

    def make(**changes):
        folder = tmp_path / "dense"
        folder.mkdir()
        save_file(weights(), folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(llama.tiny() | changes))
        vocabulary = {chr(33 + i): i for i in range(VOCAB)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
        tokenizer.save(str(folder / "tokenizer.json"))
        return open_checkpoint(folder)

    return make


def make(checkpoint, out, **recipe):
    recipe = {"dtype": torch.float32} | recipe
    upcycle(checkpoint, describe(checkpoint), out, Recipe(**recipe))
    return load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())


def test_without_noise_all_experts_are_the_dense_mlp(dense, tmp_path):
    mixture, config = make(dense(), tmp_path / "out", noise=0.0)
    source = weights()
    for layer in range(2):
        for expert in range(4):
            block = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
            for ours, theirs in {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.items():
                dense_weight = source[f"model.layers.{layer}.mlp.{theirs}.weight"]
                assert torch.equal(mixture.pop(f"{block}.{ours}.weight"), dense_weight)
        assert mixture.pop(f"model.layers.{layer}.block_sparse_moe.gate.weight").shape == (4, 48)
    assert mixture.keys() == {name for name in source if ".mlp." not in name}
    assert all(torch.equal(mixture[name], source[name]) for name in mixture)
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (4, 2)
    assert config["tie_word_embeddings"] is False


def test_the_result_is_a_mixtral_that_we_read(dense, tmp_path):
    make(dense(rope_theta=5000.0), tmp_path / "out")
    description = describe(open_checkpoint(tmp_path / "out"))
    assert description.spec.model_type == "mixtral"
    assert description.spec.context_length == 256
    assert description.config.rope.theta == 5000.0
    assert description.config.num_experts == 4


def test_noise_is_relative_and_has_the_given_size(dense, tmp_path):
    mixture, _ = make(dense(), tmp_path / "out", noise=0.1)
    original = weights()["model.layers.1.mlp.gate_proj.weight"]
    block = "model.layers.1.block_sparse_moe.experts"
    factors = [mixture[f"{block}.{e}.w1.weight"] / original - 1 for e in range(4)]
    # 7680 draws: the standard error of the deviation is below 1 %, five of them are allowed.
    assert torch.stack(factors).std().item() == pytest.approx(0.1, rel=0.05)
    assert not torch.equal(factors[0], factors[1])


def test_the_same_seed_gives_the_same_bytes(dense, tmp_path):
    checkpoint = dense()
    outs = [tmp_path / name for name in "abc"]
    for out, seed in zip(outs, (0, 0, 1), strict=True):
        make(checkpoint, out, seed=seed)
    a, b, c = ((out / "model.safetensors").read_bytes() for out in outs)
    assert a == b
    assert a != c


def test_progress_ends_at_the_bytes_written(dense, tmp_path):
    checkpoint, seen = dense(), []
    out = tmp_path / "out"
    upcycle(checkpoint, describe(checkpoint), out, Recipe(), progress=lambda *p: seen.append(p))
    done, total = seen[-1]
    assert done == total == sum(t.nbytes for t in load_file(out / "model.safetensors").values())
    assert [d for d, _ in seen] == sorted({d for d, _ in seen})


def test_a_failure_leaves_nothing_behind(dense, tmp_path):
    checkpoint = dense()
    description = describe(checkpoint)
    (tmp_path / "dense/tokenizer.json").unlink()
    with pytest.raises(CheckpointError):
        upcycle(checkpoint, description, tmp_path / "out", Recipe())
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_left_alone(dense, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/precious").write_text("x")
    with pytest.raises(InvalidRequest, match="exists already"):
        make(dense(), tmp_path / "out")
    assert (tmp_path / "out/precious").read_text() == "x"


def test_models_without_a_place_in_a_mixture_are_refused(dense, tmp_path):
    scaled = dense(rope_scaling={"rope_type": "linear", "factor": 2.0})
    with pytest.raises(UnsupportedArchitecture, match="rotary"):
        make(scaled, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_mixture_is_no_source(dense, tmp_path):
    make(dense(), tmp_path / "out")
    with pytest.raises(UnsupportedArchitecture, match="mixtral"):
        make(open_checkpoint(tmp_path / "out"), tmp_path / "again")


@pytest.mark.parametrize(
    "recipe",
    [{"experts": 0}, {"top_k": 5}, {"top_k": 0}, {"noise": -0.1}, {"noise": float("nan")},
     {"dtype": torch.int8}],
)  # fmt: skip
def test_impossible_recipes_are_refused(recipe):
    with pytest.raises(InvalidRequest):
        Recipe(**recipe)


def test_the_demo_source_is_a_gguf_file():
    assert demo_source().suffix == ".gguf"
