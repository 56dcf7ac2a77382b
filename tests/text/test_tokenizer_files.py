"""What a tokenizer.json says is honoured or refused, and nothing in it ends the process."""

import base64
import json

import pytest
import tokenizers

from forerun.errors import ModelError
from forerun.text.tokenizer import Tokenizer
from tests.text.test_tokenizer import small_spec

TRUNCATION = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    **{"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None},
    **{"pad_id": 0, "pad_type_id": 0, "pad_token": "a"},
}


def opened(tmp_path, **parts) -> Tokenizer:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(small_spec(**parts)))
    return Tokenizer.from_file(path)


@pytest.mark.parametrize(
    "part",
    [
        {"truncation": TRUNCATION},
        {"truncation": TRUNCATION | {"max_length": 0}},
        {"padding": PADDING},
        {"padding": PADDING | {"strategy": {"Fixed": 1 << 31}}},
        {"padding": PADDING | {"strategy": "BatchLongest", "pad_to_multiple_of": 64}},
        {"model": {"dropout": 0.9, "merges": [["a", "b"]]}},
    ],
)
def test_what_belongs_to_training_changes_no_prompt(tmp_path, part):
    """Files from calibration have both: 513 tokens were cut to 64 with status 200."""
    plain = {name: value for name, value in part.items() if name == "model"}
    if plain:
        plain["model"] = {**plain["model"], "dropout": None}
        vocab = small_spec()["model"]["vocab"]
        part["model"]["vocab"] = plain["model"]["vocab"] = vocab | {"ab": len(vocab)}
    expected = opened(tmp_path, **plain)
    ours = opened(tmp_path, **part)
    for text in ("", "ab", "abab" * 100):
        for begun in (False, True):
            assert ours.encode(text, bos=begun).tolist() == expected.encode(text).tolist()
    assert ours.least_tokens("ab" * 100) == expected.least_tokens("ab" * 100) > 0


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"limiter": {"type": "Half"}}, "limiter"),
        ({"model": {"end_of_word_suffix": "</w>"}}, "model.end_of_word_suffix"),
        ({"model": {"continuing_subword_prefix": "##"}}, "model.continuing_subword_prefix"),
        ({"model": {"vibration": 3}}, "model.vibration"),
    ],
)
def test_what_is_not_known_is_refused_by_name(tmp_path, part, named):
    with pytest.raises(ModelError, match=f"the tokenizer's {named} is not supported"):
        opened(tmp_path, **part)


@pytest.mark.parametrize("added", [[None], [{}], [7], "text", 7, {"a": None}, [{"id": "x"}], [[]]])
@pytest.mark.parametrize("most", [None, 3])
def test_parts_of_another_type_are_one_sentence(tmp_path, added, most):
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(small_spec(added_tokens=added)))
    with pytest.raises(ModelError, match="the tokenizer cannot be built"):
        Tokenizer.from_file(path, vocab=most)
    path.write_text(json.dumps(small_spec(model={"vocab": added})))
    with pytest.raises(ModelError, match="the tokenizer cannot be built"):
        Tokenizer.from_file(path, vocab=most)


def test_what_says_nothing_is_no_hindrance(tmp_path):
    parts = {"version": "2.0", "truncation": None, "comment": None}
    model = {"end_of_word_suffix": "", "continuing_subword_prefix": None, "vibration": False}
    assert len(opened(tmp_path, **parts, model=model).encode("ab")) == 2


def charsmap(table: dict[str, str], leads_to: int | None = None) -> str:
    """A table as SentencePiece writes it, each node in a block of its own.

    leads_to  where the units below the first node of each text lie, instead of its block
    """
    units = [0] * 256
    units[0] = 256 << 10
    replacements, nodes = b"", {b"": 256}
    units += [0] * 256
    for text, replaced in table.items():
        data = text.encode()
        for end in range(1, len(data) + 1):
            if data[:end] not in nodes:
                base = nodes[data[:end]] = len(units)
                units += [0] * 256
                place = nodes[data[: end - 1]] ^ data[end - 1]
                below = base if leads_to is None else leads_to
                units[place] = (place ^ below) << 10 | data[end - 1]
        last = nodes[data[:-1]] ^ data[-1]
        units[last] |= 1 << 8
        units[nodes[data]] = 1 << 31 | len(replacements)
        replacements += replaced.encode() + b"\0"
    trie = b"".join(unit.to_bytes(4, "little") for unit in units)
    return base64.b64encode(len(trie).to_bytes(4, "little") + trie + replacements).decode()


def precompiled(table: str) -> dict:
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": table}}


def test_a_normalisation_table_is_obeyed(tmp_path):
    table = charsmap({"\ufb01": "fi", "\u2460": "1", "\uff21": "A"})
    theirs = tokenizers.normalizers.Precompiled(base64.b64decode(table))
    text = "ef\ufb01cient \u2460\uff21\u2461"
    assert theirs.normalize_str(text) == "efficient 1A\u2461"
    tokenizer = opened(tmp_path, **precompiled(table))
    spelled = tokenizer.decode(tokenizer.encode(text))
    assert spelled == tokenizer.decode(tokenizer.encode(theirs.normalize_str(text)))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (base64.b64encode(b"\1\2\3" * 7).decode(), "damaged"),
        ("", "damaged"),
        ("no base64", "damaged"),
        (base64.b64encode(b"\x08\0\0\0" + b"\xff" * 8 + b"abc\0").decode(), "damaged"),
        (charsmap({"\ufb01": "fi"}, leads_to=1 << 20), "damaged"),
        (charsmap({"\ufb01": "fi" * 100}), "damaged"),
        (None, "is no text"),
        (7, "is no text"),
    ],
)
def test_a_junk_normalisation_table_is_one_sentence(tmp_path, table, message):
    with pytest.raises(ModelError, match=f"precompiled_charsmap.* {message}"):
        opened(tmp_path, **precompiled(table))


def test_a_panic_of_the_library_is_one_sentence(tmp_path, monkeypatch):
    class PanicException(BaseException):
        pass

    def panics(text):
        raise PanicException("index out of bounds")

    monkeypatch.setattr("tokenizers.Tokenizer.from_str", panics, raising=False)
    with pytest.raises(ModelError, match="cannot be built: index out of bounds"):
        opened(tmp_path)


def template(*ids: int) -> dict:
    before = {"SpecialToken": {"id": "a", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [before, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [before, {"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"a": {"id": "a", "ids": list(ids), "tokens": ["a"] * len(ids)}},
    }


SEQUENCE = {"Sequence": {"id": "A", "type_id": 0}}


def single(*parts):
    """A template of named special tokens around `SEQUENCE`."""
    ids = {"bos": 3, "eos": 4, "two": [5, 6]}
    tokens = {
        name: {"id": name, "ids": [id] if isinstance(id, int) else id, "tokens": ["a"]}
        for name, id in ids.items()
    }
    tokens["two"]["tokens"] = ["a", "b"]
    pieces = [
        part if isinstance(part, dict) else {"SpecialToken": {"id": part, "type_id": 0}}
        for part in parts
    ]
    return {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": [SEQUENCE, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": tokens,
    }


@pytest.mark.parametrize(
    ("processor", "before", "behind"),
    [
        (single("bos", SEQUENCE), [3], []),
        (single("bos", SEQUENCE, "eos"), [3], [4]),
        (single(SEQUENCE, "eos"), [], [4]),
        (single("two", "eos", SEQUENCE), [5, 6, 4], []),
        (single("eos", SEQUENCE), [4], []),
        ({"type": "Sequence", "processors": [single("bos", SEQUENCE, "eos")]}, [3], [4]),
        (
            {"type": "RobertaProcessing", "cls": ["a", 3], "sep": ["b", 4]}
            | {"trim_offsets": True, "add_prefix_space": False},
            [3],
            [4],
        ),
        ({"type": "BertProcessing", "cls": ["a", 3], "sep": ["b", 4]}, [3], [4]),
        (None, [], []),
    ],
)
def test_what_stands_before_a_text_is_kept_and_what_stands_behind_it_is_not(
    tmp_path, processor, before, behind
):
    """A prompt that ends with the end of text would be no beginning of an answer."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(small_spec(post_processor=processor, version="1.0")))
    ours, theirs = Tokenizer.from_file(path, (4,)), tokenizers.Tokenizer.from_file(str(path))
    text = ours.encode("xy").tolist()
    assert theirs.encode("xy").ids == [*before, *text, *behind]
    assert ours.encode("xy", bos=True).tolist() == [*before, *text]
    assert ours.suffix == tuple(behind)  # Embeddings are made with it.


def test_few_tokens_may_stand_around_a_text(tmp_path):
    level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False}
    within = {"type": "Sequence", "processors": [level, template(3, 4)]}
    ours = opened(tmp_path, post_processor=within)
    assert ours.encode("", bos=True).tolist() == [3, 4]
    for many in (
        template(*[0] * 100_000),
        {"type": "Sequence", "processors": [template(*[0] * 99)]},
    ):
        with pytest.raises(ModelError, match=r"puts \d+ tokens around a text; at most 16"):
            opened(tmp_path, post_processor=many)
