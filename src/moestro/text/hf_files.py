"""The tokenizer files of a Hugging Face checkpoint and how they add up.

``tokenizer.json`` holds the tokenizer; ``tokenizer_config.json`` and ``special_tokens_map.json``
say which tokens have a role; ``generation_config.json`` which ids end an answer; chat templates are
in ``tokenizer_config.json``, ``chat_template.jinja`` or ``additional_chat_templates/``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend

from moestro.core.errors import CheckpointError

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
GENERATION_CONFIG = "generation_config.json"
TEMPLATE = "chat_template.jinja"
LEGACY_TEMPLATE = "chat_template.json"
MORE_TEMPLATES = "additional_chat_templates"

#: The ``tokenizers`` library raises this very class, nothing narrower, for every malformed file.
_TokenizersError = Exception
_ROLES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """What the files say. ``templates`` are chat template sources by name."""

    backend: Backend
    special_tokens: Mapping[str, str]
    bos_id: int | None
    eos_ids: tuple[int, ...]
    templates: Mapping[str, str]


def read(directory: Path, config: Mapping[str, Any]) -> TokenizerFiles:
    """Read a directory's tokenizer files. ``config`` is its config.json.

    Raises CheckpointError naming the file, what is wrong with it and the way out.
    """
    backend = _backend(directory / TOKENIZER)
    settings = _optional_json(directory / TOKENIZER_CONFIG)
    special = _special_tokens(settings, _optional_json(directory / SPECIAL_TOKENS))
    _add_declared_tokens(backend, settings, directory / TOKENIZER_CONFIG)
    _set_bos_and_eos(backend, settings, special)
    bos = special.get("bos_token")
    generation = _optional_json(directory / GENERATION_CONFIG)
    return TokenizerFiles(
        backend=backend,
        special_tokens=special,
        bos_id=None if bos is None else backend.token_to_id(bos),
        eos_ids=_eos_ids(backend, special, generation, config),
        templates=_templates(directory, settings),
    )


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} does not hold a JSON object; fetch it again")
    return value


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _backend(path: Path) -> Backend:
    if not path.is_file():
        others = sorted(
            name
            for name in ("tokenizer.model", "tekken.json", "vocab.json", "tiktoken.model")
            if (path.parent / name).is_file()
        )
        found = f" ({', '.join(others)} alone is not enough)" if others else ""
        raise CheckpointError(
            f"{path.parent} has no {TOKENIZER}{found}; fetch it from where the model is from, or "
            "write it with transformers: AutoTokenizer.from_pretrained(MODEL).save_pretrained(DIR)"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); fetch it again") from error
    try:
        return Backend.from_str(text)
    except _TokenizersError as error:
        raise CheckpointError(f"{path} is not a tokenizer ({error}); fetch it again") from error


def _text(token: Any) -> str | None:
    """A token as config files write it: its text, or an object around it."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _special_tokens(settings: Mapping[str, Any], legacy: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for role in _ROLES:
        text = _text(settings[role] if role in settings else legacy.get(role))
        if text is not None:
            found[role] = text
    return found


def _add_declared_tokens(backend: Backend, settings: Mapping[str, Any], path: Path) -> None:
    """Add tokens that only ``added_tokens_decoder`` declares; some exporters leave them out."""
    declared = settings.get("added_tokens_decoder")
    if not isinstance(declared, Mapping):
        return
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    flags = ("lstrip", "rstrip", "single_word", "normalized")
    if not all(key.isdecimal() for key in declared):
        raise CheckpointError(f"{path}: the keys of added_tokens_decoder must be token ids")
    for key, entry in sorted(declared.items(), key=lambda item: int(item[0])):
        text = _text(entry)
        if text is None or text in known:
            continue
        given = entry if isinstance(entry, Mapping) else {}
        options = {flag: bool(given[flag]) for flag in flags if flag in given}
        token = AddedToken(text, special=bool(given.get("special")), **options)
        add = backend.add_special_tokens if token.special else backend.add_tokens
        add([token])
        if backend.token_to_id(text) != int(key):
            raise CheckpointError(
                f"{path} gives token {text!r} the id {key}, but {TOKENIZER} makes it "
                f"{backend.token_to_id(text)}; the two are from different models, fetch both again"
            )


def _set_bos_and_eos(
    backend: Backend, settings: Mapping[str, Any], special: Mapping[str, str]
) -> None:
    """Where the config says whether bos and eos go around a text, that counts, as in transformers;
    else what ``tokenizer.json`` does.
    """
    if "add_bos_token" not in settings and "add_eos_token" not in settings:
        return
    parts: dict[str, list[str]] = {"bos_token": [], "eos_token": []}
    named = []
    for role, place in parts.items():
        text = special.get(role)
        token_id = backend.token_to_id(text) if text is not None else None
        if settings.get(f"add_{role}") and text is not None and token_id is not None:
            place.append(text)
            named.append((text, token_id))
    before, after = parts.values()
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *before, "$B", *after],
        special_tokens=named,
    )


def _eos_ids(
    backend: Backend,
    special: Mapping[str, str],
    generation: Mapping[str, Any],
    config: Mapping[str, Any],
) -> tuple[int, ...]:
    """generation_config.json decides (config.json where it is silent); the tokenizer's own end
    token counts too.
    """
    declared = generation.get("eos_token_id")
    if declared is None:
        declared = config.get("eos_token_id")
    ids = declared if isinstance(declared, list) else [declared]
    found = [i for i in ids if isinstance(i, int) and not isinstance(i, bool)]
    own = special.get("eos_token")
    if own is not None and (own_id := backend.token_to_id(own)) is not None:
        found.append(own_id)
    return tuple(dict.fromkeys(found))


def _templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Chat template sources by name; files of their own win over tokenizer_config.json."""
    found: dict[str, str] = {}
    declared = settings.get("chat_template")
    if declared is None:
        declared = _optional_json(directory / LEGACY_TEMPLATE).get("chat_template")
    if isinstance(declared, str):
        found["default"] = declared
    elif isinstance(declared, list):
        for entry in declared:
            if isinstance(entry, Mapping) and isinstance(entry.get("template"), str):
                found[str(entry.get("name", "default"))] = entry["template"]
    files = [(path.stem, path) for path in sorted((directory / MORE_TEMPLATES).glob("*.jinja"))]
    if (directory / TEMPLATE).is_file():
        files.append(("default", directory / TEMPLATE))
    for name, path in files:
        try:
            found[name] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read ({error}); fetch it again") from error
    return found
