"""The prompt of llama.cpp's /infill: other files, and the texts before and after the text to be
written.
"""

from forerun.serve.bodies.infill import InfillMarks, file_ids, needed_marks
from forerun.serve.dialects.llama.schema import InfillBody
from forerun.text.tokenizer import Tokenizer


def infill_prompt(
    body: InfillBody, tokenizer: Tokenizer, context: int
) -> tuple[tuple[int, ...], InfillMarks]:
    """Return the token ids of the prompt (other files, prefix, suffix, and the last mark), and the
    model's marks. The first chunks of input_extra are left out as needed to leave room for the
    answer. Raises RequestError if the model has no marks for infilling.
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
    room = context - len(begin) - len(names) - len(fixed) - max(body.max_tokens or 1, 1)
    while extras and sum(map(len, extras)) > room:
        del extras[0]
    return (*begin, *names, *(id for extra in extras for id in extra), *fixed), marks


def _extra(name: str, text: str, marks: InfillMarks, tokenizer: Tokenizer) -> list[int]:
    if marks.file is None:
        return file_ids(f"\n\n--- {name} ---\n\n{text}", tokenizer)
    return [marks.file, *file_ids(f"{name}\n{text}", tokenizer)]
