"""Ids equal to transformers', controls out of users' reach, bytes exact."""

import json
import threading
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Regex, normalizers, pre_tokenizers
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer
from transformers.tokenization_utils_base import generate_merges

from forerun.errors import ModelError, RequestError
from forerun.text import encoders
from forerun.text import tokenizer as tokenizer_module
from forerun.text.gguf import tokenizer_json
from forerun.text.length_bound import length_bound
from forerun.text.pieces import PieceTable, byte_alphabet
from forerun.text.pre_tokenizers import PRE_TOKENIZERS
from forerun.text.tokenizer import Tokenizer, as_ids, as_numbers
from tests.text.corpus import (
    AROUND_CONTROLS,
    CONTROLS,
    TEXTS,
    byte_level_vocabulary,
    sentence_piece_vocabulary,
)

VOCAB, MERGES = byte_level_vocabulary()


@cache
def gguf_metadata(pre: str) -> dict:
    tokens = sorted(VOCAB, key=VOCAB.get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in CONTROLS else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in MERGES],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
    }


@cache
def byte_level(pre: str) -> Tokenizer:
    return Tokenizer.from_gguf(gguf_metadata(pre))


@cache
def reference(pre: str) -> transformers.PreTrainedTokenizerBase:
    """transformers' tokenizer of the model family that uses `pre`."""
    if pre in ("qwen2", "qwen35"):
        kind = transformers.Qwen2Tokenizer if pre == "qwen2" else Qwen3_5Tokenizer
        hf = kind(vocab=dict(VOCAB), merges=list(MERGES))
    else:
        hf = transformers.GPT2Tokenizer(vocab=dict(VOCAB), merges=list(MERGES))
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre == "smollm")
        if pre == "smollm":
            cut = pre_tokenizers.Digits(individual_digits=True)
            hf.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, level])
        elif pre in GGUF_PRE_TOKENIZER_SPLITS:
            cut = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), "isolated")
            hf.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, level])
    if pre in ("llama-bpe", "tekken"):  # their tokenizer.json says so
        hf.backend_tokenizer.model.ignore_merges = True
    hf.add_special_tokens({"additional_special_tokens": list(CONTROLS)})
    return hf


def sentence_piece_metadata(spaced: bool = True) -> dict:
    tokens, scores, types = sentence_piece_vocabulary()
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.add_space_prefix": spaced,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


@cache
def sentence_piece(spaced: bool = True) -> Tokenizer:
    return Tokenizer.from_gguf(sentence_piece_metadata(spaced))


@cache
def sentence_piece_reference(spaced: bool = True) -> transformers.LlamaTokenizer:
    tokens, scores, types = sentence_piece_vocabulary()
    vocab = {token: index for index, token in enumerate(tokens)}
    special = {token for token, kind in zip(tokens, types, strict=True) if kind != 1}
    merges = generate_merges(vocab, dict(zip(tokens, scores, strict=True)), special)
    hf = transformers.LlamaTokenizer(vocab=vocab, merges=merges, add_prefix_space=spaced)
    # As the tokenizer.json of Llama 2, Mistral and Phi-3 say; transformers 5 makes one of its own
    # where it has only a vocabulary, which adds no space before one.
    marks = [normalizers.Prepend("▁")] * spaced + [normalizers.Replace(" ", "▁")]
    hf.backend_tokenizer.normalizer = normalizers.Sequence(marks)
    hf.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([])
    return hf


def test_gemma_4_merges_by_its_own_list_and_cuts_at_line_breaks():
    plain = sentence_piece_metadata(spaced=False)
    merges = tokenizer_json(plain).spec["model"]["merges"]
    own = plain | {"tokenizer.ggml.model": "gemma4"}
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.merges"):
        Tokenizer.from_gguf(own)
    own["tokenizer.ggml.merges"] = [" ".join(merge) for merge in merges]
    tokenizer, other = Tokenizer.from_gguf(own), sentence_piece(spaced=False)
    for text in ("the quick brown fox", "  a  b", "\u00e9\U0001f600", "x"):
        assert list(tokenizer.encode(text)) == list(other.encode(text))
        assert tokenizer.decode(tokenizer.encode_within(text)) == text
    parts = (tokenizer.encode_within(part) for part in ("the", "\n\n", "fox"))
    assert list(tokenizer.encode_within("the\n\nfox")) == [one for part in parts for one in part]


def test_a_gemma_4_ends_where_its_generation_config_says():
    """Files call `<eos>` text, and declare only `<turn|>`; behind a call the model asks for its
    result, which it would else make up.
    """
    plain = sentence_piece_metadata(spaced=False)
    merges = tokenizer_json(plain).spec["model"]["merges"]
    own = plain | {"tokenizer.ggml.model": "gemma4"}
    own["tokenizer.ggml.merges"] = [" ".join(merge) for merge in merges]
    size = len(plain["tokenizer.ggml.tokens"])
    added = {"<eos>": 1, "<|tool_response>": 4, "<turn|>": 3}
    for name, more in (("tokens", [*added]), ("token_type", [*added.values()])):
        own[f"tokenizer.ggml.{name}"] = [*plain[f"tokenizer.ggml.{name}"], *more]
    own["tokenizer.ggml.eos_token_id"] = size + 2
    tokenizer = Tokenizer.from_gguf(own)
    assert tokenizer.eos_ids[0] == size + 2
    assert {size, size + 1, size + 2} <= {*tokenizer.eos_ids} & tokenizer.special_ids
    assert size not in tokenizer.encode("<eos>")
    assert size in tokenizer.encode("<eos>", specials=True)


PRES = ("smollm", "llama-bpe", "qwen2", "gpt-2", "tekken", "qwen35", "gpt-4o")
WORDS, IDS = (
    json.loads((Path(__file__).parent / f"llama_cpp_{name}.json").read_text(encoding="utf-8"))
    for name in ("words", "ids")
)
"""What llama.cpp says (llama_cpp_words.py wrote it down)."""

LLAMA_CPP_APPROXIMATES = {
    **{name: {0, 6} for name in ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2")},
    **{name: {0, 2, 13} for name in ("tiny_aya", "cohere2moe")},
    "granite-embed-multi-97m": {0},
    "tekken": {6},
    "kimi-k2": {0, 2, 5, 6},
    "youtu": {0, 2},
    "afmoe": {13},
}
"""Texts that its own engine cuts otherwise than the author's expression, which is ours: it folds no
case of letters beyond ASCII, takes marks for no letters, knows no capitals, and counts digits by
code that joins them to the blanks before.
"""


@pytest.mark.parametrize("pre", PRES)
def test_gguf_byte_level_ids_equal_transformers(pre):
    ours, theirs = byte_level(pre), reference(pre)
    for text in TEXTS:
        expected = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text).tolist() == expected, text
        assert ours.decode(expected) == theirs.decode(expected), text


@settings(max_examples=150)
@given(text=st.text(max_size=40), pre=st.sampled_from(PRES))
def test_gguf_byte_level_ids_equal_transformers_on_any_text(text, pre):
    # Ours never reads a control token in text, and hypothesis draws words of this file too.
    assume(not any(token in text for token in reference(pre).all_special_tokens))
    ours = byte_level(pre).encode(text).tolist()
    assert ours == reference(pre)(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_words_are_those_of_llama_cpp(pre):
    (group,) = (group for group in WORDS if pre in group["names"])
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in PRE_TOKENIZERS[pre].splits]
    differ = set()
    for index, words in enumerate(group["words"]):
        pieces = pre_tokenizers.Sequence(cuts).pre_tokenize_str("".join(words))
        if [word for word, _ in pieces] != words:
            differ.add(index)
    assert differ == LLAMA_CPP_APPROXIMATES.get(pre, set())


def test_pre_tokenizers_that_differ_are_distinguished_by_a_text():
    """Two names in one group of llama.cpp's have one rule here; the texts tell all others apart."""
    cuts = [{PRE_TOKENIZERS[name].splits for name in group["names"]} for group in WORDS]
    for group, rules in zip(WORDS, cuts, strict=True):
        assert len(rules) == 1, group["names"]
    # Of gpt-4o's expression llama.cpp has two approximations, one of them for Granite's embeddings.
    assert len({rule for rules in cuts for rule in rules}) == len(WORDS) - 1
    assert sorted(name for group in WORDS for name in group["names"]) == sorted(PRE_TOKENIZERS)


def test_a_message_of_harmony_ends_no_turn():
    """A turn of gpt-oss is several messages; `<|end|>` stands behind each of them."""
    metadata = dict(gguf_metadata("gpt-4o"))
    tokens = metadata["tokenizer.ggml.tokens"]
    size, types = len(tokens), metadata["tokenizer.ggml.token_type"]
    for more, ends in (
        (["<|end|>"], {2, 0, size}),
        (["<|end|>", "<|return|>", "<|call|>"], {2, 0, size + 1, size + 2}),
    ):
        metadata["tokenizer.ggml.tokens"] = [*tokens, *more]
        metadata["tokenizer.ggml.token_type"] = [*types, *[3] * len(more)]
        assert set(Tokenizer.from_gguf(metadata).eos_ids) == ends


@pytest.mark.parametrize("row", IDS, ids=["spaced", "unspaced"])
def test_sentence_piece_ids_are_those_of_llama_cpp(row):
    """Spaces at the start are kept apart, and a control token is a start of its own."""
    ours = sentence_piece(row["spaced"])
    assert [ours.encode(text).tolist() for text in TEXTS] == row["texts"]
    assert [ours.encode(text, specials=True).tolist() for text in AROUND_CONTROLS] == row["around"]


@pytest.mark.parametrize("spaced", [True, False])
def test_gguf_sentence_piece_ids_equal_transformers(spaced):
    ours, theirs = sentence_piece(spaced), sentence_piece_reference(spaced)
    for text in TEXTS:
        if any(name in text for name in ("<unk>", "<0x0A>")):
            continue  # in transformers these become the control and byte tokens
        expected = theirs(text, add_special_tokens=False).input_ids
        assert ours.encode(text).tolist() == expected, text
        assert ours.decode(expected) == theirs.decode(expected), text


@settings(max_examples=150)
@given(
    parts=st.lists(
        st.sampled_from(["<s>", "</s>", "a", " b", "  ", "\n", "é", "▁", "日"]), max_size=8
    )
)
def test_sentence_piece_around_control_strings_equals_transformers(parts):
    text = "".join(parts)
    expected = sentence_piece_reference()(text, add_special_tokens=False).input_ids
    assert sentence_piece().encode(text, specials=True).tolist() == expected
    assert not {1, 2} & set(sentence_piece().encode(text).tolist())


def test_sentence_piece_begins_with_begin_of_text():
    assert sentence_piece().encode("a", bos=True)[0] == 1
    assert sentence_piece().encode("a")[0] != 1


@pytest.mark.parametrize("pre", ["smollm", "qwen2"])
def test_control_strings_only_with_the_option(pre):
    text = "hi <|im_end|>\n<|im_start|>system<|endoftext|>"
    with_controls = reference(pre)(text, add_special_tokens=False).input_ids
    ours = byte_level(pre)
    assert ours.encode(text, specials=True).tolist() == with_controls
    plain = ours.encode(text).tolist()
    assert not ours.special_ids & set(plain)
    assert ours.decode(plain, skip_special=False) == text


def test_plain_text_never_becomes_a_control_even_when_whole_words_win():
    """`ignore_merges` looks whole words up in the vocabulary, control strings included."""
    metadata = dict(gguf_metadata("llama-bpe"))
    tokens = [*metadata["tokenizer.ggml.tokens"], "bos"]
    metadata["tokenizer.ggml.tokens"] = tokens
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 3]
    ours = Tokenizer.from_gguf(metadata)
    assert len(tokens) - 1 in ours.special_ids
    assert ours.encode("bos", specials=True).tolist() == [len(tokens) - 1]
    assert not ours.special_ids & set(ours.encode("bos").tolist())


def test_merges_that_spell_a_control_are_not_used_on_plain_text(tmp_path):
    """Converted SentencePiece vocabularies may have them."""
    vocab = {text: id for id, text in enumerate(["<unk>", "<s>", "<", "s", ">", "<s", "▁"])}
    hf = transformers.LlamaTokenizer(vocab=vocab, merges=[("<", "s"), ("<s", ">")])
    hf.save_pretrained(tmp_path)
    ours = Tokenizer.from_file(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").unlink()  # Encoders, made later, do not need it.
    assert ours.added["<s>"].control
    assert vocab["<s>"] in ours.encode("<s>", specials=True)
    assert vocab["<s>"] not in ours.encode("<s>").tolist()


def test_added_tokens_swallow_spaces_and_respect_words_like_transformers(tmp_path):
    hf = reference("gpt-2")
    base = json.loads(hf.backend_tokenizer.to_str())
    flags = {"id": 0, "special": True, "normalized": False}
    extra = [
        {"content": "<l>", "lstrip": True, "rstrip": False, "single_word": False},
        {"content": "<r>", "lstrip": False, "rstrip": True, "single_word": False},
        {"content": "word", "lstrip": False, "rstrip": False, "single_word": True},
    ]
    size = len(hf)
    base["added_tokens"] += [flags | t | {"id": size + i} for i, t in enumerate(extra)]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(base))
    theirs, ours = tokenizers.Tokenizer.from_file(str(path)), Tokenizer.from_file(path)
    for text in ("a  <l>  b", "a <r> \n b<r>", " <l><r> ", "word words sword a word.", "<l>  <l>"):
        assert ours.encode(text, specials=True).tolist() == theirs.encode(text).ids, text


def test_from_file_keeps_ids_of_added_tokens_outside_the_vocabulary(tmp_path):
    hf = transformers.Qwen2Tokenizer(vocab=dict(VOCAB), merges=list(MERGES))
    hf.add_special_tokens({"additional_special_tokens": ["<|a|>", "<|b|>"]})
    hf.add_tokens(["<think>", "</think>"])
    hf.save_pretrained(tmp_path)
    ours = Tokenizer.from_file(tmp_path / "tokenizer.json", eos_ids=(2,))
    text = "x <think>y</think> <|a|>z<|b|>"
    expected = hf(text, add_special_tokens=False).input_ids
    assert ours.encode(text, specials=True).tolist() == expected
    plain = ours.encode(text).tolist()
    assert hf.convert_tokens_to_ids("<think>") in plain
    assert not set(hf.convert_tokens_to_ids(["<|a|>", "<|b|>"])) & set(plain)
    assert ours.vocab_size == max(hf.get_vocab().values()) + 1


def test_a_swallowed_run_of_spaces_costs_linear_time(tmp_path):
    hf = reference("gpt-2")
    base = json.loads(hf.backend_tokenizer.to_str())
    base["added_tokens"][0] |= {"lstrip": True}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(base))
    ours = Tokenizer.from_file(path)
    assert list(ours.split(" " * 200_000, ours._controls)) == [" " * 200_000]


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", "ok \udc80"])
def test_lone_surrogates_are_named(text):
    for tokenizer in (byte_level("smollm"), Tokenizer.byte_level()):
        with pytest.raises(RequestError, match=r"lone surrogate \(U\+D[0-9A-F]{3}\) at character"):
            tokenizer.encode(text)


@settings(max_examples=100)
@given(st.text(max_size=60))
def test_byte_level_is_utf8(text):
    tokenizer = Tokenizer.byte_level()
    assert tokenizer.encode(text).tolist() == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_byte_level_controls():
    tokenizer = Tokenizer.byte_level()
    ids = tokenizer.encode("<|im_start|>a<|im_end|>", specials=True).tolist()
    assert ids == [256, 97, 257]
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>a<|im_end|>"
    assert tokenizer.eos_ids == (257, 258)
    assert tokenizer.vocab_size == 259


def test_token_bytes_join_to_the_text():
    bytewise, spaced = byte_level("smollm"), sentence_piece()
    for text in TEXTS:
        joined = b"".join(bytewise.token_bytes(int(id)) for id in bytewise.encode(text))
        assert joined.decode() == text
        joined = b"".join(spaced.token_bytes(int(id)) for id in spaced.encode("x" + text))
        assert joined.decode() == " x" + text.replace("▁", " ")
    assert bytewise.token_bytes(10**9) == b""


@pytest.mark.parametrize("name", ["bytes", "sentence piece"])
def test_doubled_and_empty_tokens_of_a_gguf_are_read(name):
    """Each id has its text; the last of those that are called the same is spelled."""
    metadata = sentence_piece_metadata() if name == "sentence piece" else gguf_metadata("smollm")
    tokens = metadata["tokenizer.ggml.tokens"]
    size, more = len(tokens), ["a", "", "", tokens[2], "o"]
    grown = metadata | {
        "tokenizer.ggml.tokens": [*tokens, *more],
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], 1, 1, 1, 3, 5],
        "tokenizer.ggml.bos_token_id": (1 << 32) - 1,
    }
    if "tokenizer.ggml.scores" in metadata:
        scores = [*metadata["tokenizer.ggml.scores"], *[-1e6] * len(more)]
        grown["tokenizer.ggml.scores"] = scores
    before, ours = Tokenizer.from_gguf(metadata), Tokenizer.from_gguf(grown)
    assert ours.vocab_size == size + len(more) and ours.bos_id is None
    pieces = [ours.token_bytes(size + index) for index in range(len(more))]
    assert pieces == [b"a", b"", b"", tokens[2].encode(), b"o"]
    for text in ("o", "xay", *TEXTS):
        ids = ours.encode(text).tolist()
        assert ours.decode(ids) == before.decode(before.encode(text))
        assert len(ids) == len(before.encode(text)) and not {size + 1, size + 2, size + 4} & set(
            ids
        )
    assert size in ours.encode("xay" if name == "bytes" else "x\u0001a\u0001").tolist()


def test_added_tokens_stand_for_their_own_text(tmp_path):
    """Whatever their letters stand for in tokens that are written as bytes."""
    texts = ["<\u00e9>", "\u0120x", "<\u65e5>", "\u00bd"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": 256 + index, "content": text, "special": index == 2} | flags
        for index, text in enumerate(texts)
    ]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(small_spec(added_tokens=added)))
    ours = Tokenizer.from_file(path)
    assert [ours.token_bytes(256 + n).decode() for n in range(len(texts))] == texts
    text = "a".join(texts)
    ids = ours.encode(text, specials=True)
    assert set(range(256, 260)) <= set(ids.tolist())
    assert ours.decode(ids, skip_special=False) == text


def test_ends_are_declared_first_then_well_known():
    assert byte_level("smollm").eos_ids == (2, 0)
    assert byte_level("smollm").bos_id == 1


@pytest.mark.parametrize(("kind", "ends"), [(4, False), (3, True)])
def test_a_mark_of_html_ends_a_text_only_as_a_control_token(kind, ends):
    """Gemma has `</s>` beside its `<eos>`, as text: with it, answers ended within HTML or JSON."""
    metadata = gguf_metadata("smollm")
    size = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "</s>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], kind]
    tokenizer = Tokenizer.from_gguf(metadata)
    assert (size in tokenizer.eos_ids) == (size in tokenizer.special_ids) == ends
    assert (size in tokenizer.encode("a</s>")) == (not ends)


def test_an_added_token_that_ends_a_text_is_a_control_token(tmp_path):
    """Whatever its file says: within a text of a user it would end the turn."""
    flags = dict.fromkeys(("special", "single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": 256 + n, "content": text} | flags for n, text in enumerate(["<end>", "<b>"])]
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(small_spec(added_tokens=added)))
    tokenizer = Tokenizer.from_file(path, eos_ids=[256])
    assert tokenizer.special_ids == {256}
    assert tokenizer.encode("<end>", specials=True).tolist() == [256]
    assert 256 not in tokenizer.encode("x<end>") and 257 in tokenizer.encode("x<b>")
    named = Tokenizer.from_file(path, names={"eos_token": "<end>"})
    assert (named.eos_ids, named.special_ids) == ((256,), {256})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model is 'rwkv'"),
        ({"tokenizer.ggml.pre": "martian"}, "tokenizer.ggml.pre is 'martian'"),
        ({"tokenizer.ggml.pre": ["smollm"]}, r"pre is \['smollm'\], which is unknown"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer.ggml.merges": [1]}, "tokenizer.ggml.merges is missing or is not"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type has 1 entries"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id is 1000000"),
        ({"tokenizer.ggml.merges": ["zz zz"]}, "cannot be built"),
    ],
)
def test_bad_gguf_metadata_names_the_key(change, message):
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_gguf(gguf_metadata("smollm") | change).warm_up()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read the tokenizer"),
        ("[]", "is not a tokenizer.json"),
        ('{"model": {"type": "WordPiece", "vocab": {}}}', "model is 'WordPiece'"),
        (
            '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},'
            ' "decoder": {"type": "CTC"}}',
            "decodes with",
        ),
        (
            '{"model": {"type": "BPE", "vocab": {"a": 99999999}, "merges": []},'
            ' "decoder": {"type": "ByteLevel"}}',
            "up to 99999999",
        ),
        ('{"model": {"type": "BPE"}, "added_tokens": [{}]}', "cannot be built"),
        ('{"model": {"type": "BPE"}, "added_tokens": [null]}', "cannot be built"),
    ],
)
def test_bad_tokenizer_files_are_explained(tmp_path: Path, text, message):
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_file(path)


def bounded(kind: str) -> Tokenizer:
    if kind == "bytes":
        return Tokenizer.byte_level()
    return sentence_piece() if kind == "sentence piece" else byte_level(kind)


@settings(max_examples=150)
@given(
    text=st.one_of(
        st.text(max_size=60),
        st.lists(
            st.sampled_from(
                ["<s>", "▁▁▁", "     ", "\u0301", "e\u0301", "ᄒ\u1161\u11ab", "one two"]
            )
        ).map("".join),
    ),
    kind=st.sampled_from([*PRES, "sentence piece", "bytes"]),
    specials=st.booleans(),
)
def test_no_text_has_fewer_tokens_than_its_lower_bound(text, kind, specials):
    ours = bounded(kind)
    assert ours.least_tokens(text) <= len(ours.encode(text, specials=specials))


def test_pieces_are_a_sequence():
    pieces = [b"a", b"", b"\xff\x00", b"bc"]
    table = PieceTable.of(pieces)
    assert [*table] == pieces and len(table) == 4 and table.index(b"bc") == 3
    assert table[1:3] == pieces[1:3] and table[-1] == b"bc" and table[::-2] == pieces[::-2]
    for id in (4, -5):
        with pytest.raises(IndexError):
            table[id]
    assert not len(PieceTable.of([]))


@pytest.mark.parametrize("kind", [*PRES, "sentence piece", "bytes"])
def test_long_texts_are_reported_as_long(kind):
    ours = bounded(kind)
    longest = max(map(len, [*ours.pieces, *map(str.encode, ours.added)]))
    assert ours.least_tokens("1" * 1000) >= 1000 // longest > 0


@pytest.mark.parametrize(
    "step",
    [
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "1+"}, "content": ""}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "11"}, "content": "1"}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": "1"}, "behavior": "Removed"}},
        {"pre_tokenizer": {"type": "CharDelimiterSplit", "delimiter": "1"}},
        {"truncation": {"max_length": 4}},
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "ByteLevel"},
                    {"type": "Split", "pattern": {"String": "1"}, "behavior": "Removed"},
                ],
            }
        },
    ],
)
def test_no_bound_for_tokenizers_that_may_drop_text(step):
    assert (
        length_bound(step, [bytes([value]) for value in range(256)], []).lower_bound("1" * 9) == 0
    )
    assert length_bound({}, [bytes([value]) for value in range(256)], []).lower_bound("1" * 9) == 9


BYTES = [bytes([value]) for value in range(256)]
NFC, STRIP = {"normalizer": {"type": "NFC"}}, {"normalizer": {"type": "Strip"}}
SWALLOWS = {"added_tokens": [{"content": "<x>", "lstrip": True}]}


@pytest.mark.parametrize(
    ("step", "more", "text", "least"),
    [
        ({}, [b"    "], " \t\n\r" * 100, 100),
        (NFC, [b"    "], " " * 100, 25),
        (STRIP, [b"    "], " " * 100, 0),
        (SWALLOWS, [b"    "], " " * 100, 0),
        ({}, [], "é", 2),
        (NFC, [], "é1", 1),
        (SWALLOWS, [], "é1", 1),
    ],
)
def test_what_may_be_swallowed_is_not_counted(step, more, text, least):
    """White space is, where nothing does."""
    assert length_bound(step, [*BYTES, *more], []).lower_bound(text) == least


def test_other_threads_run_while_a_text_is_encoded():
    ours, ticks, done = byte_level("smollm"), [], threading.Event()

    def tick():
        while not done.wait(0.001):
            ticks.append(None)

    text = "1" * 300_000
    ours.encode("warm")
    other = threading.Thread(target=tick)
    other.start()
    before = len(ticks)
    ours.encode_part(text, True)
    after = len(ticks)
    done.set()
    other.join()
    assert after - before > 10


DECODER = {
    **{"type": "ByteLevel", "use_regex": True},
    **{"add_prefix_space": True, "trim_offsets": True},
}


def small_spec(**parts):
    vocab = {letter: id for id, letter in enumerate(byte_alphabet().values())}
    model = {"type": "BPE", "vocab": vocab, "merges": [], **parts.pop("model", {})}
    return {"model": model, "decoder": DECODER, "added_tokens": [], **parts}


def doubling(times):
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    inner = {"type": "Sequence", "normalizers": [step] * times}
    return {"type": "Sequence", "normalizers": [inner]}


INSERTING = {"type": "Replace", "pattern": {"Regex": "a*"}, "content": "b" * 100}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"normalizer": doubling(28)}, "normalizer makes 268435456 characters of one"),
        ({"normalizer": INSERTING}, "normalizer makes 101 characters of one"),
        ({"model": {"merges": ["a b"] * 256 * 60}}, "15360 merges for 256 tokens"),
    ],
)
def test_tokenizers_that_ask_for_too_much_are_refused_unbuilt(tmp_path, parts, message):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(small_spec(**parts)))
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_file(path)


def test_a_text_that_the_tokenizer_cannot_cut_is_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    cut = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    path.write_text(json.dumps(small_spec(pre_tokenizer=cut)))
    ours = Tokenizer.from_file(path)
    assert len(ours.encode("ab")) == 2
    with pytest.raises(RequestError, match="cannot cut this text"):
        ours.encode("a" * 40 + "b")


def test_millions_of_ids_are_converted_in_pieces():
    """What takes one call of C for all of them keeps every other thread waiting."""

    class Watched(list):
        def __getitem__(self, part):
            taken.append(len(range(*part.indices(len(self)))))
            return super().__getitem__(part)

    taken = []
    given = Watched([*range(70_000), *range(70_000)])
    ids = as_ids(given)
    assert ids.dtype == np.int32 and sum(taken) == len(given) and max(taken) <= 1 << 16
    assert as_numbers(ids) == [*given]
    assert as_ids([2**40], np.int64).tolist() == [2**40] and not len(as_ids([]))


def test_what_only_encoding_needs_is_made_when_a_text_is_encoded(monkeypatch):
    """Once, by the first call; a fault is a ModelError then."""
    made, without = [], tokenizer_module.without_controls

    def counted(*given):
        made.append(given)
        return without(*given)

    monkeypatch.setattr(tokenizer_module, "without_controls", counted)
    spec = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}
    cuts = {"add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    spec["decoder"] = {"type": "ByteLevel", **cuts}
    tokenizer = Tokenizer._from_json(spec, (), None, lambda: spec)
    assert tokenizer.decode([0, 1]) == "ab" and not made
    tokenizer.warm_up()
    assert tokenizer.encode("ba").tolist() == [1, 0] and len(made) == 1
    broken = Tokenizer._from_json(spec, (), None, lambda: spec)
    monkeypatch.setattr(encoders.models, "BPE", {}.pop)
    with pytest.raises(ModelError, match="cannot be built"):
        broken.warm_up()
