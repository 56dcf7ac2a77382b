r"""The rules that split text into words before merging, by their name in a GGUF's
`tokenizer.ggml.pre`.

Names and rules are llama.cpp's (`llama-vocab.cpp`). A word is what a regular expression matches, or
the text between two matches; each expression of a row splits the results of those before it. If
llama.cpp's table has both the expression of the author's tokenizer.json and one for its own engine,
the author's is used here: they differ for combining marks, letters whose case is not ASCII's and
the like, and the model was trained with the author's (tests/text/test_tokenizer.py names each
difference). The expressions are Oniguruma's (of the tokenizers package): `\p{Lu}`, `&&` within a
class, `(?i:...)`.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The rule for a name in `tokenizer.ggml.pre`.

    splits       regular expressions, applied in this order
    whole_words  a word in the vocabulary is one token, whatever the merges are
    begins       texts begin with the begin-of-text token unless the file says otherwise
    composed     text is normalised to NFC first; llama.cpp does not do that, the authors' files do
    """

    splits: tuple[str, ...]
    whole_words: bool = False
    begins: bool = False
    composed: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"|\s*[\r\n]+"
_BLANKS = r"|\s+(?!\S)|\s+"
_TAIL = _LINES + _BLANKS
_HEAD = r"[^\r\n\p{L}\p{N}]?"
_LETTERS = rf"{_HEAD}\p{{L}}+"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_HAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{{1,3}}{_SIGNS}{_TAIL}"
_QWEN2 = rf"{_CONTRACTIONS}|{_LETTERS}|\p{{N}}{_SIGNS}{_TAIL}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|{_HEAD}[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*{_TAIL}"
)


def _cased(digits: str, contractions: str = "", upper: str = _UPPER, lower: str = _LOWER) -> str:
    """Return a pattern of words of capitals followed by small letters, as o200k_base and its
    relatives split them.
    """
    return (
        rf"{_HEAD}{upper}*{lower}+{contractions}|{_HEAD}{upper}+{lower}*{contractions}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_TAIL}"
    )


_GPT4O = _cased(r"\p{N}{1,3}", f"{_CONTRACTIONS}?")
_KIMI = (
    r"\p{Han}+|"
    + _cased(
        r"\p{N}{1,3}",
        f"{_CONTRACTIONS}?",
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]",
    )
).replace(r"[\r\n/]*", r"[\r\n]*")
_SIGN_AND_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_MARKED_WORDS = rf"{_SIGN_AND_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_DEEPSEEK3 = rf"{_MARKED_WORDS}| ?[\p{{P}}\p{{S}}]+[\r\n]*{_TAIL}"
_CASED_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134"
    "\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters that have a case, in the Unicode of DeepSeek's first tokenizer."""
_DEEPSEEK_SIGNS = "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_DEEPSEEK_HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_ASIAN = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff]+"
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    f"|[\u3105-\u312f]+|{_HAN}"
)
_SENTENCE = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_HALVED_BLANKS = "".join(rf"|\s{{{count}}}(?!\S)" for count in ("512", "256", "128", "64", "32"))
_HALVED_BLANKS += r"|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
_THREES = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
"""Digits in threes, counted from the right."""

_OF_LLAMA3 = PreTokenizer((_LLAMA3,), whole_words=True, begins=True)
_OF_QWEN2 = PreTokenizer((_QWEN2,), composed=True)
_DIGITS_THEN_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_OF_GPT2 = PreTokenizer((_GPT2,))
_OF_DEEPSEEK3 = PreTokenizer((r"\p{N}{1,3}", _HAN, _DEEPSEEK3))
_TINY_AYA = PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O))
_PUNCTUATION = r"[\p{P}\$\+<=>\^~\|]+"


def _each(names: str, what: PreTokenizer) -> dict[str, PreTokenizer]:
    return dict.fromkeys(names.split(), what)


PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((_PUNCTUATION, _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **_each(
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", _OF_LLAMA3
    ),
    **_each("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_LLAMA3,))),
    **_each("glm4 glm5", PreTokenizer((_LLAMA3,), whole_words=True)),
    "jais-2": PreTokenizer((_LLAMA3.replace(_BLANKS, _HALVED_BLANKS),)),
    "minicpm5": PreTokenizer(
        (r"\p{N}{1,3}", _QWEN2.replace(r"|\p{N}|", r"|\p{N}+|")), whole_words=True
    ),
    **_each("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez", _OF_QWEN2),
    **_each(
        "stablelm2 hunyuan solar-open grok-2 bailingmoe bailingmoe2 llada-moe",
        replace(_OF_QWEN2, composed=False),
    ),
    "qwen35": PreTokenizer((_QWEN35,), composed=True),
    "ufakzeka": PreTokenizer((_QWEN2.removeprefix(f"{_CONTRACTIONS}|"),)),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    "seed-coder": PreTokenizer((_QWEN2.replace(_SIGNS, r"| ?[^\s\p{L}\p{N}\r\n]+"),)),
    "exaone-moe": PreTokenizer(
        (
            rf"{_CONTRACTIONS}|{_HEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]{_BLANKS}",
        )
    ),
    "tekken": PreTokenizer((_cased(r"\p{N}"),), whole_words=True, begins=True),
    **_each("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_GPT4O,))),
    "granite-embed-multi-97m": PreTokenizer((_GPT4O,), whole_words=True),
    **_each("tiny_aya cohere2moe", _TINY_AYA),
    "youtu": PreTokenizer((_YOUTU, _cased(r"\p{N}", f"{_CONTRACTIONS}?")), whole_words=True),
    "kimi-k2": PreTokenizer((_KIMI,)),
    **_each("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _OF_DEEPSEEK3),
    "spark2_5": PreTokenizer(
        (
            r"\p{N}{1,3}",
            _HAN,
            rf"{_MARKED_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]{_BLANKS}",
            r"\p{N}",
        )
    ),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            rf"\s?{_DEEPSEEK_SIGNS}",
            r"\s+$",
            _DEEPSEEK_HAN,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN, r"\p{N}")
    ),
    "afmoe": PreTokenizer((_THREES, _ASIAN, _DEEPSEEK3)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    "command-r": replace(_DIGITS_THEN_GPT2, composed=True),
    **_each("smollm starcoder refact codeshell exaone minerva-7b mellum2", _DIGITS_THEN_GPT2),
    **_each(
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum"
        " modern-bert roberta-bpe jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code",
        _OF_GPT2,
    ),
    **_each("poro-chat bloom gpt3-finnish", PreTokenizer((_SENTENCE,))),
    "viking": PreTokenizer((_SENTENCE, r"\p{N}")),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        begins=True,
    ),
}

NOT_BYTE_LEVEL = ("gemma4", "granite-embed-multi-311m", "sarvam-moe", "whitespace")
"""llama.cpp's names for rules whose words are not written as bytes; no supported family uses
one.
"""
