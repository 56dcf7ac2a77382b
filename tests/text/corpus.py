"""Texts that tokenizers disagree about, and small vocabularies learned from them."""

import json

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

TEXTS = (
    "",
    " ",
    "\n",
    "   \t\n\n  \r\n x",
    "Hello, world! It's 2024-01-31; don't WE'LL they'Ve.",
    "  leading and trailing  ",
    "1 12 123 1234 12345678901234567890 3.14159 1,000,000",
    "def f(x):\n    return {\n\t'a': [1, 2, 3],\n    }  # comment\n\n\nif __name__ == \"main\":\n",
    "日本語のテキストと中文字符和한국어 문장 ไทย हिन्दी العربية עברית",
    "👩‍👩‍👧‍👦 🇳🇱 👍🏽 ☃️ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ﷽",
    "e\u0301 é n\u0303 ñ \u0915\u094d\u0937 a\u0300\u0301\u0302\u0303",
    "\u00a0nbsp\u2003em\u3000ideographic\u200bzero\ufeffbom\u00adsoft",
    "\x00\x01\x7f\x80\x85\ufffd\uffff\U0010ffff",
    "٣٤٥ ½ ² Ⅷ 一二三 ๑๒๓ １２３",
    "ÀÉÎõü straße ŒUVRE ĳ İstanbul ǅ ﬁ",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa        bbbbbbbb",
    "https://example.org/a?b=c&d=%20#e user@example.org C:\\path\\to",
    "…—–“quoted” ‘single’ «guillemets» ¿qué? ¡sí!",
    "▁ a▁b <0x0A> Ġ Ċ <unk> <|nothing|> [INST]",
    "$$\\int_0^\\infty e^{-x^2}\\,dx = \\frac{\\sqrt{\\pi}}{2}$$",
    "CamelCaseHTTPServer snake_case kebab-case SCREAMING_CASE iPhone",
)

AROUND_CONTROLS = ("<s>a b</s>", "<s> a</s>  b<s>", "<s><s>\n a", "a<s>b</s>\u00e9", "  <s>\u2581a")
"""Texts in which control strings of the SentencePiece vocabulary stand."""

CONTROLS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_level_vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A byte-level BPE vocabulary and its merges, control tokens first as in SmolLM."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=list(CONTROLS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for text in TEXTS for _ in range(3)], trainer)
    return _parts(tokenizer)


def sentence_piece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and GGUF token types of a SentencePiece BPE vocabulary."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    trainer = trainers.BpeTrainer(vocab_size=600, show_progress=False)
    tokenizer.train_from_iterator([text for text in TEXTS[:8] for _ in range(3)], trainer)
    vocab, merges = _parts(tokenizer)
    letters = [token for token in vocab if len(token) == 1]
    learned = list(dict.fromkeys("".join(pair) for pair in merges))
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *learned, *letters]
    scores = [0.0] * 259 + [float(-rank) for rank in range(len(tokens) - 259)]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259)
    return tokens, scores, types


def _parts(tokenizer: tokenizers.Tokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]
