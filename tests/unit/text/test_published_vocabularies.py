"""Published vocabularies with published token ids, and published chat templates.

They are read from the source archive of llama-cpp-python, which holds llama.cpp's vocabulary files
with the ids that the models' own tokenizers gave, and the chat templates of some sixty models. The
archive is not part of this tree; without it these tests are skipped.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from moestro.checkpoints import open_checkpoint
from moestro.core import env
from moestro.core.errors import CheckpointError, InvalidRequest
from moestro.text import ChatTemplate, load_tokenizer

ARCHIVE = "llama_cpp_python-0.3.36.tar.gz"
BETWEEN = "\n__ggml_vocab_test__\n"
KINDS = [
    "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-bpe", "llama-spm",
    "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder",
]  # fmt: skip
FOREIGN = ["bert-bge", "gemma-4", "nomic-bert-moe"]


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> Path:
    """The models folder of the archive, unpacked."""
    archive = env.cache_dir() / "tests" / ARCHIVE
    if not archive.is_file():
        pytest.skip(
            f"{archive} is not there: pip download --no-deps --no-binary :all: "
            f"llama-cpp-python==0.3.36 -d {archive.parent}"
        )
    target = tmp_path_factory.mktemp("published")
    with tarfile.open(archive) as tar:
        members = [m for m in tar if "/vendor/llama.cpp/models/" in m.name and m.isfile()]
        tar.extractall(target, members=members, filter="data")
    (folder,) = target.glob("*/vendor/llama.cpp/models")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_token_ids_are_those_published(published, kind):
    path = published / f"ggml-vocab-{kind}.gguf"
    tokenizer = load_tokenizer(open_checkpoint(path))
    # Bytes, not text: the texts hold carriage returns.
    texts = path.with_suffix(".gguf.inp").read_bytes().decode().split(BETWEEN)
    lines = path.with_suffix(".gguf.out").read_text().split("\n")
    assert len(texts) > 40
    for text, line in zip(texts, lines, strict=False):
        ids = [int(i) for i in line.split()]
        assert tokenizer.encode(text, parse_special=False) == ids, text
        assert tokenizer.decode(ids) == text
        stream = tokenizer.stream()
        assert "".join([*map(stream.push, ids), stream.finish()]) == text


@pytest.mark.parametrize("kind", FOREIGN)
def test_vocabularies_of_other_kinds_are_refused(published, kind):
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.model is"):
        load_tokenizer(open_checkpoint(published / f"ggml-vocab-{kind}.gguf"))


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Name, é <b>"}},
            "required": ["city"],
        },
    },
}


def conversation(arguments: Any) -> list[dict[str, Any]]:
    call = {
        "id": "abcdefghi",
        "type": "function",
        "function": {"name": "weather", "arguments": arguments},
    }
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Köln? 🦙"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": '{"c": 21}'},
        {"role": "assistant", "content": "<think>\nfine\n</think>\n\n21 degrees"},
        {"role": "user", "content": "Thanks"},
    ]


def cases() -> list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]:
    plain = conversation(None)
    return [(plain[1:2], None), (plain[:2], None), (plain[:2], [TOOL]), (plain[-2:], None)]


def theirs(source: str, messages: list[dict[str, Any]], tools: Any) -> str | None:
    """What transformers renders; None where the template refuses."""
    try:
        rendered, _ = render_jinja_template(
            [messages], chat_template=source, tools=tools, add_generation_prompt=True, **SPECIAL
        )
    except (jinja2.TemplateError, TypeError, ValueError, AttributeError):
        return None
    return rendered[0]


def templates(folder: Path) -> list[tuple[str, ChatTemplate]]:
    paths = sorted((folder / "templates").glob("*.jinja"))
    assert len(paths) > 50
    sources = [path.read_text(encoding="utf-8") for path in paths]
    return [
        (source, ChatTemplate({"default": source}, special_tokens=SPECIAL, origin=path.name))
        for path, source in zip(paths, sources, strict=True)
    ]


def test_published_templates_render_as_in_transformers(published):
    rendered = refused = 0
    for source, template in templates(published):
        for messages, tools in cases():
            wanted = theirs(source, messages, tools)
            if wanted is None:
                with pytest.raises(InvalidRequest):
                    template.render(messages, tools=tools)
                refused += 1
            else:
                assert template.render(messages, tools=tools) == wanted, template.origin
                rendered += 1
    assert rendered > 5 * refused


def test_tool_calls_suit_every_published_template(published):
    """Some templates want arguments as a mapping, some as JSON text; each must get what it wants,
    whichever the client sent.
    """
    mapping = {"city": "Köln", "days": [1, 2]}
    forms = (mapping, json.dumps(mapping, ensure_ascii=False))
    only_mapping = only_text = 0
    for source, template in templates(published):
        wanted = [theirs(source, conversation(form), [TOOL]) for form in forms]
        only_mapping += wanted[0] is not None and wanted[1] is None
        only_text += wanted[0] is None and wanted[1] is not None
        right = next((text for text in wanted if text is not None), None)
        if right is not None:
            for form in forms:
                assert template.render(conversation(form), tools=[TOOL]) == right, template.origin
    assert only_mapping > 10
    assert only_text > 0
