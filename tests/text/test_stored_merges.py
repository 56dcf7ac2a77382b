"""Merges of a large vocabulary are derived once; whatever is wrong with what was kept, they are
derived again.
"""

import pytest

from forerun.text import gguf, stored_merges
from forerun.text.stored_merges import VERSION
from tests.text.test_tokenizer import sentence_piece_metadata

MADE = sentence_piece_metadata()
VOCABULARY = tuple(MADE[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "scores"))


@pytest.fixture
def derived(tmp_path, monkeypatch):
    """Merges of the small vocabulary, and how often they were derived."""
    monkeypatch.setattr(stored_merges, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(stored_merges, "LEAST", 4)
    calls = []

    def ask(tokens=VOCABULARY[0], types=VOCABULARY[1], scores=VOCABULARY[2]):
        def derive(*vocabulary):
            calls.append(1)
            return gguf.derived_merges(*vocabulary)

        return stored_merges.stored_merges(tokens, types, scores, derive), len(calls)

    return ask


def test_the_second_start_derives_nothing(derived, tmp_path):
    expected = gguf.derived_merges(*VOCABULARY)
    assert derived() == (expected, 1) and derived() == (expected, 1)
    (file,) = (tmp_path / "tokenizers").iterdir()
    assert file.stat().st_size == len(VERSION) + 32 + 8 * len(expected)


def test_another_vocabulary_has_another_file(derived):
    tokens, types, scores = VOCABULARY
    assert [derived()[1], derived(scores=[*scores[:-1], 7.5])[1]] == [1, 2]
    assert derived(types=[*types[:-1], gguf.UNUSED])[1] == 3
    joined = [*tokens[:-2], tokens[-2] + tokens[-1], ""]  # The same letters, cut otherwise.
    assert derived(tokens=joined)[1] == 4 and derived()[1] == 4


def damaged(content, how):
    body = content[len(VERSION) + 32 :]
    if how == "cut":
        return content[:-8]
    if how == "longer":
        return content + body[:8]
    if how == "a bit":
        return content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]
    if how == "another version":
        return content.replace(b"merges 1", b"merges 0")
    if how == "empty":
        return b""
    # Whole, by its checksum, but not of this vocabulary.
    other = b"\xff" * 8 + body[8:]
    return VERSION + stored_merges.sha256(other).digest() + other


@pytest.mark.parametrize(
    "how",
    [
        *("cut", "longer", "a bit", "another version", "empty"),
        "ids that are not there",
    ],
)
def test_a_damaged_file_is_a_miss_and_written_anew(derived, tmp_path, how):
    expected, _ = derived()
    (file,) = (tmp_path / "tokenizers").iterdir()
    file.write_bytes(damaged(file.read_bytes(), how))
    assert derived() == (expected, 2) and derived() == (expected, 2)


def test_what_cannot_be_written_is_derived_each_time(derived, tmp_path):
    (tmp_path / "tokenizers").write_text("a file where the folder should be")
    expected = gguf.derived_merges(*VOCABULARY)
    assert derived() == (expected, 1) and derived() == (expected, 2)


def test_few_files_are_kept(derived, tmp_path, monkeypatch):
    monkeypatch.setattr(stored_merges, "FILES", 2)
    for last in range(4):
        derived(scores=[*VOCABULARY[2][:-1], float(last)])
    assert len([*(tmp_path / "tokenizers").iterdir()]) == 2


def test_a_small_vocabulary_leaves_no_file(derived, tmp_path, monkeypatch):
    monkeypatch.setattr(stored_merges, "LEAST", 1 << 16)
    assert derived()[1] == 1 and not [*tmp_path.iterdir()]
