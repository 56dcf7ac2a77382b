"""Reads folders of config.json and safetensors, as written by `transformers`."""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from forerun.checkpoints.checkpoint import check_complete, shortened
from forerun.checkpoints.converted import read_pickled
from forerun.checkpoints.grouped import Grouped
from forerun.checkpoints.mapped import Packed, TensorFile
from forerun.checkpoints.naming import (
    FINAL_NORMS,
    IN_LAYER,
    StoredPart,
    StoredTensor,
    experts_transposed,
    layer_pieces,
)
from forerun.checkpoints.prediction_naming import divided
from forerun.checkpoints.quantised.config import read_method, without_wrapper
from forerun.checkpoints.quantised.files import with_matrices
from forerun.checkpoints.quantised.method import Method
from forerun.checkpoints.shard import FLOATS, QUANTISED, read_shard
from forerun.errors import ModelError, reason_of
from forerun.networks.arch import Architecture, expected_tensors
from forerun.networks.config_json import INDEXED, architecture_from, read_json, with_text_config
from forerun.networks.keys import shown
from forerun.options.sampling_params import SAMPLING_PARAMS
from forerun.types import Floats

log = logging.getLogger("forerun.checkpoints")

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED, _PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_SPECIAL_TOKENS = "special_tokens_map.json"
_TEMPLATES = ("chat_template.jinja", "additional_chat_templates/tool_use.jinja")
_OF_PROCESSOR = "chat_template.json"
"""File with the template of multimodal models from before mid-2025."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_NORM = "model.norm.weight"
MODULES = "modules.json"
"""Sentence-transformers' file beside a model of embeddings, which may be saved without a head."""
_MOST_SHARDS = 1024
_MOST_INDEX = 64 << 20
"""Most bytes of an index; that of Kimi K2 has 13.5 MB."""
_AT_ONCE = 1024
"""Rows of a head that are compared with the embedding's before more of the file is read."""
_ROTARY_TABLE = re.compile(r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)")


class FolderCheckpoint:
    """A folder as a Checkpoint.

    methods           the quantisation methods of its matrices; () = all are floats
    towers            names of its parts for images, which are left out
    prediction_files  tensors of prediction layers, by stored name: not part of the model itself,
                      and read only to draft with them
    """

    def __init__(self, folder: Path, context: int | None = None) -> None:
        """Map and check the files. Raises ModelError naming the fault.

        context  of the longest text, if the model depends on it (Architecture.for_context)
        """
        self._folder = folder
        self.config: dict[str, Any] = config_of(folder)
        self.methods: tuple[Method, ...] = read_method(self.config)
        self.architecture: Architecture = architecture_from(self.config, folder).for_context(
            context
        )
        stored = files_by_tensor(folder, QUANTISED if self.methods else FLOATS)
        self.towers: tuple[str, ...] = _towers(stored, self.config)
        named = _as_model(text_only(stored, self.config, folder))
        if _moved(named):
            self.architecture = replace(self.architecture, norm_offset=0.0)
        files = with_matrices(named, self.methods)
        own, self.prediction_files = divided(files, self.architecture)
        if self.architecture.tied_head and _own_head(own):
            self.architecture = replace(self.architecture, tied_head=False)
        elif _HEAD not in own and (folder / MODULES).is_file():
            self.architecture = replace(self.architecture, tied_head=True)
        self._stored = _stored(_needed(own, self.architecture), self.architecture, folder)

    @property
    def path(self) -> Path:
        """The checkpoint's folder."""
        return self._folder

    def names(self) -> tuple[str, ...]:
        """Return the canonical names of all tensors."""
        return tuple(self._stored)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor. Raises KeyError for an unknown name."""
        return self._stored[name].piece.shape

    def tensor(self, name: str) -> Floats:
        """Return the tensor as float32, of its `shape`; a read-only view of the file if that is how
        it is stored. Raises KeyError for an unknown name.
        """
        return self._stored[name].floats()

    def part(self, name: str, rows: slice, columns: slice) -> Floats:
        """Return float32[n,k], some rows and columns of a matrix; of one stored in few bits little
        else is read. Raises KeyError for an unknown name.
        """
        return self._stored[name].part(rows, columns)

    def grouped(self, name: str) -> Grouped | None:
        """Return a quantised matrix whose columns share scales; None for any other. Raises KeyError
        for an unknown name.
        """
        return self._stored[name].grouped()

    def packed(self, name: str) -> Packed | None:
        """Return a matrix of floats as stored; None for a vector, and for a matrix stored in few
        bits. Raises KeyError for an unknown name.
        """
        return self._stored[name].packed()


def _stored(
    files: dict[str, TensorFile], arch: Architecture, where: Path
) -> dict[str, StoredTensor]:
    """Map each canonical name to its stored tensor. Raises ModelError naming every missing,
    unexpected or wrongly shaped tensor by its name in the files.
    """
    shapes = {name: file.tensors[name].shape for name, file in files.items()}
    turned = experts_transposed(arch, shapes)
    pieces = {
        spec: layer_pieces(arch, spec, files, turned) for spec in dict.fromkeys(arch.layer_specs)
    }
    parts: dict[str, tuple[str, StoredPart]] = {}
    for name, shape in expected_tensors(arch).items():
        match = IN_LAYER.match(name)
        if match is None:
            stored = FINAL_NORMS.get(arch.family, name) if name == _NORM else name
            parts[name] = stored, StoredPart(stored, shape, shape)
        else:
            piece = pieces[arch.layer_specs[int(match[1])]][name[match.end() :]]
            parts[name] = match[0] + piece.stored, piece
    expected = {stored: piece.stored_shape for stored, piece in parts.values()}
    check_complete(arch, shapes, where, expected)
    return {
        name: StoredTensor(files[stored], stored, piece) for name, (stored, piece) in parts.items()
    }


_VISION = re.compile(
    r"(model\.)?(vision_tower|multi_modal_projector|visual|audio_tower|embed_vision|embed_audio"
    r"|vision_embedder)\..+"
)
INDEXERS = ("indexers",)
"""Value of `FolderCheckpoint.towers` for a model whose indexers are left out."""
_INDEXER = re.compile(r"\.self_attn\.indexer\.")
_KEYS_AND_VALUES = re.compile(r"model\.layers\.(\d{1,9})\.self_attn\.(?:[kv]_proj|[kv]_norm)\..+")


def _towers(files: Mapping[str, TensorFile], config: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of the parts of a multimodal checkpoint that `text_only` leaves out, or
    INDEXERS.
    """
    if config.get("model_type") in INDEXED:
        return INDEXERS if any(map(_INDEXER.search, files)) else ()
    if not isinstance(config.get("text_config"), dict):
        return ()
    return tuple(sorted({match[2] for name in files if (match := _VISION.fullmatch(name))}))


def text_only(
    files: dict[str, TensorFile], config: dict[str, Any], folder: Path
) -> dict[str, TensorFile]:
    """Return only the language model of a multimodal checkpoint, with the names of one that was
    saved alone, or a model without its indexers; the files of any other checkpoint unchanged.
    Raises ModelError if two tensors would have one name.
    """
    if config.get("model_type") in INDEXED:
        return {name: file for name, file in files.items() if not _INDEXER.search(name)}
    if not isinstance(config.get("text_config"), dict):
        return files
    names: dict[str, str] = {}
    for name in files:
        if _VISION.fullmatch(name):
            continue
        plain = without_wrapper(name)
        if plain in names:
            raise ModelError(f"{folder}: {name} and {names[plain]} are both {plain}")
        names[plain] = name
    return _renamed(files, names)


_CONVOLUTION = re.compile(r".*\.(linear_attn\.conv1d|conv\.conv)\.weight")


def _moved(files: dict[str, TensorFile]) -> bool:
    """Return whether convolutions are MLX's, [channels,taps,1], and give them the usual shape of
    the same numbers. MLX has then added the offset of norms to their weights, too.
    """
    moved = False
    for name, file in files.items():
        entry = file.tensors[name]
        if _CONVOLUTION.fullmatch(name) and len(entry.shape) == 3 and entry.shape[2] == 1:
            channels, taps, _ = entry.shape
            file.tensors[name] = replace(entry, shape=(channels, 1, taps))
            moved = True
    return moved


def _as_model(files: dict[str, TensorFile]) -> dict[str, TensorFile]:
    """Return the files of a base model (without a head; embedding models are saved so) under a
    whole model's names; any other's unchanged.
    """
    if _EMBEDDING in files or _EMBEDDING.removeprefix("model.") not in files:
        return files
    names = {name if name == _HEAD else f"model.{name}": name for name in files}
    return _renamed(files, names)


def _renamed(files: dict[str, TensorFile], names: Mapping[str, str]) -> dict[str, TensorFile]:
    """Return the files with tensors under new names. names: new name -> name in the files."""
    renamed = {
        id(file): replace(
            file,
            tensors={new: file.tensors[old] for new, old in names.items() if old in file.tensors},
        )
        for file in {id(file): file for file in files.values()}.values()
    }
    return {new: renamed[id(files[old])] for new, old in names.items()}


def config_of(folder: Path) -> dict[str, Any]:
    """Read a model folder's config.json. Raises ModelError if it is absent or damaged; the message
    says what else the folder may be.
    """
    if (folder / "config.json").is_file():
        config = with_text_config(read_json(folder / "config.json"))
        return config if "quantization_config" in config else config | _modelopt(folder)
    hint = ""
    if (folder / "adapter_config.json").is_file():
        hint = "; it holds an adapter: merge it into its base model first"
    elif files := sorted(folder.glob("*.gguf")):
        hint = f"; name the GGUF file itself, for example {files[0]}"
    else:
        hint = _gone(folder)
    raise ModelError(f"{folder} is not a model folder: it has no config.json{hint}")


def _modelopt(folder: Path) -> dict[str, Any]:
    """Return the quantization_config that ModelOpt writes beside config.json; {} without one."""
    path = folder / "hf_quant_config.json"
    settings = read_json(path).get("quantization") if path.is_file() else None
    if not isinstance(settings, dict) or not settings.get("quant_algo"):
        return {}
    return {"quantization_config": {"quant_method": "modelopt", **settings}}


def _gone(folder: Path) -> str:
    """Say which link of a folder leads nowhere, as the end of a message; "" if none does."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    gone = [file.name for file in files if file.is_symlink() and not file.exists()]
    return f"; {gone[0]} is a link to a file that is gone: fetch the model again" if gone else ""


def files_by_tensor(folder: Path, kinds: Mapping[str, int] = FLOATS) -> dict[str, TensorFile]:
    """Return tensor name -> the file that has it. A single file takes precedence over an index,
    safetensors over pickles, whose tensors are converted to safetensors in the cache.

    kinds  as in read_shard

    Raises ModelError if there are no weights, or a file is damaged.
    """
    if (folder / _SINGLE).is_file():
        file = read_shard(folder / _SINGLE, kinds)
        return dict.fromkeys(file.tensors, file)
    if (folder / _INDEX).is_file():
        return _sharded(folder / _INDEX, ".safetensors", lambda path: read_shard(path, kinds))
    if (folder / _PICKLED).is_file():
        file = read_pickled(folder / _PICKLED)
        return dict.fromkeys(file.tensors, file)
    if (folder / _PICKLED_INDEX).is_file():
        return _sharded(folder / _PICKLED_INDEX, ".bin", read_pickled)
    pickles = sorted(f.name for f in folder.iterdir() if f.suffix in _PICKLES)
    hint = f"; {pickles[0]} is a pickle, and only {_PICKLED} is read" if pickles else _gone(folder)
    raise ModelError(f"{folder} has neither {_SINGLE} nor {_INDEX}{hint}")


def _sharded(index: Path, suffix: str, read: Callable[[Path], TensorFile]) -> dict[str, TensorFile]:
    """Open with `read` the files named by an index. Returns tensor name -> file. The files count
    where the index says otherwise: published ones name tensors that were dropped, or lack some that
    were added. Raises ModelError if a tensor is in two files, or the index names none.
    """
    listed = read_json(index, _MOST_INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(f, str) for f in listed.values()):
        raise ModelError(f"{index} has no weight_map from tensor to file name")
    names = sorted(set(listed.values()))
    outside = [n for n in names if not n.endswith(suffix) or set(n) & set("/\\:\0")]
    if outside or len(names) > _MOST_SHARDS:
        raise ModelError(
            f"{index} must name at most {_MOST_SHARDS} {suffix} files beside it, "
            f"not {shortened(outside or [f'{len(names)} files'])}"
        )
    files: dict[str, TensorFile] = {}
    for name in names:
        shard = read(index.parent / name)
        twins = files.keys() & shard.tensors.keys()
        if twins:
            raise ModelError(f"{index.parent / name} repeats tensors: {shortened(sorted(twins))}")
        files |= dict.fromkeys(shard.tensors, shard)
    if wrong := files.keys() ^ listed.keys():
        log.warning("%s and its files disagree on %s.", index, shortened(sorted(wrong)))
    return files


def _needed(files: dict[str, TensorFile], arch: Architecture) -> dict[str, TensorFile]:
    """Return the files without old checkpoints' rotary tables, a copy of a tied head, and tensors
    for keys and values in layers that read those of others.
    """
    copied = {_HEAD} if arch.tied_head else set()
    return {
        name: file
        for name, file in files.items()
        if name not in copied
        and _ROTARY_TABLE.fullmatch(name) is None
        and not read_elsewhere(name, arch)
    }


def read_elsewhere(name: str, arch: Architecture) -> bool:
    """Return whether a tensor, by its canonical name, computes keys and values that no layer
    reads.
    """
    match = _KEYS_AND_VALUES.fullmatch(name)
    layer = int(match[1]) if match is not None else arch.layers
    return layer < arch.layers and arch.layer_specs[layer].reads is not None


def _own_head(files: dict[str, TensorFile]) -> bool:
    """Return whether there is a head that differs from the embedding: it is used even if
    config.json ties them, as in transformers.
    """
    if _HEAD not in files or _EMBEDDING not in files:
        return False
    head, embedding = files[_HEAD], files[_EMBEDDING]
    kinds = {head.tensors[_HEAD].kind, embedding.tensors[_EMBEDDING].kind}
    if len(kinds) == 1 and kinds <= FLOATS.keys():
        ours, theirs = head.rows(_HEAD), embedding.rows(_EMBEDDING)
        same = len(ours) == len(theirs) and all(
            np.array_equal(ours[at : at + _AT_ONCE], theirs[at : at + _AT_ONCE])
            for at in range(0, len(ours), _AT_ONCE)
        )
        return not same
    return not np.array_equal(head.floats(_HEAD), embedding.floats(_EMBEDDING))


def eos_ids(folder: Path, config: dict[str, Any], vocab: int) -> tuple[int, ...]:
    """Return the ids that end a text: generation_config.json's, then config.json's, then those of
    the language model in it; special_tokens may name one more.
    """
    ids: list[int] = []
    for source in [generation_config(folder), config, config.get("text_config")]:
        if not isinstance(source, dict):
            continue
        ids += _token_ids(folder, "eos_token_id", source.get("eos_token_id"), vocab)
    return tuple(dict.fromkeys(ids))


def bos_id(folder: Path, config: dict[str, Any], vocab: int) -> int | None:
    """Return config.json's begin-of-text id; special_tokens may name another."""
    ids = _token_ids(folder, "bos_token_id", config.get("bos_token_id"), vocab)
    return ids[0] if ids else None


_SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


def special_tokens(folder: Path) -> dict[str, str | None]:
    """Read the special tokens' texts from tokenizer_config.json, or special_tokens_map.json if that
    has none, by their names in chat templates; None for one that is explicitly absent. Raises
    ModelError if one is no text.
    """
    path = folder / _SPECIAL_TOKENS
    settings = (read_json(path) if path.is_file() else {}) | tokenizer_settings(folder)
    tokens: dict[str, str | None] = {}
    for name in _SPECIAL:
        if name in settings:
            value = settings[name]
            text = value.get("content") if isinstance(value, dict) else value
            if text is not None and not isinstance(text, str):
                raise ModelError(f"{folder}: {name} {shown(value)} is not a token's text")
            tokens[name] = text or None
    return tokens


def _token_ids(folder: Path, name: str, value: Any, vocab: int) -> list[int]:
    """Return a value that is one id, a list of ids, or null as a list. Raises ModelError for
    anything else, and for ids outside the vocabulary.
    """
    items = value if isinstance(value, list) else [value]
    ids = [item for item in items if item is not None]
    for item in ids:
        if type(item) is not int or not 0 <= item < vocab:
            raise ModelError(f"{folder}: {name} {shown(item)} is not a token's id")
    return ids


def sampling_defaults(source: str, values: Mapping[str, Any]) -> dict[str, float]:
    """Return the sampling parameters that a model recommends, from `values` by their names in
    SAMPLING_PARAMS.

    source  where the values come from, for messages

    Raises ModelError naming a value that is not a number or out of bounds.
    """
    defaults: dict[str, float] = {}
    for name, param in SAMPLING_PARAMS.items():
        value, low, high = values.get(name), param.low, param.recommended_high
        if value is None or high is None:
            continue
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not low <= value <= high
        ):
            raise ModelError(
                f"{source}: {name} is {shown(value)}, but must be between {low} and {high}"
            )
        defaults[name] = max(int(value), 0) if name == "top_k" else float(value)
    return defaults


def generation_config(folder: Path) -> dict[str, Any]:
    """Read generation_config.json; {} if there is none."""
    path = folder / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def chat_template(folder: Path) -> str | None:
    """Read the chat template: chat_template.jinja, else the one in tokenizer_config.json, else that
    in chat_template.json; merged with the one for tools if there is one. Raises ModelError if a
    file is damaged, or it is no text.
    """
    alone, with_tools = (_text(folder / name) for name in _TEMPLATES)
    if alone is not None:
        return joined_templates(str(folder), alone, with_tools)
    value = tokenizer_settings(folder).get("chat_template")
    if value is None and (folder / _OF_PROCESSOR).is_file():
        value = read_json(folder / _OF_PROCESSOR).get("chat_template")
    with_tools = None
    if isinstance(value, list):
        named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
        value, with_tools = named.get("default"), named.get("tool_use")
    return joined_templates(f"{folder}: chat_template", value, with_tools)


def joined_templates(source: str, default: Any, with_tools: Any) -> str | None:
    """Merge the template for conversations and that for conversations with tools into one; either
    may be missing.

    source  where they come from, for messages

    Raises ModelError if one is no string.
    """
    for template in (default, with_tools):
        if template is not None and not isinstance(template, str):
            raise ModelError(f"{source} is {shown(template)}; it must be a string")
    if not default or not with_tools:
        found: str | None = default or with_tools or None
        return found
    # A line break after a tag, and one at the end of a template, are left out by Jinja.
    plain, tools = (str(text).removesuffix("\n") for text in (default, with_tools))
    return f"{{% if tools %}}\n{tools}{{%+ else %}}\n{plain}{{%+ endif %}}"


def _text(path: Path) -> str | None:
    """Return a file's text; None without the file."""
    try:
        return path.read_text(encoding="utf-8-sig") if path.is_file() else None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {reason_of(error)}") from error


def tokenizer_settings(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json; {} if there is none."""
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}
