"""Token ids from text and back: one tokenizer for every container a model comes in."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

from moestro.core.errors import CheckpointError, InvalidRequest
from moestro.text import gguf_vocab, hf_files
from moestro.text.chat_template import ChatTemplate
from moestro.text.pieces import PieceTable
from moestro.text.stream import StreamDecoder


class TokenizerSource(Protocol):
    """What of a checkpoint a tokenizer is made from (see ``checkpoints.base.Checkpoint``)."""

    @property
    def path(self) -> Path: ...
    @property
    def container(self) -> str: ...
    @property
    def config(self) -> Mapping[str, Any]: ...


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads.

    eos_ids: every id that ends an answer, the model's main one first. special_tokens: texts by role
    (``bos_token``, ``eos_token``, ...). chat_template: None for a model without one.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eos_ids: Sequence[int] = (),
        bos_id: int | None = None,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: ChatTemplate | None = None,
        origin: str = "the checkpoint",
    ) -> None:
        # A tokenizer file may carry the truncation and padding of its training run; prompts must
        # never be cut silently.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._literal: Backend | None = None
        self._lock = threading.Lock()
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._pieces = PieceTable(backend, self.special_ids)
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.bos_id = bos_id
        self.special_tokens = dict(special_tokens or {})
        self.chat_template = chat_template
        self.origin = origin

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id; a model's own vocabulary may be padded beyond it."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(
        self, text: str, *, add_special: bool = False, parse_special: bool = True
    ) -> list[int]:
        """Token ids of a text.

        add_special: put what the model expects around a text (usually bos before it). Chat
        templates write that themselves. parse_special: special tokens spelled out in the text
        become those tokens; off, they are ordinary text, as befits text from outside.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"the text has half a surrogate pair at character {error.start}; it is not Unicode "
                "text and must be repaired where it came from"
            ) from None
        backend = self._backend if parse_special else self._without_special()
        ids: list[int] = backend.encode(text, add_special_tokens=add_special).ids
        return ids

    def decode(
        self, ids: Iterable[int], *, skip_special: bool = True, continuation: bool = False
    ) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD, unknown ids nothing.

        skip_special leaves special tokens out. continuation: the ids go on from earlier text, so a
        sentencepiece space at their start is a real one and stays.
        """
        stream = self.stream(skip_special=skip_special, continuation=continuation)
        return "".join([*(stream.push(i) for i in ids), stream.finish()])

    def stream(self, *, skip_special: bool = True, continuation: bool = False) -> StreamDecoder:
        """A decoder for tokens as they come; its texts join to what ``decode`` gives."""
        return StreamDecoder(self._pieces, skip_special=skip_special, continuation=continuation)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, special or not; empty for an id without a token."""
        return self._pieces.piece(token_id, skip_special=False) or b""

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """``ChatTemplate.render``; InvalidRequest for a model without a chat template."""
        if self.chat_template is None:
            raise InvalidRequest(
                f"{self.origin} has no chat template, so it cannot take chat messages; give a "
                "plain prompt, or put the template beside the model as chat_template.jinja"
            )
        return self.chat_template.render(messages, **options)

    def to_json(self) -> str:
        """The text of a ``tokenizer.json``."""
        return self._backend.to_str(pretty=True)

    def _without_special(self) -> Backend:
        # The switch is a property of the object, so a copy keeps concurrent callers apart.
        with self._lock:
            if self._literal is None:
                self._literal = Backend.from_str(self._backend.to_str())
                self._literal.encode_special_tokens = True
            return self._literal


def load_tokenizer(checkpoint: TokenizerSource) -> Tokenizer:
    """The tokenizer that came with a checkpoint.

    From ``tokenizer.json`` beside safetensors and packed weights, or from a GGUF file's metadata
    (and from a ``tokenizer.json`` beside it where the metadata does not do). Raises CheckpointError
    naming what is missing or wrong.
    """
    path = checkpoint.path
    directory = path if path.is_dir() else path.parent
    if checkpoint.container != "gguf":
        return from_directory(directory, checkpoint.config)
    try:
        return _from_gguf(checkpoint)
    except CheckpointError:
        if not (directory / hf_files.TOKENIZER).is_file():
            raise
    # A GGUF file's metadata has none of config.json's keys.
    return from_directory(directory, {})


def from_directory(directory: Path, config: Mapping[str, Any]) -> Tokenizer:
    """From the files of a Hugging Face checkpoint; ``config`` is its config.json."""
    facts = hf_files.read(directory, config)
    template = None
    if facts.templates:
        template = ChatTemplate(
            facts.templates, special_tokens=facts.special_tokens, origin=str(directory)
        )
    return Tokenizer(
        facts.backend,
        eos_ids=facts.eos_ids,
        bos_id=facts.bos_id,
        special_tokens=facts.special_tokens,
        chat_template=template,
        origin=str(directory),
    )


def _from_gguf(checkpoint: TokenizerSource) -> Tokenizer:
    metadata, origin = checkpoint.config, str(checkpoint.path)
    if not gguf_vocab.has_vocabulary(metadata):
        raise CheckpointError(
            f"{origin} has no vocabulary (tokenizer.ggml.tokens); put the model's tokenizer.json "
            "beside it"
        )
    try:
        vocabulary = gguf_vocab.read(metadata)
        backend = gguf_vocab.build(metadata, vocabulary)
    except CheckpointError as error:
        raise CheckpointError(f"{origin}: {error}") from error
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    special = {
        name: vocabulary.tokens[vocabulary.special[role]]
        for role, name in names.items()
        if role in vocabulary.special
    }
    sources = gguf_vocab.chat_templates(metadata)
    template = None
    if sources:
        template = ChatTemplate(sources, special_tokens=special, origin=origin)
    return Tokenizer(
        backend,
        eos_ids=vocabulary.end_ids,
        bos_id=vocabulary.special.get("bos"),
        special_tokens=special,
        chat_template=template,
        origin=origin,
    )


def save_tokenizer(tokenizer: Tokenizer, directory: Path) -> list[Path]:
    """Write a tokenizer as the files Hugging Face tools read, whatever it was made from.

    ``tokenizer.json``, ``tokenizer_config.json`` (special tokens, chat templates) and
    ``generation_config.json`` (end ids; its other keys are kept). Returns the files written.
    """
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **tokenizer.special_tokens,
    }
    template = tokenizer.chat_template
    if template is not None:
        only = template.sources.get("default") if len(template.sources) == 1 else None
        named = [{"name": k, "template": v} for k, v in sorted(template.sources.items())]
        config["chat_template"] = only or named
    generation_path = directory / hf_files.GENERATION_CONFIG
    generation = hf_files.read_json(generation_path) if generation_path.is_file() else {}
    if tokenizer.eos_ids:
        generation["eos_token_id"] = list(tokenizer.eos_ids)
    if tokenizer.bos_id is not None:
        generation["bos_token_id"] = tokenizer.bos_id
    texts = {
        directory / hf_files.TOKENIZER: tokenizer.to_json(),
        directory / hf_files.TOKENIZER_CONFIG: _pretty(config),
        generation_path: _pretty(generation),
    }
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)


def _pretty(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"
