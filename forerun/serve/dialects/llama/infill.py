"""Fill-in-the-middle prompts between two texts, with the model's own tokens for that."""

from dataclasses import dataclass

from forerun.serve.dialects.llama.schema import InfillBody
from forerun.serve.http.errors import ApiError
from forerun.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Marks:
    """Token ids before the prefix, before the suffix, and before what is to be written; and before
    a repository's name and a file's, where the model has them.
    """

    prefix: int
    suffix: int
    middle: int
    repository: int | None
    file: int | None

    @property
    def all(self) -> tuple[int, ...]:
        """Ids of all its marks: none stands in what is written, they end it."""
        found = (self.prefix, self.suffix, self.middle, self.repository, self.file)
        return tuple(id for id in found if id is not None)


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


def marks_of(tokenizer: Tokenizer) -> Marks:
    """Return the marks that the model's vocabulary has for infilling. Raises ApiError (400) if it
    has none.
    """

    def first(names: tuple[str, ...]) -> int | None:
        found = (tokenizer.added[name].id for name in names if name in tokenizer.added)
        return next(found, None)

    for family in _FAMILIES:
        if all(name in tokenizer.added for name in family):
            prefix, suffix, middle = (tokenizer.added[name].id for name in family)
            return Marks(prefix, suffix, middle, first(_REPOSITORY), first(_FILE))
    raise ApiError(
        400,
        "This model has no tokens for filling in (such as <|fim_prefix|>): /infill needs a model "
        "that was trained for it, for example Qwen2.5-Coder.",
        "no_infill_tokens",
    )


def infill_prompt(body: InfillBody, tokenizer: Tokenizer, context: int) -> tuple[int, ...]:
    """Make token ids of: what else is known, prefix, suffix, and the mark behind which is written.
    Of input_extra the first chunks are left out where all of them leave no room for the answer.
    """
    marks = marks_of(tokenizer)
    ((written,),) = body.prompt
    before = _ids(body.input_prefix + str(written), tokenizer)
    fixed = [marks.prefix, *before, marks.suffix, *_ids(body.input_suffix, tokenizer), marks.middle]
    begin = tokenizer.encode("", bos=True).tolist()
    extras = [_extra(one.filename, one.text, marks, tokenizer) for one in body.input_extra]
    names: list[int] = []
    if marks.repository is not None and marks.file is not None:
        names = [marks.repository, *_ids("myproject\n", tokenizer)]
        fixed = [marks.file, *_ids("filename\n", tokenizer), *fixed]
    room = context - len(begin) - len(names) - len(fixed) - max(body.max_tokens, 1)
    while extras and sum(map(len, extras)) > room:
        del extras[0]
    return (*begin, *names, *(id for extra in extras for id in extra), *fixed)


def _extra(name: str, text: str, marks: Marks, tokenizer: Tokenizer) -> list[int]:
    if marks.file is None:
        return _ids(f"\n\n--- {name} ---\n\n{text}", tokenizer)
    return [marks.file, *_ids(f"{name}\n{text}", tokenizer)]


def _ids(text: str, tokenizer: Tokenizer) -> list[int]:
    """Encode a file's text; control strings in it are plain text."""
    return tokenizer.encode_part(text, False) if text else []
