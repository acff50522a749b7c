"""Tokenizers from the files of a Hugging Face checkpoint, in all the ways those files add up."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import processors
from vocabularies import StandIn, byte_level_backend, write_json

from moestro.core.errors import CheckpointError
from moestro.text import Tokenizer, load_tokenizer, save_tokenizer

BOS, EOS, EOT = 259, 260, 261
CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}


def load(
    directory: Path,
    *,
    backend: Backend | None = None,
    config: dict[str, Any] | None = None,
    container: str = "safetensors",
    **files: Any,
) -> Tokenizer:
    """Write tokenizer.json and the given JSON files (``name`` for name.json), then load."""
    (backend or byte_level_backend()).save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        write_json(directory / f"{name}.json", content)
    return load_tokenizer(StandIn(path=directory, container=container, config=config or {}))


@pytest.mark.parametrize("container", ["safetensors", "packed"])
def test_a_directory_with_tokenizer_json_alone(tmp_path, container):
    tokenizer = load(tmp_path, container=container)
    assert tokenizer.decode(tokenizer.encode("hello 🦙")) == "hello 🦙"
    assert tokenizer.encode("hell") == [258]
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.chat_template) == (None, (), None)
    assert tokenizer.vocab_size == 262


def test_a_single_weights_file_finds_the_files_beside_it(tmp_path):
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(
        StandIn(path=tmp_path / "model.safetensors", container="safetensors")
    )  # fmt: skip
    assert tokenizer.encode("hell") == [258]


def test_roles_of_tokens_in_both_spellings(tmp_path):
    tokenizer = load(tmp_path, tokenizer_config={**CONFIG, "pad_token": None})
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.bos_id == BOS
    assert tokenizer.eos_ids == (EOS,)


def test_special_tokens_map_fills_in_what_the_config_leaves_open(tmp_path):
    tokenizer = load(
        tmp_path,
        tokenizer_config={"eos_token": "</s>", "bos_token": None},
        special_tokens_map={"eos_token": "<|eot|>", "bos_token": "<s>", "pad_token": "</s>"},
    )
    assert tokenizer.special_tokens == {"eos_token": "</s>", "pad_token": "</s>"}


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        ({"eos_token_id": [EOT, EOS]}, {}, (EOT, EOS)),
        ({"eos_token_id": EOT}, {}, (EOT, EOS)),
        ({}, {"eos_token_id": EOT}, (EOT, EOS)),
        ({"eos_token_id": EOS}, {"eos_token_id": EOT}, (EOS,)),
        ({"eos_token_id": None}, {"eos_token_id": [EOT]}, (EOT, EOS)),
        ({}, {}, (EOS,)),
    ],
)
def test_all_end_tokens_count(tmp_path, generation, config, ids):
    tokenizer = load(tmp_path, config=config, tokenizer_config=CONFIG, generation_config=generation)
    assert tokenizer.eos_ids == ids


@pytest.mark.parametrize(
    ("declared", "ids"),
    [
        ({}, [BOS, 258]),  # what tokenizer.json does
        ({"add_bos_token": True, "add_eos_token": True}, [BOS, 258, EOS]),
        ({"add_bos_token": False}, [258]),
        ({"add_eos_token": True}, [258, EOS]),
        ({"add_bos_token": True, "bos_token": None}, [258]),
    ],
)
def test_bos_and_eos_as_the_config_says(tmp_path, declared, ids):
    backend = byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    tokenizer = load(tmp_path, backend=backend, tokenizer_config={**CONFIG, **declared})
    assert tokenizer.encode("hell", add_special=True) == ids
    assert tokenizer.encode("hell") == [258]


def test_prompts_are_never_cut_or_padded(tmp_path):
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = load(tmp_path, backend=backend)
    assert len(tokenizer.encode("0123456789")) == 10
    assert len(tokenizer.encode("0")) == 1
    assert len(tokenizer.encode("<s>0123456789", parse_special=False)) == 13


def test_tokens_that_only_the_config_declares_are_added(tmp_path):
    declared = {
        "262": {"content": "<tool>", "special": False, "normalized": False},
        "263": {"content": "<|x|>", "special": True},
        "259": {"content": "<s>", "special": True},
    }
    tokenizer = load(tmp_path, tokenizer_config={"added_tokens_decoder": declared})
    assert tokenizer.encode("<tool><|x|><s>") == [262, 263, BOS]
    assert tokenizer.decode([262, 263]) == "<tool>"
    assert tokenizer.vocab_size == 264


def test_declared_tokens_of_another_model_are_refused(tmp_path):
    declared = {"500": {"content": "<tool>", "special": True}}
    with pytest.raises(CheckpointError, match=r"'<tool>' the id 500, but tokenizer\.json makes it"):
        load(tmp_path, tokenizer_config={"added_tokens_decoder": declared})


def test_declared_tokens_need_ids(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json.*must be token ids"):
        load(tmp_path, tokenizer_config={"added_tokens_decoder": {"x": {"content": "<tool>"}}})


def test_special_tokens_can_be_plain_text(tmp_path):
    tokenizer = load(tmp_path)
    assert tokenizer.encode("<s>") == [BOS]
    literal = tokenizer.encode("<s>", parse_special=False)
    assert BOS not in literal
    assert tokenizer.decode(literal) == "<s>"
    assert tokenizer.encode("<s>") == [BOS]


def test_threads_do_not_disturb_each_other(tmp_path):
    tokenizer, wrong = load(tmp_path), []

    def work(parse: bool) -> None:
        for _ in range(200):
            if (BOS in tokenizer.encode("<s>hell", parse_special=parse)) != parse:
                wrong.append(parse)

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# --- chat templates -----------------------------------------------------------------------------

USER = [{"role": "user", "content": "hi"}]


def test_the_template_in_the_config_knows_the_special_tokens(tmp_path):
    source = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    tokenizer = load(tmp_path, tokenizer_config={**CONFIG, "chat_template": source})
    assert tokenizer.render_chat(USER) == "<s>hi</s>"


def test_named_templates_in_the_config(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = load(tmp_path, tokenizer_config={"chat_template": named})
    assert tokenizer.render_chat(USER) == "plain"
    assert tokenizer.render_chat(USER, tools=[{"type": "function"}]) == "tools"


def test_template_files_win_over_the_config(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("é file\n", encoding="utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = load(tmp_path, tokenizer_config={"chat_template": "config"})
    assert tokenizer.render_chat(USER) == "é file"
    assert tokenizer.render_chat(USER, tools=[{}]) == "tools"


def test_the_template_of_older_multimodal_checkpoints(tmp_path):
    tokenizer = load(tmp_path, chat_template={"chat_template": "old"})
    assert tokenizer.render_chat(USER) == "old"


def test_several_templates_survive_saving(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = load(tmp_path, tokenizer_config={**CONFIG, "chat_template": named})
    out = tmp_path / "out"
    out.mkdir()
    save_tokenizer(tokenizer, out)
    again = load_tokenizer(StandIn(path=out, container="packed"))
    assert again.chat_template is not None
    assert again.chat_template.sources == {"default": "plain", "tool_use": "tools"}
    assert again.special_tokens == tokenizer.special_tokens


# --- bad files ----------------------------------------------------------------------------------


def test_no_tokenizer_json_says_what_to_do(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json; fetch it.*save_pretrained"):
        load_tokenizer(StandIn(path=tmp_path, container="safetensors"))
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(CheckpointError, match=r"\(tokenizer\.model alone is not enough\)"):
        load_tokenizer(StandIn(path=tmp_path, container="safetensors"))


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"model": 5}', b"\xff\xfe", b'{"version": "1.0"}'],
    ids=repr,
)
def test_a_broken_tokenizer_json_names_the_file(tmp_path, content):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        load_tokenizer(StandIn(path=tmp_path, container="safetensors"))


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"]
)
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"], ids=repr)
def test_a_broken_companion_names_the_file(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path)


def test_a_template_file_that_is_no_text_names_the_file(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        load(tmp_path)


def test_saved_files_are_readable_json(tmp_path):
    save_tokenizer(Tokenizer(byte_level_backend(), eos_ids=[EOT]), tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["type"] == "BPE"
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert "chat_template" not in config
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"eos_token_id": [EOT]}
