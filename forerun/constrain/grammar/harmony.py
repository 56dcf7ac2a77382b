"""Grammars of answers in the Harmony format (text/harmony.py) with tool calls."""

from collections.abc import Callable, Sequence

from forerun.text.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START

Named = Callable[[str], str]


def harmony_lines(
    names: Sequence[str],
    mark: Named,
    literal: Named,
    text: str,
    answer: str | None,
    required: bool,
    inside: bool,
) -> list[str]:
    """Return the rules of an answer after `<|start|>assistant`, or, with `inside`, after the
    beginning of a message's text.

    names     of the functions; `json_N` are the rules of their arguments
    mark      returns a mark of the format as Lark
    literal   returns a text as a Lark literal
    text      a terminal of a message's text
    answer    the rule of a final message's text; None = any text
    required  only reasoning comes before a call
    """
    header = f"{mark(CHANNEL)} {{}} {mark(MESSAGE)}"
    lines = [
        f'next: {mark(END)} {mark(START)} "assistant"',
        f"thought: {header.format('THOUGHT')} TEXT?",
        'THOUGHT: "analysis" | "commentary"',
        f"final: {header.format(literal('final'))} {answer or 'TEXT?'}",
        f"TEXT: {text}",
        f'kind: " "? {mark(CONSTRAIN)} "json" | " json"',
        f"call: {' | '.join(f'call_{index}' for index in range(len(names)))}",
    ]
    for index, name in enumerate(names):
        to, body = f"to=functions.{name}", f"kind? {mark(MESSAGE)} json_{index}"
        lines.append(
            f"call_{index}: {mark(CHANNEL)} {literal(f'commentary {to}')} {body}"
            f" | {literal(f' {to}')} {mark(CHANNEL)} {literal('commentary')} {body}"
        )
    begun = "TEXT? next " if inside else ""
    if required:
        return [*lines, f"start: {begun}(thought next)* call"]
    # Without a schema, a message of any channel may end the answer and others may follow it.
    ends = "final | call" if answer else "thought | final | call"
    whole = "| TEXT? " if inside else ""
    spoken = "thought" if answer else "(thought | final)"
    return [*lines, f"start: {begun}({spoken} next)* ({ends}) {whole}"]
