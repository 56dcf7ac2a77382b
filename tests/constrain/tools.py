"""Grammars, compilers and drafters for the tests of structured output."""

import json
from functools import cache
from random import Random

import numpy as np

from forerun.constrain.grammar import Grammar
from forerun.constrain.isolation.compile import Compiler
from forerun.constrain.matcher.matcher import CompiledGrammar, Matcher
from forerun.drafters.none import NoDrafter
from forerun.interface.drafter import DrafterTraits
from forerun.speculative.tree import Draft
from forerun.text.tokenizer import Tokenizer
from tests.text.test_tokenizer import byte_level, gguf_metadata

BYTES = Tokenizer.byte_level()
BPE = byte_level("smollm")
PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["human", "hobbit"]},
    },
    "required": ["first_name", "age", "kind"],
    "additionalProperties": False,
}


SPANNING = [
    *('":', '": "', '": 1', '":"', '":1', '": [', '": {', '":["', '":{"', '":true', '"}', '"},'),
    *('", "', '","', '{"', ', "', ',"', '["', '"]', '"],', '1,', '1}', '1]', '}}', ']}', ': '),
    *(':"', 'name', 'age', '"name', '"age', '"name"', '"age"', 'kind', 'true', 'false', 'null'),
]  # fmt: skip
"""Texts of tokens that reach over several marks of JSON, as those of real vocabularies do."""


def spanning() -> Tokenizer:
    """A byte-level vocabulary with tokens for SPANNING that no merge leads to."""
    metadata = gguf_metadata("smollm")
    known = metadata["tokenizer.ggml.tokens"]
    more = [text.replace(" ", "\u0120") for text in SPANNING]
    more = [token for token in more if token not in known]
    types = [*metadata["tokenizer.ggml.token_type"], *(1 for _ in more)]
    added = {"tokenizer.ggml.tokens": [*known, *more], "tokenizer.ggml.token_type": types}
    return Tokenizer.from_gguf(metadata | added)


TOKENIZERS = {"bytes": BYTES, "bpe": BPE, "spanning": spanning()}


@cache
def compiler(name: str) -> Compiler:
    return Compiler(TOKENIZERS[name])


def compiled(grammar: Grammar, name: str = "bytes") -> CompiledGrammar:
    return compiler(name).compile(grammar)


def fits(grammar: Grammar, text: str, name: str = "bytes") -> bool:
    """Whether the grammar takes exactly this text."""
    matcher = Matcher(compiled(grammar, name))
    tokenizer = TOKENIZERS[name]
    if not all(matcher.advance(token) for token in tokenizer.encode(text).tolist()):
        return False
    return allowed(matcher.mask(), tokenizer.eos_ids[0])


def allowed(mask: bytes, token: int) -> bool:
    return bool(mask[token // 8] >> token % 8 & 1)


def members(mask: bytes) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()


def is_person(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["first_name", "age", "kind"]
        and len(value["first_name"]) <= 6
        and 0 <= value["age"] <= 150
        and value["kind"] in ("human", "hobbit")
    )


class RandomDrafter(NoDrafter):
    """Random trees; `tokens` says what they are made of (all of it illegal, perhaps)."""

    def __init__(self, tokens, seed: int = 0) -> None:
        self.traits = DrafterTraits(name="random", max_depth=64)
        self._tokens = list(tokens)
        self._random = Random(seed)

    def propose(self, plan) -> list[Draft]:
        sizes = zip(plan.max_nodes.tolist(), plan.max_depth.tolist(), strict=True)
        return [random_draft(self._random, self._tokens, *size) for size in sizes]


def random_draft(random: Random, tokens: list[int], nodes: int, depth: int) -> Draft:
    """No two children of a node alike, no node deeper than `depth`."""
    out: list[tuple[int, int, int]] = []
    taken = set()
    for _ in range(nodes):
        spots = [(-1, 0), *((i, level) for i, (_, _, level) in enumerate(out) if level < depth)]
        parent, level = random.choice(spots)
        token = random.choice(tokens)
        if depth and (parent, token) not in taken:
            taken.add((parent, token))
            out.append((token, parent, level + 1))
    score = np.sort(np.array([random.random() for _ in out], np.float32))[::-1].copy()
    return Draft(
        np.array([token for token, _, _ in out], np.int32),
        np.array([parent for _, parent, _ in out], np.int32),
        score,
    )
