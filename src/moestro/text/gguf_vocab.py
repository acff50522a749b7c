"""A tokenizer from the vocabulary in a GGUF file's metadata (keys ``tokenizer.*``).

Two kinds exist for the models served here: byte-level BPE with its merges listed, and sentencepiece
BPE, which keeps a score per token instead and falls back to byte tokens. The second becomes an
ordinary merge list too: every pair of tokens that makes a token, best score first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend

from moestro.core import log
from moestro.core.errors import CheckpointError
from moestro.text import pretokenizers

_PREFIX = "tokenizer.ggml."
_SPACE = "\u2581"
_WAY_OUT = "put the model's own tokenizer.json beside the GGUF file, or convert the model again"


class TokenType(IntEnum):
    """Values of ``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


#: Texts of tokens that end an answer. A GGUF names one end token; models often have several, so the
#: control tokens spelled like this count too.
_END_TEXTS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>",
    "<|endoftext|>", "<|eom_id|>", "<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<｜end▁of▁sentence｜>", "[e~[",
)  # fmt: skip
#: Where these two exist, ``<|end|>`` ends one message of an answer and not the answer.
_MESSAGE_FORMAT = {"<|return|>", "<|call|>"}


@dataclass(frozen=True, kw_only=True)
class GgufVocabulary:
    """The checked facts: token texts by id, their types, and the ids with a role."""

    kind: str
    tokens: list[str]
    types: list[int]
    special: Mapping[str, int]
    add_bos: bool
    add_eos: bool
    end_ids: tuple[int, ...]


def has_vocabulary(metadata: Mapping[str, Any]) -> bool:
    return f"{_PREFIX}tokens" in metadata


def chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Template sources by name; the main one is ``default``."""
    main = "tokenizer.chat_template"
    found = {k.removeprefix(f"{main}."): v for k, v in metadata.items() if k.startswith(f"{main}.")}
    if main in metadata:
        found["default"] = metadata[main]
    return {name: source for name, source in found.items() if isinstance(source, str) and source}


def read(metadata: Mapping[str, Any]) -> GgufVocabulary:
    """Check the vocabulary. Raises CheckpointError saying what is wrong and where."""
    kind = metadata.get(f"{_PREFIX}model")
    if kind not in (pretokenizers.BYTE_LEVEL, pretokenizers.SENTENCEPIECE):
        raise CheckpointError(
            f"tokenizer.ggml.model is {kind!r}; only {pretokenizers.BYTE_LEVEL!r} (byte-level "
            f"BPE) and {pretokenizers.SENTENCEPIECE!r} (sentencepiece BPE) can be read; " + _WAY_OUT
        )
    tokens = _strings(metadata, "tokens")
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(tokens)]
    if len(set(tokens)) != len(tokens):
        text, count = Counter(tokens).most_common(1)[0]
        first = tokens.index(text)
        raise CheckpointError(
            f"tokenizer.ggml.tokens has {text!r} {count} times (ids {first} and "
            f"{tokens.index(text, first + 1)}); {_WAY_OUT}"
        )
    types = list(metadata.get(f"{_PREFIX}token_type") or [TokenType.NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise _count_error("token_type", len(types), len(tokens))
    special = {
        role: _special_id(metadata, role, len(tokens))
        for role in ("bos", "eos", "eot", "eom", "unknown", "padding")
        if metadata.get(f"{_PREFIX}{role}_token_id") is not None
    }
    add_bos = metadata.get(f"{_PREFIX}add_bos_token")
    if add_bos is None:
        add_bos = kind == pretokenizers.SENTENCEPIECE or _pre(metadata).add_bos
    return GgufVocabulary(
        kind=kind,
        tokens=tokens,
        types=types,
        special=special,
        add_bos=bool(add_bos) and "bos" in special,
        add_eos=bool(metadata.get(f"{_PREFIX}add_eos_token")) and "eos" in special,
        end_ids=_end_ids(tokens, types, special),
    )


def build(metadata: Mapping[str, Any], vocabulary: GgufVocabulary) -> Backend:
    """The ``tokenizers`` object of a vocabulary that ``read`` accepted."""
    if vocabulary.kind == pretokenizers.BYTE_LEVEL:
        backend = _byte_level(metadata, vocabulary)
    else:
        backend = _sentencepiece(metadata, vocabulary)
    typed = list(zip(vocabulary.tokens, vocabulary.types, strict=True))
    special = [text for text, kind in typed if kind in (TokenType.UNKNOWN, TokenType.CONTROL)]
    own = [text for text, kind in typed if kind == TokenType.USER_DEFINED]
    # In two calls, as each call builds the search for all added tokens anew.
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in own])
    backend.post_processor = _post_processor(vocabulary)
    return backend


def _byte_level(metadata: Mapping[str, Any], vocabulary: GgufVocabulary) -> Backend:
    pre = _pre(metadata)
    merges = []
    for rank, line in enumerate(_strings(metadata, "merges")):
        left, space, right = line.partition(" ")
        if not (left and space and right):
            raise CheckpointError(
                f"tokenizer.ggml.merges[{rank}] is {line!r}, not two tokens with a space between; "
                + _WAY_OUT
            )
        merges.append((left, right))
    backend = _bpe(vocabulary, merges, ignore_merges=pre.ignore_merges)
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: GgufVocabulary) -> Backend:
    scores = metadata.get(f"{_PREFIX}scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        found = 0 if scores is None else len(scores)
        raise _count_error("scores", found, len(vocabulary.tokens))
    unknown = vocabulary.special.get("unknown")
    if unknown is None and TokenType.UNKNOWN in vocabulary.types:
        unknown = vocabulary.types.index(TokenType.UNKNOWN)
    backend = _bpe(
        vocabulary,
        score_merges(vocabulary.tokens, vocabulary.types, scores),
        byte_fallback=TokenType.BYTE in vocabulary.types,
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
    )
    spaced: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    undone: list[decoders.Decoder] = [
        decoders.Replace(_SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if metadata.get(f"{_PREFIX}add_space_prefix", True):
        spaced.insert(0, normalizers.Prepend(_SPACE))
        undone.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaced)
    backend.decoder = decoders.Sequence(undone)
    return backend


def score_merges(
    tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """All pairs of tokens whose join is a token, in the order sentencepiece would merge them: the
    best score of the join first. Pairs with the same join keep the shorter left part first, which
    is the leftmost of two overlapping candidates.
    """
    inert = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.BYTE)
    pieces = {
        text: scores[i]
        for i, text in enumerate(tokens)
        if types[i] not in inert
    }  # fmt: skip
    ranked = sorted(pieces, key=lambda text: -pieces[text])
    return [
        (joined[:cut], joined[cut:])
        for joined in ranked
        for cut in range(1, len(joined))
        if joined[:cut] in pieces and joined[cut:] in pieces
    ]


def _bpe(
    vocabulary: GgufVocabulary, merges: list[tuple[str, str]], **options: Any
) -> Backend:  # fmt: skip
    ids = {text: i for i, text in enumerate(vocabulary.tokens)}
    for rank, (left, right) in enumerate(merges):
        for part in (left, right, left + right):
            if part not in ids:
                raise CheckpointError(
                    f"merge {rank} ({left!r} + {right!r}) needs {part!r}, which is not among the "
                    f"{len(ids)} tokens; {_WAY_OUT}"
                )
    return Backend(models.BPE(vocab=ids, merges=merges, **options))


def _post_processor(vocabulary: GgufVocabulary) -> processors.PostProcessor:
    before: list[str] = []
    after: list[str] = []
    named = []
    for role, wanted, place in (
        ("bos", vocabulary.add_bos, before),
        ("eos", vocabulary.add_eos, after),
    ):
        if wanted:
            text = vocabulary.tokens[vocabulary.special[role]]
            place.append(text)
            named.append((text, vocabulary.special[role]))
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B", *after],
        special_tokens=named,
    )


def _pre(metadata: Mapping[str, Any]) -> pretokenizers.PreTokenizer:
    name = metadata.get(f"{_PREFIX}pre")
    if name is None:
        log.warn_once(
            "gguf-pre",
            "the GGUF file does not say how its vocabulary splits text (tokenizer.ggml.pre), as "
            "old files do not; using 'default', which may cut words otherwise than in training",
        )
        name = "default"
    return pretokenizers.get(name)


def _strings(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(f"{_PREFIX}{key}")
    if not isinstance(values, (list, tuple)) or not values:
        raise CheckpointError(f"{_PREFIX}{key} is missing or empty; {_WAY_OUT}")
    if not all(isinstance(value, str) for value in values):
        raise CheckpointError(f"{_PREFIX}{key} must hold texts only; {_WAY_OUT}")
    return list(values)


def _special_id(metadata: Mapping[str, Any], role: str, count: int) -> int:
    value = metadata[f"{_PREFIX}{role}_token_id"]
    if not isinstance(value, int) or not 0 <= value < count:
        raise CheckpointError(
            f"{_PREFIX}{role}_token_id is {value!r}, but there are {count} tokens; {_WAY_OUT}"
        )
    return value


def _end_ids(
    tokens: Sequence[str], types: Sequence[int], special: Mapping[str, int]
) -> tuple[int, ...]:
    named = [special[role] for role in ("eos", "eot", "eom") if role in special]
    control = {text: i for i, text in enumerate(tokens) if types[i] == TokenType.CONTROL}
    ends = [text for text in _END_TEXTS if text in control]
    if control.keys() >= _MESSAGE_FORMAT and "<|end|>" in ends:
        ends.remove("<|end|>")
        named = [i for i in named if tokens[i] != "<|end|>"]
    return tuple(dict.fromkeys(named + [control[text] for text in ends]))


def _count_error(key: str, found: int, wanted: int) -> CheckpointError:
    return CheckpointError(
        f"{_PREFIX}{key} has {found} entries for {wanted} tokens; {_WAY_OUT}"
    )  # fmt: skip
