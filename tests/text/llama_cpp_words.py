"""Write what llama.cpp itself makes of texts, for tests/text: words and ids.

    python -m tests.text.llama_cpp_words LLAMA_CPP_PYTHON_SOURCE LIBRARY_FOLDER

llama_cpp_words.json: how texts are cut, by pre-tokenizer. For each text a vocabulary is made in
which every piece of it is a token and any two neighbouring tokens merge, so that what llama.cpp
answers are its words. llama_cpp_ids.json: ids of a SentencePiece vocabulary, control strings
included. The source is an unpacked `llama_cpp_python`; the folder holds its `libllama.so`.
"""

import argparse
import ctypes
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import gguf

from bench.records import ended
from forerun.text.pieces import byte_alphabet
from forerun.text.pre_tokenizers import PRE_TOKENIZERS
from tests.text.corpus import AROUND_CONTROLS, sentence_piece_vocabulary
from tests.text.corpus import TEXTS as MIXED

OUT = Path(__file__).parent
TEXTS = (
    "It's WE'LL they'Ve x'\u017f",
    "1234567 a12b 3.14",
    "CamelCase HTTPServer iPhone",
    "a  b   \n\n  c \t d",
    "x;\n\ny!!/\n z",
    "\u65e5\u672c\u8a9e\u304b\u306aA\u6587 \ud55c\uae00",
    "e\u0301a n\u0303\u0915\u094d\u0937",
    "$x=a_b^2;[y]~|`z",
    "\u00e9t\u00e9 \u0434\u0430 \u0645\u0627 \u0e44\u0e17",
    "(a,b).c?d! \u3002\u3001\u2026",
    "\u201chi\u201d\uff0c\uff01\u2014 \u2019s",
    "#tag @me /usr .net",
    "\u01c5abc \u00aa\u02b0 \u00bd\u2167",
    "it's\r\n\r\n  1 22 333",
    "a b c d  ",
    "don'table'sx",
    "a       b",
    "\u01bb\u01c0x \u3105\u3106 \u1e9e",
)


def main() -> None:
    """Ask llama.cpp and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("library", type=Path)
    args = parser.parse_args()
    os.environ["LLAMA_CPP_LIB_PATH"] = str(args.library)
    sys.path.insert(0, str(args.source))
    found = importlib.util.find_spec("llama_cpp")
    assert found is not None, f"{args.source} holds no llama_cpp"
    package = ModuleType("llama_cpp")
    package.__path__ = list(found.submodule_search_locations or [])
    sys.modules["llama_cpp"] = package
    binding = importlib.import_module("llama_cpp.llama_cpp")
    groups: dict[str, dict[str, list[Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        for name in sorted(PRE_TOKENIZERS):
            words = [words_of(binding, path, name, text) for text in TEXTS]
            groups.setdefault(json.dumps(words), {"names": [], "words": words})["names"].append(
                name
            )
        pieces = [of_pieces(binding, path, spaced) for spaced in (True, False)]
    for name, rows in (("words", groups.values()), ("ids", pieces)):
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        (OUT / f"llama_cpp_{name}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def words_of(binding: ModuleType, path: Path, name: str, text: str) -> list[str]:
    """The words of `text`."""
    tokens = write(path, name, text)
    back = {letter: value for value, letter in byte_alphabet().items()}
    (ids,) = ids_of(binding, path, [(text, False)])
    return [bytes(back[letter] for letter in tokens[id]).decode() for id in ids]


def of_pieces(binding: ModuleType, path: Path, spaced: bool) -> dict[str, object]:
    """Ids of a SentencePiece vocabulary, of texts and of texts with control strings."""
    tokens, scores, types = sentence_piece_vocabulary()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_add_space_prefix(spaced)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    finish(writer)
    texts = [(text, False) for text in MIXED] + [(text, True) for text in AROUND_CONTROLS]
    ids = ids_of(binding, path, texts)
    return {"spaced": spaced, "texts": ids[: len(MIXED)], "around": ids[len(MIXED) :]}


def ids_of(binding: ModuleType, path: Path, texts: list[tuple[str, bool]]) -> list[list[int]]:
    """Ids of each text; beside it whether control strings in it count."""
    params = binding.llama_model_default_params()
    params.vocab_only = True
    model = binding.llama_model_load_from_file(str(path).encode(), params)
    assert model, f"llama.cpp does not open {path}"
    vocab = binding.llama_model_get_vocab(model)
    result = []
    for text, specials in texts:
        raw, room = text.encode(), 4 * len(text) + 8
        ids = (ctypes.c_int32 * room)()
        count = binding.llama_tokenize(vocab, raw, len(raw), ids, room, False, specials)
        result.append(list(ids[:count]))
    binding.llama_model_free(model)
    return result


def write(path: Path, name: str, text: str) -> list[str]:
    """A vocabulary of all pieces of `text`, in which all neighbours merge."""
    letters = byte_alphabet()
    spelt = "".join(letters[value] for value in text.encode())
    length = range(len(spelt) + 1)
    pieces = {spelt[start:stop] for start in length for stop in length[start + 1 :]}
    tokens = [*letters.values(), *sorted(pieces - set(letters.values()))]
    merges = {
        f"{piece[:at]} {piece[at:]}": None
        for piece in sorted(pieces, key=len)
        for at in range(1, len(piece))
    }
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(list(merges))
    finish(writer)
    return tokens


def finish(writer: gguf.GGUFWriter) -> None:
    """Write the file."""
    writer.add_context_length(64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


if __name__ == "__main__":
    ended(main)
