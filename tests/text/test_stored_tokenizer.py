"""A large tokenizer is derived once; whatever is wrong with what was kept, it is derived again, and
a kept one is the same.
"""

import json
from hashlib import sha256

import pytest

from forerun.errors import ModelError
from forerun.text import stored_tokenizer
from forerun.text.stored_tokenizer import VERSION, file_tokenizer, gguf_tokenizer
from forerun.text.tokenizer import Tokenizer
from tests.text.test_tokenizer import gguf_metadata, sentence_piece_metadata

TEXTS = ("", "the quick  brown fox", " <s>the</s>", "naïve 日本 \n\n", "\x00<0x0A>")
METADATA = {"scores": sentence_piece_metadata(), "merges": gguf_metadata("smollm")}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The folder of kept tokenizers, of any size."""
    monkeypatch.setattr(stored_tokenizer, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(stored_tokenizer, "LEAST", 4)
    return tmp_path / "tokenizers"


@pytest.fixture
def derived(monkeypatch):
    """How often a tokenizer was derived."""
    calls, derive = [], Tokenizer._from_json.__func__
    monkeypatch.setattr(
        Tokenizer,
        "_from_json",
        classmethod(lambda cls, *args, **more: calls.append(1) or derive(cls, *args, **more)),
    )
    return calls


def opened(metadata, digest=b"one"):
    """Open a GGUF file's tokenizer and make its encoders."""
    tokenizer = gguf_tokenizer(metadata, lambda: metadata, digest)
    tokenizer.warm_up()
    return tokenizer


def answers(tokenizer):
    """All that a tokenizer says of some texts, and what it is."""
    return (
        [
            tokenizer.encode(text, specials, bos).tolist()
            for text in TEXTS
            for specials in (False, True)
            for bos in (False, True)
        ],
        [tokenizer.encode_within(text) for text in TEXTS],
        [tokenizer.least_tokens(text * 50) for text in TEXTS],
        [*tokenizer.pieces],
        (tokenizer.added, tokenizer.ends, tokenizer.names, tokenizer.leading_spaces),
        tokenizer.control_within,
    )


@pytest.mark.parametrize("kind", METADATA)
def test_a_kept_tokenizer_is_the_same(kind, derived):
    metadata = METADATA[kind]
    first, kept = opened(metadata), opened(metadata)
    assert len(derived) == 1
    assert answers(kept) == answers(first) == answers(Tokenizer.from_gguf(metadata))


def test_a_kept_tokenizer_has_its_file(tmp_path, folder):
    first, kept = opened(METADATA["merges"]), opened(METADATA["merges"])
    first.save(tmp_path / "first.json"), kept.save(tmp_path / "kept.json")
    assert (tmp_path / "first.json").read_text() == (tmp_path / "kept.json").read_text()


def test_what_is_only_decoded_with_is_not_kept(derived, folder):
    """An engine behind a server makes no encoders, so it has no document to keep."""
    gguf_tokenizer(METADATA["merges"], lambda: METADATA["merges"], b"one")
    assert not folder.exists()


def test_another_file_is_another_tokenizer(derived, folder):
    for digest in (b"one", b"two", b"one"):
        opened(METADATA["merges"], digest)
    assert len(derived) == 2 == len([*folder.iterdir()])


def test_another_code_derives_again(derived, monkeypatch):
    opened(METADATA["merges"])
    monkeypatch.setattr(stored_tokenizer, "_code", lambda: b"another")
    opened(METADATA["merges"])
    assert len(derived) == 2


def test_of_a_folder_all_that_it_says_counts(tmp_path, derived):
    file = tmp_path / "tokenizer.json"
    opened(METADATA["merges"]).save(file)
    ways = [
        ((0,), None, {}, 10_000),
        ((1,), None, {}, 10_000),
        ((0,), 1, {}, 10_000),
        ((0,), None, {"bos_token": None}, 10_000),
        ((0,), None, {}, 9_999),
    ]
    before = len(derived)
    for _ in range(2):
        for way in ways:
            kept = file_tokenizer(file, *way)
            kept.warm_up()
            assert answers(kept) == answers(Tokenizer.from_file(file, *way))
    assert len(derived) - before == len(ways) + 2 * len(ways)
    file.write_text(json.dumps(json.loads(file.read_text())))
    file_tokenizer(file, *ways[0])
    assert len(derived) - before == 3 * len(ways) + 1
    with pytest.raises(ModelError, match="cannot read the tokenizer"):
        file_tokenizer(tmp_path / "none.json", *ways[0])


@pytest.mark.parametrize(
    ("names", "added"),
    [
        ({"pad_token": "\ud800"}, {}),
        ({}, {"more": "\ud800"}),
        ({}, {"more": 1 << 70}),
        ({}, {"content": "<\ud800>", "special": True}),
    ],
)
def test_what_cannot_be_written_down_is_served_all_the_same(tmp_path, folder, names, added):
    file = tmp_path / "tokenizer.json"
    Tokenizer.from_gguf(METADATA["scores"]).save(file)
    spec = json.loads(file.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    spec["added_tokens"].append({"id": 3, "content": "<x>"} | flags | added)
    file.write_text(json.dumps(spec))
    way = (file, (0,), None, names, 10_000)
    for _ in range(2):
        tokenizer = file_tokenizer(*way)
        tokenizer.warm_up()
        assert answers(tokenizer) == answers(Tokenizer.from_file(*way))
    assert not folder.exists()


def damaged(content, how):
    body = content[len(VERSION) + 32 :]
    if how == "cut":
        return content[:-8]
    if how == "longer":
        return content + body[:8]
    if how == "a bit":
        return content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]
    if how == "another version":
        return content.replace(b"tokenizer 1", b"tokenizer 0")
    if how == "empty":
        return b""
    other = b"\x93\x01\x02\x03"  # Whole, by its checksum, but of another form.
    return VERSION + sha256(other).digest() + other


HOW = ("cut", "longer", "a bit", "another version", "empty", "another form")


@pytest.mark.parametrize("how", HOW)
def test_a_damaged_file_is_a_miss_and_written_anew(derived, folder, how):
    expected = answers(opened(METADATA["merges"]))
    (file,) = folder.iterdir()
    file.write_bytes(damaged(file.read_bytes(), how))
    assert answers(opened(METADATA["merges"])) == expected
    assert answers(opened(METADATA["merges"])) == expected
    assert len(derived) == 2


def test_what_cannot_be_written_is_derived_each_time(derived, folder):
    folder.write_text("a file where the folder should be")
    opened(METADATA["merges"]), opened(METADATA["merges"])
    assert len(derived) == 2


def test_few_files_are_kept(folder, monkeypatch):
    monkeypatch.setattr(stored_tokenizer, "FILES", 2)
    for last in range(4):
        opened(METADATA["merges"], bytes([last]))
    assert len([*folder.iterdir()]) == 2


def test_a_small_vocabulary_leaves_no_file(folder, monkeypatch):
    monkeypatch.setattr(stored_tokenizer, "LEAST", 1 << 14)
    opened(METADATA["merges"])
    assert not folder.exists()
