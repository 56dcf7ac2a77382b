"""A constraint that begins after a text, over tokens that begin before its end and go on behind.

The reference is the text itself: what stands behind the first marker must begin a text of the
grammar, whichever tokens it is written with.
"""

from dataclasses import replace

import numpy as np
import pytest

from forerun.constrain.grammar import Grammar, Start
from forerun.constrain.isolation.compile import Compiler
from forerun.constrain.matcher.matcher import Matcher
from forerun.constrain.matcher.start_marker import MarkerTokens, StartMarker
from forerun.constrain.matcher.tree_mask import TreeGrammars
from forerun.engine.request import Finish
from forerun.interface.grammars import Committed
from forerun.speculative.tree import Draft
from forerun.text.pieces import Pieces
from forerun.text.reasoning import Marks, ReasoningReader, Stage
from forerun.text.tokenizer import AddedToken, TextEnds, Tokenizer
from tests.constrain.test_lossless import completion_of, engine
from tests.constrain.tools import members
from tests.engine.toys import ask, run

MARK = "</t>"
SPANNING = (
    *("<", "/t", ">", ">P", ">Am", "</t", "x</", "t>", "t>Par", MARK),
    *("</t>A", "</t>x", "h<</t>P", "</t>\n", "</t></t>", ">ster"),
)
"""What the toy's favourite ids, the letters a to p, stand for here: pieces of the marker."""
LETTERS = "abcdefghijklmnop"
MORE = ("Am", "Par", "aris", "ster", "m<", "<", "</")
WORDS = ("Paris", "Amsterdam", "Adam")
CITY = Grammar.regex("(Paris|Amsterdam|Adam)")


def spanning() -> Tokenizer:
    """259 ids as the byte level's, but for LETTERS, which stand behind them."""
    plain = Tokenizer.byte_level()
    table = list(plain.pieces)
    for letter, text in zip(LETTERS, SPANNING, strict=True):
        table[ord(letter)] = text.encode()
    own = [*(letter.encode() for letter in LETTERS), *(text.encode() for text in MORE)]
    ids = {letter: len(table) + index for index, letter in enumerate(LETTERS)}

    def encode(text: str, first: bool) -> list[int]:
        return [ids.get(chr(byte), byte) for byte in text.encode()]

    added = [AddedToken(id, plain.pieces[id].decode(), True) for id in (256, 257, 258)]
    return Tokenizer(encode, Pieces((*table, *own), 0), added, TextEnds((257, 258)))


SPANS = spanning()
COMPILER = Compiler(SPANS)
VOCAB = SPANS.vocab_size + 5


def compiled(control: bool = False, grammar=CITY):
    return COMPILER.compile(grammar.after(Start(MARK, control)))


def text_of(path, control: bool = False) -> str:
    return SPANS.decode(path, skip_special=not control)


def legal(path, control: bool = False) -> bool:
    """The rule, by the text alone."""
    _, mark, tail = text_of(path, control).partition(MARK)
    if not mark:
        return not set(path) & set(SPANS.eos_ids)
    if set(path) & set(SPANS.eos_ids):
        return False
    return any(word.startswith(tail) for word in WORDS)


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize("before", ["", "h", "</", "<<", "</t", "x</t", "</</t", "<"])
def test_what_may_follow_is_what_the_text_says(before, control):
    output = SPANS.encode_part(before, True)
    matcher = Matcher(compiled(control))
    assert all(matcher.commit(token) for token in output) and matcher.waiting
    mask = matcher.mask()
    allowed = set(range(VOCAB)) if mask is None else set(members(mask))
    for token in range(SPANS.vocab_size):
        wanted = legal([*output, token], control)
        assert (token in allowed) == wanted, text_of([token])
        assert matcher.advance(token) == wanted or token in SPANS.eos_ids
        if wanted:
            matcher.back(1)
    assert {ord("d"), ord("i")} & allowed, "some token goes on behind the marker"


def test_control_tokens_change_nothing_unless_they_leave_text():
    output = [*SPANS.encode_part("</", True), 256, *SPANS.encode_part("t>", False)]
    for control in (False, True):
        matcher = Matcher(compiled(control))
        assert all(matcher.commit(token) for token in output)
        assert matcher.waiting == control


def test_commits_stop_where_the_rest_of_a_token_does_not_fit():
    grammars = TreeGrammars(VOCAB)
    grammars.open(0, compiled(), [])
    wrong = [ord("a"), ord("b"), ord("p")]  # "<", "/t", ">ster"
    assert grammars.commit(0, wrong) == Committed(2, error=f"token {ord('p')} does not fit")
    assert grammars.commit(0, [ord("d")]) == Committed(1)  # ">P"
    assert grammars.filter_and_extend_drafts(*one(Draft(), 8))[
        0
    ].tokens.tolist() == SPANS.encode_within("aris")


def one(draft: Draft, nodes: int):
    numbers = [np.array([n], np.int32) for n in (0, nodes, nodes)]
    return numbers[0], [draft], *numbers[1:]


def split(text: str) -> tuple[str, str]:
    reader = ReasoningReader(Marks(MARK.replace("/", ""), MARK), Stage.THINKING)
    reasoning, content = reader.push(text)
    rest = reader.finish()
    return reasoning + rest[0], content + rest[1]


@pytest.mark.parametrize(
    "grammar",
    [pytest.param(CITY, marks=pytest.mark.slow), Grammar.regex("(Paris|A[a-z<>/ ]{9})")],
    ids=str,
)
def test_reader_and_constraint_agree_with_any_drafter_wherever_it_is_followed(grammar):
    """The same text with speculation on and off; what the reader calls the answer is of the
    grammar as a whole.
    """

    def request(seed, expensive=False):
        made = compiled(grammar=grammar)
        known = replace(made.translated, expensive=expensive)
        return ask(
            str(seed),
            SPANS.encode(f"city {seed}: "),
            60,
            stop_tokens=SPANS.eos_ids,
            grammar=replace(made, translated=known),
            temperature=4.0,
            seed=seed,
        )

    def answers(name, seeds, **options):
        sink = run(engine(name, "", tokenizer=SPANS), *(request(s, **options) for s in seeds))
        return [completion_of(sink, str(seed)) for seed in seeds]

    seeds = range(16)
    plain = answers("none", seeds)
    for name in ("random", "ngram", "grammar"):
        assert answers(name, seeds) == plain
    assert answers("random", range(4), expensive=True) == plain[:4]
    ended, straddled = 0, 0
    for tokens, text, finish in plain:
        thought, content = split(text)
        assert MARK not in thought
        if finish == Finish.STOP:
            ended += 1
            matcher = Matcher(COMPILER.compile(grammar))
            assert all(map(matcher.advance, SPANS.encode_part(content, True))), content
            straddled += not any(text_of(tokens[:n]).endswith(MARK) for n in range(len(tokens)))
    assert ended > 8 and straddled > 1


def test_what_no_token_says_alone_does_not_follow():
    """The marker can always be ended by a token that ends with it."""
    marker = MarkerTokens(Start(">"), SPANS)
    assert marker.spelling(b"Am") is not None and marker.spelling(b"ster") is not None
    assert marker.spelling(b"</t>") == ord("j") and marker.spelling(b"qqq") is None
    place = StartMarker(marker, SPANS.eos_ids, SPANS.vocab_size)
    assert place.take(ord("a")) == () and place.waiting
    assert place.take(ord("e")) == (SPANS.pieces.index(b"Am"),) and not place.waiting
    assert place.take(65) == (65,)
