"""The prompt of llama.cpp's /infill: other files, and the texts around what is to be written."""

from forerun.serve.bodies.infill import InfillMarks, file_ids, needed_marks
from forerun.serve.dialects.llama.schema import InfillBody
from forerun.text.tokenizer import Tokenizer


def infill_prompt(
    body: InfillBody, tokenizer: Tokenizer, context: int
) -> tuple[tuple[int, ...], InfillMarks]:
    """Make token ids of: what else is known, prefix, suffix, and the mark behind which is written.
    Of input_extra the first chunks are left out where all of them leave no room for the answer.
    Raises RequestError where the model has no marks for that.
    """
    marks = needed_marks(tokenizer, "input_suffix")
    ((written,),) = body.prompt
    before = file_ids(body.input_prefix + str(written), tokenizer)
    fixed = marks.around(before, file_ids(body.input_suffix, tokenizer))
    begin = tokenizer.encode("", bos=True).tolist()
    extras = [_extra(one.filename, one.text, marks, tokenizer) for one in body.input_extra]
    names: list[int] = []
    if marks.repository is not None and marks.file is not None:
        names = [marks.repository, *file_ids("myproject\n", tokenizer)]
        fixed = [marks.file, *file_ids("filename\n", tokenizer), *fixed]
    room = context - len(begin) - len(names) - len(fixed) - max(body.max_tokens, 1)
    while extras and sum(map(len, extras)) > room:
        del extras[0]
    return (*begin, *names, *(id for extra in extras for id in extra), *fixed), marks


def _extra(name: str, text: str, marks: InfillMarks, tokenizer: Tokenizer) -> list[int]:
    if marks.file is None:
        return file_ids(f"\n\n--- {name} ---\n\n{text}", tokenizer)
    return [marks.file, *file_ids(f"{name}\n{text}", tokenizer)]
