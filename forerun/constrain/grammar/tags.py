"""Grammars of free text with tagged parts that follow a schema (SGLang's structural tags)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from forerun.constrain.grammar.calls import (
    ANY_TEXT,
    SLASHES,
    Rules,
    either,
    json_texts,
    literal,
    without,
)
from forerun.constrain.grammar.grammar import MAX_SOURCE, Grammar
from forerun.errors import RequestError


@dataclass(frozen=True, slots=True)
class Tag:
    """A part of a text that follows a schema: begin, JSON, end."""

    begin: str
    content: Grammar
    end: str


@dataclass(frozen=True, slots=True)
class TagRules(Rules):
    """Rules of free text in which every trigger begins one of the tags.

    triggers  beginnings of tags; free text may contain none of them
    """

    tags: tuple[Tag, ...] = ()
    triggers: tuple[str, ...] = ()

    def with_control(self, tokens: Mapping[str, int]) -> Rules:
        """Return a copy whose free text may contain control tokens; a trigger or a tag's end that
        is a control token is written as one.

        tokens  control tokens by text, without those that end texts
        """
        source = _source(self.tags, self.triggers, tokens, self.grammar.field)
        return replace(self, grammar=replace(self.grammar, source=source))


def tag_rules(tags: Sequence[Tag], triggers: Sequence[str], field: str) -> Rules:
    """Return the rules of free text in which every trigger begins one of the tags. field: the
    request field that errors name.

    Raises RequestError if a tag does not begin with a trigger.
    """
    grammar = Grammar.grammar(_source(tags, triggers, {}, field), field)
    return TagRules(grammar, tuple(tag.content for tag in tags), tuple(tags), tuple(triggers))


def _source(
    tags: Sequence[Tag], triggers: Sequence[str], tokens: Mapping[str, int], field: str
) -> str:
    size = sum(map(len, triggers)) + sum(len(tag.begin) + len(tag.content.source) for tag in tags)
    if size > MAX_SOURCE:
        raise RequestError(f"{field} has over {MAX_SOURCE} characters", field)
    heads: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    lengths = sorted({*map(len, triggers)})
    lines: list[str] = []
    for index, tag in enumerate(tags):
        # The shortest trigger that a tag begins with: free text cannot continue after it.
        begins = (tag.begin[:length] for length in lengths)
        trigger = next((begin for begin in begins if begin in heads), None)
        if trigger is None:
            raise RequestError(f"{field}: {tag.begin!r} begins with none of the triggers", field)
        heads[trigger].append(f"tag_{index}")
        rest, end = literal(tag.begin[len(trigger) :]), _mark(tag.end, tokens)
        lines += [
            f"tag_{index}: {rest} json_{index} {end}",
            f"json_{index}: {json_texts(tag.content)}",
        ]
    used = [(trigger, names) for trigger, names in heads.items() if names]
    for place, (trigger, names) in enumerate(used):
        lines.append(f"part_{place}: head_{place} ({' | '.join(names)})")
        if trigger in tokens:
            lines.append(f"head_{place}: TAIL? {_mark(trigger, tokens)}")
        else:
            lines.append(f"head_{place}[suffix={literal(trigger)}]: {ANY_TEXT}")
    parts = either("part", len(used))
    if others := sorted(id for text, id in tokens.items() if text not in heads):
        lines.append(f"start: ({parts} | TAIL? other)* TAIL?")
        lines.append(f"other: <[{','.join(map(str, others))}]>")
    else:
        lines.append(f"start: ({parts})* TAIL")
    lines.append(f"TAIL: {without([trigger for trigger, _ in used])}")
    if not any("\\" in text for tag in tags for text in (tag.begin, tag.end)):
        lines.insert(0, SLASHES)
    return "\n".join(lines)


def _mark(text: str, tokens: Mapping[str, int]) -> str:
    return f"<[{tokens[text]}]>" if text in tokens else literal(text)
