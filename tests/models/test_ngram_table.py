"""n-gram tables: counted as said, stored and read back whole, and refused when damaged."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from forerun.drafts import ngram_counts as ngrams
from forerun.drafts.ngram_counts import count_ngrams, write_ngrams
from forerun.drafts.ngram_table import FILE, read_ngram_table
from forerun.errors import ModelError
from forerun.hub.catalog import shipped_draft

VOCAB = 5


def counted(chats, wanted=None):
    starts = np.append(0, np.cumsum([len(chat) for chat in chats])).astype(np.int64)
    tokens = np.array([token for chat in chats for token in chat], np.int64)
    mask = np.ones(len(tokens), np.bool_) if wanted is None else np.array(wanted, np.bool_)
    return count_ngrams(tokens, mask, starts, VOCAB)


def by_hand(chats, text):
    """The definition in one loop: what `follow` says, from the chats themselves."""
    result: dict[int, float] = {}
    for order, least in enumerate(ngrams.SEEN, 1):
        context = text[len(text) - order :] if order <= len(text) else None
        after = [
            (chat[i], chat[i - order - 1] if i > order else None)
            for chat in chats
            for i in range(order, len(chat))
            if list(chat[i - order : i]) == context
        ]
        if len(after) < least:
            break
        # What came after a shorter context counts once for each token that stood before that.
        came = [token for token, _ in (after if order == len(ngrams.SEEN) else set(after))]
        counts = Counter(came)
        discounts = {token: ngrams.DISCOUNTS[min(count, 3)] for token, count in counts.items()}
        total = len(came) + ngrams.CAUTION
        taken = sum(min(discounts[token], count) for token, count in counts.items())
        rest = (taken + ngrams.CAUTION) / total
        result = {token: chance * rest for token, chance in result.items()}
        shares = {
            token: max(count - discounts[token], 0) / total for token, count in counts.items()
        }
        best = sorted(shares, key=lambda token: (-shares[token], token))[: ngrams.FOLLOWERS]
        for token in best:
            if shares[token] >= ngrams.MIN_PROB:
                result[token] = result.get(token, 0.0) + shares[token]
    return result


CHATS = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=40), min_size=1, max_size=6)


@settings(max_examples=100)
@given(CHATS, st.lists(st.integers(0, VOCAB - 1), max_size=6))
def test_counts_are_what_the_definition_says(chats, text):
    actual, expected = counted(chats).follow(text), by_hand(chats, text)
    assert actual.keys() == expected.keys()
    for token, chance in actual.items():
        assert chance == pytest.approx(expected[token], abs=2e-3)
    assert sum(actual.values()) < 1


def test_only_answers_are_counted_but_questions_are_context():
    chats, wanted = [[1, 2, 3], [1, 2, 3], [3, 2, 4]], [0, 0, 1, 0, 0, 1, 0, 0, 0]
    table = counted(chats, wanted)
    assert table.follow([1, 2]).keys() == {3} and table.follow([1]) == {}
    assert table.follow([3, 2]) == table.follow([2])


@settings(max_examples=30)
@given(CHATS)
def test_a_table_comes_back_from_its_file(tmp_path_factory, chats):
    folder, table = tmp_path_factory.mktemp("table"), counted(chats)
    assert write_ngrams(table, folder) == bool(len(table.tokens))
    if len(table.tokens):
        back = read_ngram_table(folder / FILE, VOCAB)
        for name in ("extensions", "earlier", "rest", "predictions", "tokens", "shares"):
            assert np.array_equal(getattr(back, name), getattr(table, name)), name


def test_large_vocabularies_take_four_bytes(tmp_path):
    chat = [70_000, 1, 70_000, 1, 70_000, 1]
    tokens, starts = np.array(chat), np.array([0, len(chat)])
    table = count_ngrams(tokens, np.ones(len(chat), np.bool_), starts, 128_000)
    write_ngrams(table, tmp_path)
    assert 1 in read_ngram_table(tmp_path / FILE, 128_000).follow([70_000])


@pytest.fixture
def stored(tmp_path):
    write_ngrams(counted([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2]] * 3), tmp_path)
    return tmp_path / FILE


def test_another_vocabulary_is_refused(stored):
    with pytest.raises(ModelError, match="vocabulary of 5 tokens, the target has 7"):
        read_ngram_table(stored, 7)


def _changed(tensors, name, index, value):
    tensors[name] = tensors[name].copy()
    tensors[name][index] = value


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda t: t.pop("rest"), "missing or unexpected tensors: rest"),
        (lambda t: t.update(more=np.zeros(1, np.int32)), "missing or unexpected tensors: more"),
        (
            lambda t: t.update(rest=t["rest"][:-1]),
            "rest does not have one probability for every context",
        ),
        (lambda t: t.update(tokens=t["tokens"][:-1]), "not of one length"),
        (lambda t: t.update(earlier=t["earlier"][:-1]), "do not number the contexts"),
        (lambda t: t.update(tokens=t["tokens"].astype(np.float32)), "must be U16 or I32"),
        (lambda t: _changed(t, "extensions", 0, 60_000), "do not number the contexts"),
        (lambda t: _changed(t, "extensions", [0, 1], [0, 6]), "do not come after"),
        (lambda t: _changed(t, "earlier", 2, 0), "earlier does not ascend"),
        (lambda t: _changed(t, "earlier", 5, 9), "earlier holds ids outside 0..4"),
        (lambda t: _changed(t, "tokens", 0, 5), "tokens holds ids outside 0..4"),
        (lambda t: _changed(t, "predictions", 1, 4), "not of one length"),
        (lambda t: _changed(t, "shares", 0, np.nan), "shares are not probabilities"),
        (lambda t: _changed(t, "shares", 0, -0.5), "shares are not probabilities"),
        (lambda t: _changed(t, "rest", 1, np.inf), "rest does not have one probability"),
        (lambda t: _changed(t, "rest", 1, 1.0), "more than 1"),
    ],
)
def test_damage_is_named(stored, harm, message):
    tensors = dict(load_file(stored))
    harm(tensors)
    save_file(tensors, stored)
    with pytest.raises(ModelError, match=message):
        read_ngram_table(stored, VOCAB)


@pytest.mark.parametrize("answers", [True, False])
def test_a_file_says_whether_the_targets_own_answers_were_counted(tmp_path, answers):
    write_ngrams(replace(counted([[0, 1, 2, 0, 1, 2]] * 3), answers=answers), tmp_path)
    assert read_ngram_table(tmp_path / FILE, VOCAB).answers is answers
    assert ("answers" in load_file(tmp_path / FILE)) is not answers, "files of before have answers"


@settings(max_examples=200)
@given(st.data())
def test_damaged_bytes_are_refused_or_make_a_sound_table(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    table = counted([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2]] * 3)
    write_ngrams(table, folder)
    content = bytearray((folder / FILE).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (folder / FILE).write_bytes(content[: data.draw(st.integers(0, len(content)))] or b"\0")
    try:
        read = read_ngram_table(folder / FILE, VOCAB)
    except ModelError:
        return
    for token in range(VOCAB):
        assert all(0 <= chance <= 1.02 for chance in read.follow([0, 1, token]).values())


def test_the_default_model_comes_with_a_table():
    table = read_ngram_table(shipped_draft("smollm2-135m") / FILE, 49152)
    assert table.contexts > 50_000 and len(table.tokens) > 100_000
    assert replace(table).vocab == 49152
