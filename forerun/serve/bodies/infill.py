"""Builds fill-in-the-middle prompts: the text before and the text after, in the model's own
marks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from forerun.build.engine import Frontend
from forerun.errors import RequestError
from forerun.serve.bodies.prepare import (
    check_length,
    known_tokens,
    places_of,
    too_long,
    truncated,
)
from forerun.serve.bodies.schema import CompletionBody
from forerun.text.tokenizer import Tokenizer, as_ids, matcher

_FAMILIES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)
"""Qwen Coder and CodeGemma; StarCoder and Granite; SantaCoder; CodeLlama, in both its spellings;
DeepSeek Coder; GLM."""
_REPOSITORY = ("<|repo_name|>", "<repo_name>", "<reponame>")
_FILE = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
_ENDS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "\u2581<EOT>", "<EOT>")
_NAMES = (*(name for family in _FAMILIES for name in family), *_REPOSITORY, *_FILE, *_ENDS)


@dataclass(frozen=True, slots=True)
class InfillMarks:
    """Token ids before the prefix, before the suffix, and before the text to be written; and before
    the names of a repository and of a file, if the model has them.

    ends  ids of all marks, and of those that only end a text: the written text contains none
    """

    prefix: int
    suffix: int
    middle: int
    repository: int | None
    file: int | None
    ends: tuple[int, ...]

    def around(self, before: Iterable[int], behind: Iterable[int]) -> list[int]:
        """Return the ids of a prompt for the text between `before` and `behind`."""
        return [self.prefix, *before, self.suffix, *behind, self.middle]


def infill_marks(tokenizer: Tokenizer) -> InfillMarks | None:
    """Return the marks for infilling in the model's vocabulary; None if it has none."""
    known = {name: tokenizer.added[name].id for name in _NAMES if name in tokenizer.added}

    def first(names: Sequence[str]) -> int | None:
        return next((known[name] for name in names if name in known), None)

    for family in _FAMILIES:
        if all(name in known for name in family):
            prefix, suffix, middle = (known[name] for name in family)
            ends = tuple(known.values())
            return InfillMarks(prefix, suffix, middle, first(_REPOSITORY), first(_FILE), ends)
    return None


def needed_marks(tokenizer: Tokenizer, field: str) -> InfillMarks:
    """Return the marks for infilling. Raises RequestError, for the field that needs them, if the
    model has none.
    """
    marks = infill_marks(tokenizer)
    if marks is None:
        raise RequestError(
            f"{field}: this model has no tokens for filling in (such as <|fim_prefix|>); it needs "
            "a model that was trained for it, for example Qwen2.5-Coder.",
            field,
        )
    return marks


def file_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    """Encode a file's text; control strings and marks in it are ordinary text. Marks that the
    tokenizer would recognise in any text are encoded in two parts.
    """
    read = (name for name in _NAMES if name in tokenizer.added)
    marks = matcher(name for name in read if not tokenizer.added[name].control)
    cuts = [0, *(found.start() + 1 for found in marks.finditer(text)), len(text)]
    ids = tokenizer.encode_part(text[: cuts[1]], False) if text else []
    for start, end in pairwise(cuts[1:]):
        ids += tokenizer.encode_within(text[start:end])
    return ids


def filling(body: CompletionBody, loaded: Frontend) -> CompletionBody:
    """Convert a request with a suffix to one without: its prompts become token ids, with the
    model's marks around both texts, and its marks end the answer. Raises RequestError,
    ContextError.
    """
    if not body.suffix:
        return body
    if body.echo:
        message = "echo and suffix cannot be honoured at once: the answer stands between both."
        raise RequestError(message, "echo")
    tokenizer = loaded.tokenizer
    marks = needed_marks(tokenizer, "suffix")
    check_length(body.suffix, loaded, "suffix")
    behind = file_ids(body.suffix, tokenizer)
    if len(behind) > loaded.context:
        raise too_long(len(behind), loaded, "suffix")
    begin = tokenizer.encode("", bos=body.add_special_tokens).tolist()
    room = loaded.context - len(begin) - len(marks.around((), behind))
    found = []
    for prompt, place in zip(body.prompt, places_of(body.prompt), strict=True):
        if isinstance(prompt, str):
            if body.truncate_prompt_tokens is None:
                check_length(prompt, loaded, place)
            before = as_ids(file_ids(prompt, tokenizer))
        else:
            before = known_tokens(prompt, loaded, place)
        before = truncated(before, body, room)
        if len(before) > room:
            count = len(before) - room + loaded.context
            raise too_long(count, loaded, place, "with suffix ")
        found.append((*begin, *marks.around(before.tolist(), behind)))
    return replace(
        body,
        prompt=tuple(found),
        suffix="",
        truncate_prompt_tokens=None,
        stop_token_ids=(*body.stop_token_ids, *marks.ends),
    )
