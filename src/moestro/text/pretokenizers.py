"""How text is cut into words before byte-pair merging, by the name a GGUF file gives it.

``tokenizer.ggml.pre`` names the model whose tokenizer first cut text that way. The patterns are the
ones in those models' published tokenizer files; each is applied in turn to what the ones before
it left (Hugging Face "Split, isolated"). Family names of vocabularies appear in this file alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

from moestro.core.errors import CheckpointError

#: values of ``tokenizer.ggml.model`` that can be read
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"

_SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = rf"\s*[\r\n]+|{_SPACES}"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CJK_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
#: the range of the published file, which spans far more than its author meant
_CJK_WIDE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


def _cased_word(suffix: str = "", without: str = "") -> str:
    """Words cut before capitals, as in tiktoken's o200k: "helloWorld" is two."""
    upper, lower = f"[{_UPPER}{without}]", f"[{_LOWER}{without}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    return f"{start}{upper}*{lower}+{suffix}|{start}{upper}+{lower}*{suffix}"


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK3 = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}"
)
#: cased letters of the alphabets that have case, as listed in DeepSeek-LLM's file
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """Split patterns in order; ``ignore_merges`` takes a whole word that is a token as it is;
    ``add_bos`` holds where the file itself does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in self.patterns]
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, bytes_only])


def _one(*parts: str, ignore_merges: bool = False, add_bos: bool = False) -> PreTokenizer:
    return PreTokenizer(patterns=("|".join(parts),), ignore_merges=ignore_merges, add_bos=add_bos)


_TABLE: dict[str, PreTokenizer] = {
    "default": PreTokenizer(
        patterns=(r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    ),
    "gpt-2": _one(_GPT2),
    "smollm": PreTokenizer(patterns=(r"\p{N}", _GPT2)),
    "llama-bpe": _one(
        _SUFFIX, _WORD, r"\p{N}{1,3}", _SYMBOLS, _LINES, ignore_merges=True, add_bos=True
    ),
    "dbrx": _one(_SUFFIX, _WORD, r"\p{N}{1,3}", _SYMBOLS, _LINES),
    "glm4": _one(_SUFFIX, _WORD, r"\p{N}{1,3}", _SYMBOLS, _LINES, ignore_merges=True),
    "qwen2": _one(_SUFFIX, _WORD, r"\p{N}", _SYMBOLS, _LINES),
    "qwen35": _one(
        _SUFFIX,
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        _LINES,
    ),
    "deepseek-llm": PreTokenizer(
        patterns=(
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _CJK_WIDE,
            r"\p{N}",
        )
    ),
    "deepseek-coder": PreTokenizer(
        patterns=(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_WIDE, r"\p{N}")
    ),
    "deepseek-v3": PreTokenizer(patterns=(r"\p{N}{1,3}", _CJK_KANA, _DEEPSEEK3)),
    "falcon": PreTokenizer(patterns=(r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "tekken": _one(
        _cased_word(),
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        _LINES,
        ignore_merges=True,
        add_bos=True,
    ),
    "gpt-4o": _one(
        _cased_word(f"{_SUFFIX}?"), r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _LINES
    ),
    "kimi-k2": _one(
        r"\p{Han}+",
        _cased_word(f"{_SUFFIX}?", without=r"&&[^\p{Han}]"),
        r"\p{N}{1,3}",
        _SYMBOLS,
        _LINES,
    ),
    "bailingmoe": _one(
        r"'(?i:[sdmt]|ll|ve|re)",
        r"[^\r\n\p{L}\p{N}]?+\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]++[\r\n]*",
        r"\s*[\r\n]",
        _SPACES,
    ),
    "seed-coder": _one(_SUFFIX, _WORD, r"\p{N}", r" ?[^\s\p{L}\p{N}\r\n]+", _LINES),
}

#: names whose files cut text exactly as another's
_SAME_AS: dict[str, tuple[str, ...]] = {
    "gpt-2": (
        "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "gigachat", "a.x-4.0",
        "mellum", "modern-bert", "exaone4", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de",
    ),
    "smollm": (
        "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2",
    ),
    "llama-bpe": (
        "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    ),
    "dbrx": ("smaug-bpe",),
    "glm4": ("glm5",),
    "qwen2": (
        "deepseek-r1-qwen", "kormo", "stablelm2", "hunyuan", "megrez", "solar-open", "grok-2",
        "f2llmv2",
    ),
    "deepseek-v3": ("hunyuan-dense", "joyai-llm", "hy_v4"),
    "gpt-4o": ("llama4", "kanana2", "minimax-m2"),
    "bailingmoe": ("bailingmoe2", "llada-moe"),
}  # fmt: skip
_TABLE.update({alias: _TABLE[name] for name, names in _SAME_AS.items() for alias in names})


def names() -> list[str]:
    return sorted(_TABLE)


def get(name: str) -> PreTokenizer:
    """The pre-tokenizer a GGUF file names. Raises CheckpointError naming it when unknown."""
    try:
        return _TABLE[name]
    except KeyError:
        raise CheckpointError(
            f"tokenizer.ggml.pre is {name!r}, a way of splitting text not known here (known: "
            f"{', '.join(names())}); put the model's own tokenizer.json beside the GGUF file"
        ) from None
