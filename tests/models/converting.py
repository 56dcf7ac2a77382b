"""Converts folders with llama.cpp's own converter, in a process of its own, which has its modules.

    python -m tests.models.converting LLAMA_CPP_SOURCE < [[folder, file, [flag, ...]], ...]

Vocabularies are byte-level ones without a name that the converter knows.
"""

import importlib
import json
import logging
import sys


def main() -> None:
    """Convert what standard input lists; say on standard error what fails."""
    source = sys.argv[1]
    sys.path[:0] = [f"{source}/gguf-py", source]
    logging.disable(logging.WARNING)
    conversion = importlib.import_module("conversion")
    base = importlib.import_module("conversion.base")
    base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    conversion.load_all_models()
    _plain_vocabularies(base.TextModel)
    converter = importlib.import_module("convert_hf_to_gguf")
    for folder, file, flags in json.load(sys.stdin):
        sys.argv = ["convert", folder, "--outfile", file, "--outtype", "f32", *flags]
        converter.main()


def _plain_vocabularies(model: type) -> None:
    """Drafters have their targets' vocabularies."""
    for one in model.__subclasses__():
        if "set_vocab" in one.__dict__ and "DFlash" not in one.__name__:
            one.set_vocab = lambda self: self._set_vocab_gpt2()  # type: ignore[attr-defined]
        _plain_vocabularies(one)


if __name__ == "__main__":
    main()
