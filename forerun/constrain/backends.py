"""The libraries that compile grammars, by name."""

from forerun.constrain.automaton import Backend, Vocabulary
from forerun.constrain.compile import Compiler
from forerun.constrain.llguidance_backend import Guidance
from forerun.errors import ConfigError
from forerun.text.tokenizer import Tokenizer


def open_compiler(name: str, tokenizer: Tokenizer) -> Compiler | None:
    """Compiles with the library of that name; None where no text could end.

    Raises ConfigError as `backend` does.
    """
    return Compiler(tokenizer, backend(name, tokenizer)) if tokenizer.eos_ids else None


def backend(name: str, tokenizer: Vocabulary) -> Backend:
    """llguidance, or xgrammar, which is imported here and nowhere else: it takes seconds.

    Raises ConfigError where it is not installed.
    """
    if name == "llguidance":
        return Guidance(tokenizer)
    try:
        from forerun.constrain.xgrammar_backend import Xgrammar
    except ImportError as error:
        raise ConfigError(
            f"--grammar-backend xgrammar needs that package, which cannot be imported ({error}). "
            "Install it with: pip install 'forerun[xgrammar]'"
        ) from error
    return Xgrammar(tokenizer)
