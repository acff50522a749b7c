"""The Python face on a tiny random mixture: generate, chat, stream, and what it refuses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_checkpoint

from moestro import LLM, SamplingParams
from moestro.core.errors import InvalidRequest, OutOfBudget
from moestro.devices.base import Device

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def llm(folder: Path, device: Device) -> Iterator[LLM]:
    with LLM(folder, device=device.name, threads=1, context=128, kv_dtype="float32") as opened:
        yield opened


def test_generate_takes_text_and_tokens_one_or_several(llm: LLM) -> None:
    one = llm.generate("abc", GREEDY)
    assert len(one) == 1
    ids = llm.tokenizer.encode("abc", add_special=True)
    several = llm.generate([ids, list(b"xyz")], [GREEDY, SamplingParams(max_tokens=2, seed=1)])
    assert several[0].token_ids == one[0].token_ids
    assert several[1].usage.completion_tokens <= 2
    assert llm.generate(ids, GREEDY)[0].text == one[0].text
    assert llm.generate([], GREEDY) == []


def test_an_int8_cache_takes_less_memory_and_reads_back_what_it_wrote(
    folder: Path, device: Device
) -> None:
    options = {"device": device.name, "threads": 1, "context": 128}
    texts, sizes = {}, {}
    for kv_dtype in ("float16", "int8"):
        with LLM(folder, kv_dtype=kv_dtype, **options) as llm:
            first = llm.generate("a longer text than one page of keys", GREEDY)[0]
            again = llm.generate("a longer text than one page of keys", GREEDY)[0]
            texts[kv_dtype], sizes[kv_dtype] = first.text, llm.plan.page_nbytes
            assert again.token_ids == first.token_ids
            assert again.usage.cached_tokens > 0  # the prefix, read back from the cache
    # 16 channels: a byte each, one scale of two bytes per key and per value
    assert sizes["int8"] == sizes["float16"] * (16 + 2) // (16 * 2)
    assert len(texts["int8"]) > 0


def test_stream_gives_the_text_of_generate(llm: LLM) -> None:
    whole = llm.generate("hello", GREEDY)[0]
    with llm.stream("hello", GREEDY) as stream:
        pieces = list(stream)
    assert "".join(pieces) == whole.text
    assert len(pieces) > 1
    assert stream.completion().token_ids == whole.token_ids
    assert stream.completion().finish_reason == "length"


def test_chat_renders_the_template_and_reuses_the_conversation(llm: LLM) -> None:
    talk = [{"role": "user", "content": "Hi"}]
    answer = llm.chat(talk, GREEDY)
    prompt = "<bos><turn>user: Hi\n<turn>assistant: "
    assert answer.usage.prompt_tokens == len(llm.tokenizer.encode(prompt))
    assert answer.text == llm.generate([llm.tokenizer.encode(prompt)], GREEDY)[0].text
    talk += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "So?"}]
    with llm.stream(talk, GREEDY) as stream:
        list(stream)
    assert stream.completion().usage.cached_tokens >= answer.usage.prompt_tokens


def test_cancelling_a_stream_keeps_what_came(llm: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    whole = llm.generate("hello", long)[0].text
    stream = llm.stream("hello", long)
    first = next(stream)
    stream.cancel()
    rest = "".join(stream)
    done = stream.completion()
    assert done.finish_reason == "cancelled"
    assert done.text == first + rest and whole.startswith(first)
    assert done.usage.completion_tokens < 100
    assert llm.loaded.engine.idle


def test_leaving_a_stream_ends_its_request(llm: LLM) -> None:
    with llm.stream("hello", GREEDY) as stream:
        next(stream)
    assert llm.loaded.engine.idle
    assert stream.completion().finish_reason == "cancelled"
    unread = llm.stream("hello", GREEDY)
    with pytest.raises(InvalidRequest, match="not begun"):
        unread.completion()
    unread.close()


def test_streams_may_be_read_in_turns(llm: LLM) -> None:
    wanted = {text: llm.generate(text, GREEDY)[0].text for text in ("abc", "xyz")}
    streams = {text: llm.stream(text, GREEDY) for text in wanted}
    got = dict.fromkeys(wanted, "")
    for _ in range(40):
        for text, stream in streams.items():
            got[text] += next(stream, "")
    assert got == wanted


def test_threads_share_one_model(llm: LLM) -> None:
    texts = [f"thread {i}" for i in range(4)]
    wanted = [llm.generate(text, GREEDY)[0].token_ids for text in texts]
    got: dict[int, tuple[int, ...]] = {}

    def ask(index: int) -> None:
        got[index] = llm.generate(texts[index], GREEDY)[0].token_ids

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert [got[i] for i in range(4)] == wanted


def test_bad_input_to_the_face(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"2 prompts but 1"):
        llm.generate(["a", "b"], [GREEDY])
    with pytest.raises(InvalidRequest, match="got dict"):
        llm.generate([{"role": "user", "content": "x"}], GREEDY)  # type: ignore[list-item]
    with pytest.raises(InvalidRequest, match="context holds 128"):
        llm.generate(["fine", "x" * 300], GREEDY)
    assert llm.loaded.engine.idle, "the prompt that was fine must not go on computing"
    with pytest.raises(InvalidRequest, match="context_length"):
        LLM(tmp_path, context_length=5)
    with pytest.raises(InvalidRequest, match="unknown device 'abacus'"):
        LLM(tmp_path, device="abacus")


def test_a_model_without_a_template_says_so(tmp_path: Path, device: Device) -> None:
    model = tiny_checkpoint.write(tmp_path / "plain", template=False)
    with (
        LLM(model, device=device.name, threads=1) as llm,
        pytest.raises(InvalidRequest, match="no chat template"),
    ):
        llm.chat([{"role": "user", "content": "Hi"}])


def test_memory_that_does_not_suffice_is_refused_before_loading(
    folder: Path, device: Device
) -> None:
    read: list[int] = []
    with pytest.raises(OutOfBudget, match="does not fit"):
        LLM(
            folder,
            device=device.name,
            memory="300KB",
            progress=lambda done, total: read.append(done),
        )
    assert read == []


def test_a_closed_model_says_so(folder: Path, device: Device) -> None:
    llm = LLM(folder, device=device.name, threads=1)
    stream = llm.stream("abc", GREEDY)
    llm.close()
    llm.close()
    with pytest.raises(InvalidRequest, match="closed"):
        llm.generate("abc")
    with pytest.raises(InvalidRequest, match="closed"):
        next(stream)
