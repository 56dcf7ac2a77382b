"""llama.cpp's grammar language: what its own grammars need, and errors with a line."""

import pytest

from forerun.constrain.grammar import Grammar
from forerun.errors import RequestError
from tests.constrain.tools import compiled, fits

ARITHMETIC = r"""root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""

TAKEN = [
    (ARITHMETIC, ["1+2= 3\n", "a +b*(c)=d\n1=2 \n"], ["1+2", "1=2"]),
    (r'root ::= "\u00e9" "\x41" "\"\\"', ['éA"\\'], ["e"]),
    ('root ::= ("a"?){3}', ["", "a", "aaa"], ["aaaa"]),
    ('root ::= Foo foo\nFoo ::= "a"\nfoo ::= "b"', ["ab"], ["aa", "ba"]),
    ('root ::= start "b"\nstart ::= "a"', ["ab"], ["b"]),
    ('root ::= (\n  "a" | # one\n  "b"\n)+\n', ["ab"], ["", "c"]),
    (r"root ::= [^a-c\]-] . [\x41-\u0043]", ["d\nA", "éxB"], ["axA", "]xA", "-xA", "dxD"]),
    ('root ::= "a" root | ""', ["", "aaa"], ["b"]),
    ('root ::= [0-9]{,2} "x"{ , 1 }', ["", "1", "12", "12x", "x"], ["123", "xx"]),
    ('root ::= a # b ## c\n# ==== a ====\na ::= "x" #' + "#" * 80, ["x"], ["xx"]),
    ('root ::= [0-9]{2,} "x"{1}', ["12x", "1234x"], ["1x", "12xx"]),
]


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@pytest.mark.parametrize(("source", "valid", "invalid"), TAKEN, ids=lambda value: str(value)[:30])
def test_what_it_means(source, valid, invalid, kind):
    grammar = Grammar.grammar(source)
    for text in valid:
        assert fits(grammar, text, kind), text
    for text in invalid:
        assert not fits(grammar, text, kind), text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('root ::= "a" root', "root never ends"),
        ('root ::= a\na ::= "x" b\nb ::= a', "root never ends"),
        ('root ::= ( "a"', "Expected ')' at line 1"),
        ('root ::= "a"\n  b', 'unknown rule "b" in "root"'),
        ('other ::= "a"', "no rule named root"),
        ('root ::= "a', "Expected '\"' at line 1"),
        (r'root ::= "\q"', r"Unknown escape \q at line 1"),
        ("root ::= []", "empty character class"),
        ('root ::= "a"{}', "Expected a number between { and } at line 1"),
        ('root ::= "a"{,}', "Expected a number between { and } at line 1"),
    ],
)
def test_errors_say_where(source, message):
    with pytest.raises(RequestError) as error:
        compiled(Grammar.grammar(source))
    assert message in str(error.value)
