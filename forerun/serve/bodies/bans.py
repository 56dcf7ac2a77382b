"""vLLM's bad_words and allowed_token_ids: constraints that hold from the first token on, also
while a model reasons.
"""

from collections.abc import Sequence

from forerun.constrain.grammar import Grammar
from forerun.constrain.grammar.calls import Rules, without
from forerun.errors import RequestError
from forerun.serve.bodies.schema import NEVER, SampledBody
from forerun.text.tokenizer import Tokenizer


def token_rules(body: SampledBody, tokenizer: Tokenizer) -> Rules | None:
    """Return the rules that bad_words or allowed_token_ids impose; None without either.

    Raises RequestError if there is another constraint too, or an id that does not exist.
    """
    names = [name for name in ("bad_words", "allowed_token_ids") if getattr(body, name)]
    if not names:
        return None
    name = names[-1]
    other = names[0] if len(names) > 1 else "tools" if getattr(body, "tools", ()) else ""
    other = body.rules.grammar.field if body.rules is not None else other
    if other:
        raise RequestError(
            f"{name} and {other} cannot be honoured at once: an answer has one constraint.", name
        )
    if name == "bad_words":
        return _words(body.bad_words, tokenizer)
    return _tokens(body.allowed_token_ids, tokenizer.vocab_size)


def never(body: SampledBody, tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
    """Return the biases beside allowed_token_ids, after which a grammar lets every end of the text
    follow: those that are not listed are impossible.
    """
    allowed = body.allowed_token_ids
    return tuple((id, NEVER) for id in tokenizer.eos_ids if id not in allowed) if allowed else ()


def _words(words: Sequence[str], tokenizer: Tokenizer) -> Rules:
    """Make the rules of texts and control tokens, of which no text contains a word."""
    special = sorted(tokenizer.control_within.values())
    between = f"(<[{','.join(map(str, special))}]> TEXT)*" if special else ""
    source = f"start: TEXT {between}\nTEXT: {without(words)}"
    return Rules(Grammar.grammar(source, "bad_words"))


def _tokens(ids: Sequence[int], vocab: int) -> Rules:
    wrong = [id for id in ids if id >= vocab]
    if wrong:
        message = f"allowed_token_ids has the token id {wrong[0]}, but ids are 0 to {vocab - 1}."
        raise RequestError(message, "allowed_token_ids")
    source = f"start: (<[{','.join(map(str, sorted(set(ids))))}]>)*"
    return Rules(Grammar.grammar(source, "allowed_token_ids"))
