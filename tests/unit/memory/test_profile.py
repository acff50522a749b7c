"""Profiles: what they count, that they come back, and that no file of any kind does harm."""

import json
import logging
import os
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_checkpoints import save_model, tiny_model

from moestro.checkpoints import open_checkpoint
from moestro.core import log
from moestro.core.errors import CheckpointError, InvalidRequest
from moestro.memory.convert import convert
from moestro.memory.placement import ExpertLayer, Room, place
from moestro.memory.profile import (
    SelectionProfile,
    load_profile,
    model_id,
    profile_path,
    save_profile,
)

EXPERTS = {2: 4, 3: 3}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MOESTRO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def said(caplog, monkeypatch):
    log.get(__name__)
    monkeypatch.setattr(logging.getLogger("moestro"), "propagate", True)
    return caplog


def some_profile() -> SelectionProfile:
    profile = SelectionProfile(EXPERTS, half_life=100)
    profile.observe("decode", 2, torch.tensor([[3, 1]]))
    profile.observe("prefill", 3, torch.tensor([[0], [2], [2]]))
    return profile


def test_a_selection_counts_half_after_the_half_life():
    profile = SelectionProfile(EXPERTS, half_life=2)
    profile.observe("decode", 2, torch.tensor([[0, 1]], dtype=torch.int32))
    for _ in range(4):
        profile.observe("decode", 2, torch.tensor([[2, 1]], dtype=torch.int32))
    ages = [2.0 ** (-age / 2) for age in range(5)]
    want = [ages[4], sum(ages), sum(ages[:4]), 0]
    assert profile.counts("decode")[2] == pytest.approx(want)
    assert profile.counts("decode")[3] == [0, 0, 0]
    assert profile.counts("prefill")[2] == [0, 0, 0, 0]


@given(
    st.lists(
        st.lists(st.integers(0, 3), min_size=2, max_size=2, unique=True), min_size=1, max_size=30
    ),
    st.lists(st.integers(1, 10), max_size=5),
)
def test_how_tokens_are_cut_into_calls_makes_no_difference(tokens, steps):
    whole, cut = (SelectionProfile(EXPERTS, half_life=7) for _ in range(2))
    whole.observe("prefill", 2, torch.tensor(tokens))
    rest = tokens
    for step in [*steps, len(tokens)]:
        if rest:
            cut.observe("prefill", 2, torch.tensor(rest[:step]))
        rest = rest[step:]
    assert cut.counts("prefill")[2] == pytest.approx(whole.counts("prefill")[2], rel=1e-12)


def test_selections_that_others_counted_fade_the_same():
    profile = SelectionProfile(EXPERTS, half_life=3)
    profile.add("decode", 2, torch.tensor([6, 0, 0, 1]), tokens=7)
    profile.add("decode", 2, torch.tensor([0, 3, 0, 0], dtype=torch.int32), tokens=3)
    assert profile.counts("decode")[2] == pytest.approx([3, 3, 0, 0.5])


def test_what_is_saved_is_loaded(cache):
    profile = some_profile()
    assert not profile.is_empty and SelectionProfile(EXPERTS).is_empty
    assert load_profile("ab12", EXPERTS).is_empty
    assert save_profile("ab12", profile)
    found = load_profile("ab12", EXPERTS)
    assert found.half_life == 100
    assert all(found.counts(phase) == profile.counts(phase) for phase in ("prefill", "decode"))
    assert [path.name for path in (cache / "profiles").iterdir()] == ["ab12.json"]
    assert load_profile("ab13", EXPERTS).is_empty


def test_a_profile_serves_a_placement():
    profile = some_profile()
    layers = [ExpertLayer(layer=n, num_experts=e, nbytes=4096) for n, e in EXPERTS.items()]
    room = {"accelerator": Room(nbytes=2 * 4096), "ram": Room()}
    counts = profile.counts("decode")
    placement = place(layers, room, policy="frequency", counts=counts)
    assert placement.experts(2, "accelerator") == (1, 3)
    assert placement.shares("accelerator", counts) == pytest.approx({2: 1, 3: 0})


def damage(content: dict, change: str) -> str:
    """The text of a profile with one thing wrong."""
    layer = content["layers"]["2"]
    if change == "cut":
        return json.dumps(content)[:-9]
    if change == "version":
        content["moestro_profile"] = 2
    elif change == "model":
        content["model"] = "cd"
    elif change == "half_life":
        content["half_life"] = 0
    elif change == "layers":
        del content["layers"]["3"]
    elif change == "short":
        layer["decode"].pop()
    elif change == "negative":
        layer["decode"][0] = -1
    elif change == "text":
        layer["decode"][0] = "1"
    elif change == "infinite":
        layer["decode"][0] = 1e300
        return json.dumps(content).replace("1e+300", "1e400")
    elif change == "foreign":
        return '[1, "something else"]'
    return json.dumps(content)


@pytest.mark.parametrize(
    "change",
    ["cut", "version", "model", "half_life", "layers", "short", "negative", "text", "infinite",
     "foreign"],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_said_once_and_replaced(change, said):
    path = profile_path("ab12")
    save_profile("ab12", some_profile())
    path.write_text(damage(json.loads(path.read_text()), change))
    assert load_profile("ab12", EXPERTS).is_empty
    assert len(said.records) == 1 and str(path) in said.text and "counted anew" in said.text
    save_profile("ab12", some_profile())
    assert not load_profile("ab12", EXPERTS).is_empty and len(said.records) == 1


def test_a_cache_that_cannot_be_written_does_no_harm(cache, said):
    cache.write_text("in the way")
    assert not save_profile("ab12", some_profile())
    assert len(said.records) == 1 and "cannot be written" in said.text


def test_a_failed_write_leaves_the_old_file_alone(cache, monkeypatch):
    save_profile("ab12", some_profile())
    before = profile_path("ab12").read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InvalidRequest, match="No space left on device"):
        SelectionProfile(EXPERTS).write(profile_path("ab12"), model="ab12")
    assert profile_path("ab12").read_bytes() == before
    assert len(list((cache / "profiles").iterdir())) == 1


def test_readers_never_see_half_a_file():
    profiles = [some_profile(), SelectionProfile(EXPERTS, half_life=100)]
    path = profile_path("ab12")
    save_profile("ab12", profiles[0])
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for profile in profiles:
                profile.write(path, model="ab12")

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(50):
            assert SelectionProfile.read(path, EXPERTS, model="ab12").half_life == 100
    finally:
        stop.set()
        for writer in writers:
            writer.join()


def test_exported_profiles_may_be_of_another_quantization(tmp_path):
    some_profile().write(tmp_path / "mine.json", model="ab12")
    with pytest.raises(CheckpointError, match="another model"):
        SelectionProfile.read(tmp_path / "mine.json", EXPERTS, model="cd34")
    found = SelectionProfile.read(tmp_path / "mine.json", EXPERTS)
    assert found.counts("decode") == some_profile().counts("decode")
    with pytest.raises(CheckpointError, match="does not exist"):
        SelectionProfile.read(tmp_path / "other.json", EXPERTS)


def test_a_packed_model_has_the_profile_of_its_source(tmp_path):
    tensors, specs = tiny_model()
    source = open_checkpoint(save_model(tmp_path / "source", tensors))
    convert(source, specs, tmp_path / "out")
    assert model_id(open_checkpoint(tmp_path / "out")) == model_id(source)
    tensors["norm"] = tensors["norm"].float()
    other = open_checkpoint(save_model(tmp_path / "other", tensors))
    assert model_id(other) != model_id(source)


def test_names_out_of_strangers_files_stay_in_the_cache(cache):
    for name in ("../../etc/passwd", "/etc/passwd", "", "a" * 65):
        path = profile_path(name)
        assert path.parent == cache / "profiles" and path.suffix == ".json"
    assert profile_path("ab12").name == "ab12.json"
