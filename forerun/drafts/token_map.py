"""Token maps: the target ids that a draft model may propose (FR-Spec, arXiv 2502.14856).

The rare tokens of a large vocabulary cost a draft time in its output head; a map keeps the rows of
the frequent ones. It is a list of target ids: JSON, one vector in a safetensors file, or the list
that FR-Spec publishes as freq_N.pt (read by pickled.py, which executes nothing).
"""

import json
from pathlib import Path

import numpy as np

from forerun.checkpoints.pickled import read_pickled_ids
from forerun.checkpoints.shard import MAPS, read_shard
from forerun.errors import ModelError, reason_of
from forerun.types import AnyArray, Ints

_KINDS = {"I64": "<i8", "I32": "<i4"}
_MOST_BYTES = 64 << 20


def read_token_map(path: Path, vocab: int) -> Ints:
    """Return int32[Vd] ascending target ids, of a target of V = `vocab`. Raises ModelError naming
    the file if it is missing, of another format, empty, or has ids outside the vocabulary.
    """
    if not path.is_file():
        raise ModelError(
            f"there is no token map {path}; give a file: .json, .safetensors, or .pt as published"
        )
    if path.stat().st_size > _MOST_BYTES:
        raise ModelError(f"{path} is larger than any token map")
    read = {".json": _json, ".safetensors": _safetensors, ".pt": read_pickled_ids}.get(path.suffix)
    if read is None:
        raise ModelError(f"{path} is not a token map: it must be .json, .safetensors or .pt")
    ids = np.asarray(read(path))
    if not len(ids):
        raise ModelError(f"{path} names no token")
    wrong = ids[(ids < 0) | (ids >= vocab)]
    if len(wrong):
        raise ModelError(
            f"{path} names id {wrong[0]}, outside 0..{vocab - 1}: a map for another tokenizer"
        )
    return np.unique(ids).astype(np.int32)


def write_token_map(ids: Ints, path: Path) -> None:
    """Write target ids int32[n], ascending, as the JSON list that `read_token_map` reads. Raises
    OSError if the disk refuses.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(ids.tolist()) + "\n", encoding="utf-8")


def _json(path: Path) -> AnyArray:
    try:
        ids = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {reason_of(error)}") from error
    if not isinstance(ids, list) or not all(type(id) is int and abs(id) < 1 << 62 for id in ids):
        raise ModelError(f"{path} must hold a JSON list of token ids")
    return np.array(ids, np.int64)


def _safetensors(path: Path) -> AnyArray:
    file = read_shard(path, MAPS)
    (name, *more) = file.tensors or [""]
    stored = file.tensors.get(name)
    if more or stored is None or stored.kind not in _KINDS or len(stored.shape) != 1:
        raise ModelError(f"{path} must hold one vector of int64 or int32, the ids")
    ids: AnyArray = file.rows(name).view(_KINDS[stored.kind]).reshape(-1)
    return ids
