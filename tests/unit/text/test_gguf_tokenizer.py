"""Tokenizers from GGUF metadata: SmolLM2's on real text, small ones against slow references."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers
from vocabularies import (
    BYTE,
    CONTROL,
    NORMAL,
    SPACE,
    UNKNOWN,
    USER_DEFINED,
    StandIn,
    byte_level_metadata,
    sentencepiece_metadata,
    smollm2_path,
    write_json,
)

from moestro.checkpoints import Checkpoint, open_checkpoint
from moestro.core.errors import CheckpointError, InvalidRequest
from moestro.text import Tokenizer, load_tokenizer, save_tokenizer

TEXTS = [
    "Hello world",
    " Hello, y'all! How are you 😁 ?我想在apple工作1314151天～",
    "def f(x):\n    return x**2  # 1234.5\n\n\tz = {'a': [1, 2]}\r\n",
    "日本語 العربية हिन्दी ไทย éàü ﬁ ½ ²",
    "👩‍👩‍👧‍👦 🦙🏽 e\u0301 \u200b\ufeff",
    "   leading and trailing   ",
    "\x00\x01\x7f",
    "We'RE they'll I'd 'S",
    "",
]


def load(metadata: dict[str, object]) -> Tokenizer:
    return load_tokenizer(StandIn(path=Path("model.gguf"), config=metadata))


@pytest.fixture(scope="module")
def smollm2_file() -> Checkpoint:
    return open_checkpoint(smollm2_path())


@pytest.fixture(scope="module")
def smollm2(smollm2_file) -> Tokenizer:
    return load_tokenizer(smollm2_file)


# --- SmolLM2 ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_real_text_comes_back_as_it_was(smollm2, text):
    assert smollm2.decode(smollm2.encode(text)) == text


@pytest.fixture(scope="module")
def known_bytes(smollm2) -> set[int]:
    """SmolLM2 has no token for some bytes that only unassigned characters use; it drops them."""
    return {byte for i in range(smollm2.vocab_size) for byte in smollm2.token_bytes(i)}


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_any_text_comes_back_as_it_was(smollm2, known_bytes, text):
    text = "".join(character for character in text if known_bytes.issuperset(character.encode()))
    assert smollm2.decode(smollm2.encode(text), skip_special=False) == text
    assert smollm2.decode(smollm2.encode(text, parse_special=False)) == text


def test_real_token_ids_are_those_of_the_models_own_pipeline(smollm2, smollm2_file):
    """SmolLM2's tokenizer.json splits single digits, then words as GPT-2 does."""
    tokens = smollm2_file.config["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in smollm2_file.config["tokenizer.ggml.merges"]]
    oracle = Backend(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    oracle.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    for text in TEXTS:
        assert smollm2.encode(text) == oracle.encode(text).ids
    assert smollm2.vocab_size == len(tokens)


def test_real_special_tokens(smollm2):
    assert smollm2.bos_id == 1
    assert smollm2.eos_ids == (2, 0)  # <|im_end|> from the metadata, <|endoftext|> by its spelling
    text = "<|im_start|>user\nhi<|im_end|>"
    ids = smollm2.encode(text)
    assert ids[0] == 1
    assert ids[-1] == 2
    assert smollm2.decode(ids) == "user\nhi"
    assert smollm2.decode(ids, skip_special=False) == text
    literal = smollm2.encode(text, parse_special=False)
    assert not smollm2.special_ids & set(literal)
    assert smollm2.decode(literal) == text
    assert smollm2.encode(text) == ids  # the switch did not stay on


def test_real_chat_prompt(smollm2):
    prompt = smollm2.render_chat([{"role": "user", "content": "hi"}])
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


def test_a_saved_tokenizer_is_the_same_tokenizer(smollm2, tmp_path):
    written = save_tokenizer(smollm2, tmp_path)
    assert sorted(p.name for p in written) == [
        "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    again = load_tokenizer(StandIn(path=tmp_path, container="packed"))
    assert again.eos_ids == smollm2.eos_ids
    assert again.bos_id == smollm2.bos_id
    assert again.special_tokens == smollm2.special_tokens
    assert again.special_ids == smollm2.special_ids
    for text in TEXTS:
        assert again.encode(text, add_special=True) == smollm2.encode(text, add_special=True)
    messages = [{"role": "user", "content": "hi"}]
    assert again.render_chat(messages) == smollm2.render_chat(messages)


def test_saving_keeps_other_generation_settings(smollm2, tmp_path):
    write_json(tmp_path / "generation_config.json", {"temperature": 0.6, "eos_token_id": 5})
    save_tokenizer(smollm2, tmp_path)
    kept = json.loads((tmp_path / "generation_config.json").read_text())
    assert kept == {"temperature": 0.6, "eos_token_id": [2, 0], "bos_token_id": 1}


# --- sentencepiece ------------------------------------------------------------------------------


def slow_sentencepiece(text: str, metadata: dict[str, object]) -> list[int]:
    """Merge the best-scored neighbors, the leftmost of equals, until none is a token; what is then
    no token becomes bytes.
    """
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    types = metadata["tokenizer.ggml.token_type"]
    ids = {t: i for i, t in enumerate(tokens) if types[i] == NORMAL}
    symbols = list((SPACE + text if text else text).replace(" ", SPACE))
    while True:
        pairs = [
            (-scores[ids[a + b]], i)
            for i, (a, b) in enumerate(itertools.pairwise(symbols))
            if a + b in ids
        ]
        if not pairs:
            break
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    found = []
    for symbol in symbols:
        if symbol in ids:
            found.append(ids[symbol])
        else:
            found += [tokens.index(f"<0x{byte:02X}>") for byte in symbol.encode()]
    return found


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.text(f"ab{SPACE}é", min_size=2, max_size=5), unique=True, max_size=25),
    order=st.randoms(use_true_random=False),
    text=st.text("ab é€", max_size=30),
)
def test_sentencepiece_merges_as_its_scores_say(pieces, order, text):
    # Merged pieces only; "€" is no piece at all and must fall back to its bytes.
    names = [SPACE, "a", "b", "é", *pieces]
    scores = [-float(rank) for rank in range(len(names))]
    order.shuffle(scores)
    metadata = sentencepiece_metadata(dict(zip(names, scores, strict=True)))
    tokenizer = load(metadata)
    ids = tokenizer.encode(text)
    assert ids == slow_sentencepiece(text, metadata)
    assert tokenizer.decode(ids) == text


def sentencepiece(**more: object) -> Tokenizer:
    pieces = {SPACE: -9.0, "a": -8.0, "b": -7.0, "ab": -1.0, f"{SPACE}ab": -2.0}
    return load(sentencepiece_metadata(pieces, **more))


def test_sentencepiece_puts_bos_before_a_text_unless_told_not_to():
    assert sentencepiece().encode("ab", add_special=True) == [1, 263]
    assert sentencepiece(add_bos_token=False).encode("ab", add_special=True) == [263]
    both = sentencepiece(add_eos_token=True)
    assert both.encode("ab", add_special=True) == [1, 263, 2]
    assert both.encode("ab") == [263]
    assert both.encode("", add_special=True) == [1, 2]


def test_the_space_prefix_can_be_off():
    plain = sentencepiece(add_space_prefix=False)
    assert plain.encode("ab") == [262]
    assert plain.decode(plain.encode(" ab")) == " ab"
    assert plain.decode(plain.encode("ab")) == "ab"


def test_text_after_a_special_token_gets_the_prefix_too():
    assert sentencepiece().encode("ab</s>ab") == [263, 2, 263]
    assert sentencepiece().decode([263, 2, 263], skip_special=False) == "ab</s> ab"


def test_without_byte_tokens_the_unknown_token_stands_in():
    metadata = sentencepiece_metadata({SPACE: -1.0, "a": -2.0}, with_bytes=False)
    assert load(metadata).encode("a€€a") == [3, 4, 0, 4]


def test_user_defined_tokens_are_found_first_and_stay_visible():
    metadata = sentencepiece_metadata({SPACE: -3.0, "a": -2.0, "aa": -1.0, "<tool>": 0.0})
    metadata["tokenizer.ggml.token_type"][-1] = USER_DEFINED
    tokenizer = load(metadata)
    tool = len(metadata["tokenizer.ggml.tokens"]) - 1
    for parse in (True, False):
        assert tool in tokenizer.encode("aa<tool>aa", parse_special=parse)
    assert tokenizer.decode([tool]) == "<tool>"


# --- byte level ---------------------------------------------------------------------------------

MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "1 2"]


def test_byte_level_merges_in_rank_order():
    tokenizer = load(byte_level_metadata(MERGES))
    tokens = byte_level_metadata(MERGES)["tokenizer.ggml.tokens"]
    found = [tokens[i] for i in tokenizer.encode("hello hello helo")]
    assert found == ["hello", "Ġhello", "Ġ", "he", "l", "o"]


@pytest.mark.parametrize(("pre", "pieces"), [("gpt-2", ["12"]), ("qwen2", ["1", "2"])])
def test_the_pre_tokenizer_decides_what_can_merge(pre, pieces):
    metadata = byte_level_metadata(MERGES, pre=pre)
    tokens = metadata["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in load(metadata).encode("12")] == pieces


def test_a_whole_word_that_is_a_token_needs_no_merges_where_the_family_says_so():
    metadata = byte_level_metadata(MERGES, control=("xyz", "<|end|>"))
    metadata["tokenizer.ggml.token_type"][-2] = NORMAL
    xyz = metadata["tokenizer.ggml.tokens"].index("xyz")
    assert len(load(metadata).encode("xyz")) == 3
    metadata["tokenizer.ggml.pre"] = "llama-bpe"
    assert load(metadata).encode("xyz") == [xyz]


# --- bad vocabularies ---------------------------------------------------------------------------


def changed(key: str, value: object, metadata: dict[str, object]) -> dict[str, object]:
    result = {**metadata, f"tokenizer.ggml.{key}": value}
    if value is None:
        del result[f"tokenizer.ggml.{key}"]
    return result


GPT = byte_level_metadata(MERGES)
SPM = sentencepiece_metadata({"a": -1.0, "b": -2.0})
BAD = {
    "no vocabulary": (changed("tokens", None, GPT), "no vocabulary"),
    "empty vocabulary": (changed("tokens", [], GPT), r"tokens is missing or empty"),
    "tokens that are numbers": (changed("tokens", [1, 2], GPT), "texts only"),
    "unknown kind": (changed("model", "bert", GPT), r"model is 'bert'"),
    "no kind": (changed("model", None, GPT), r"model is None"),
    "unknown pre-tokenizer": (changed("pre", "gpt-9", GPT), r"pre is 'gpt-9'.*qwen2"),
    "no merges": (changed("merges", None, GPT), r"merges is missing"),
    "half a merge": (changed("merges", ["h"], GPT), r"merges\[0\] is 'h'"),
    "merge of nothing": (changed("merges", [" h"], GPT), r"merges\[0\]"),
    "merge to no token": (changed("merges", ["h h"], GPT), r"needs 'hh'"),
    "twice the same": (
        changed("tokens", [*GPT["tokenizer.ggml.tokens"][:-1], "!"], GPT),
        r"'!' 2 times",
    ),
    "types for other tokens": (changed("token_type", [1], GPT), r"1 entries for"),
    "end token beyond": (changed("eos_token_id", 10**6, GPT), r"eos_token_id is 1000000"),
    "bos below zero": (changed("bos_token_id", -1, SPM), r"bos_token_id is -1"),
    "no scores": (changed("scores", None, SPM), r"scores has 0 entries"),
    "too few scores": (changed("scores", [0.0], SPM), r"scores has 1 entries"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_vocabulary_says_what_is_wrong_in_which_file(case):
    metadata, message = BAD[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        load(metadata)
    assert "model.gguf" in str(caught.value)
    assert "tokenizer.json" in str(caught.value)


def test_a_tokenizer_json_beside_the_file_is_the_way_out(tmp_path):
    save_tokenizer(load(GPT), tmp_path)
    broken = StandIn(path=tmp_path / "model.gguf", config=changed("pre", "gpt-9", GPT))
    assert load_tokenizer(broken).encode("hello") == load(GPT).encode("hello")


def test_an_old_file_without_pre_is_read_as_default():
    assert load(changed("pre", None, GPT)).encode("hello") == load(GPT).encode("hello")


def test_empty_tokens_get_a_name():
    tokens = [*GPT["tokenizer.ggml.tokens"][:-1], ""]
    tokenizer = load(changed("tokens", tokens, GPT))
    assert tokenizer.token_bytes(len(tokens) - 1) == f"[EMPTY_{len(tokens) - 1}]".encode()


def test_text_that_is_not_unicode_is_refused():
    with pytest.raises(InvalidRequest, match="character 1"):
        load(GPT).encode("a\ud800")


# --- end tokens ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("control", "ends"),
    [
        (("<|end_of_text|>", "<|eot_id|>", "<pad>"), {"<|end_of_text|>", "<|eot_id|>"}),
        (("<|return|>", "<|call|>", "<|end|>"), {"<|return|>", "<|call|>"}),
        (("<|user|>", "<|end|>"), {"<|end|>"}),
    ],
)
def test_end_tokens_are_known_by_their_spelling(control, ends):
    metadata = byte_level_metadata(MERGES, control=control)
    del metadata["tokenizer.ggml.eos_token_id"]
    tokens = metadata["tokenizer.ggml.tokens"]
    assert {tokens[i] for i in load(metadata).eos_ids} == ends


def test_the_declared_end_token_comes_first():
    metadata = byte_level_metadata(MERGES, control=("<|endoftext|>", "<|im_end|>", "<|user|>"))
    last = len(metadata["tokenizer.ggml.tokens"]) - 1
    metadata["tokenizer.ggml.eos_token_id"] = last - 1
    metadata["tokenizer.ggml.eot_token_id"] = last
    assert load(metadata).eos_ids == (last - 1, last, last - 2)


def test_ordinary_tokens_that_look_like_an_end_do_not_end():
    metadata = byte_level_metadata(MERGES, control=("<|im_end|>", "<x>"))
    metadata["tokenizer.ggml.token_type"][-2] = NORMAL
    last = len(metadata["tokenizer.ggml.tokens"]) - 1
    assert load(metadata).eos_ids == (last,)


def test_named_chat_templates():
    metadata = byte_level_metadata(MERGES)
    metadata["tokenizer.chat_template"] = "main"
    metadata["tokenizer.chat_template.tool_use"] = "tools"
    metadata["tokenizer.chat_templates"] = ["tool_use"]
    template = load(metadata).chat_template
    assert template is not None
    assert template.sources == {"default": "main", "tool_use": "tools"}


def test_without_a_template_chat_says_so():
    tokenizer = load(GPT)
    assert tokenizer.chat_template is None
    with pytest.raises(InvalidRequest, match=r"model\.gguf has no chat template.*jinja"):
        tokenizer.render_chat([{"role": "user", "content": "hi"}])


def test_all_token_types_are_told_apart():
    tokenizer = load(sentencepiece_metadata({"a": -1.0}))
    assert tokenizer.special_ids == {0, 1, 2}
    assert {UNKNOWN, CONTROL, BYTE, NORMAL, USER_DEFINED} == {1, 2, 3, 4, 6}
    assert tokenizer.token_bytes(3 + 0xE2) == b"\xe2"
