"""Opens drafts: the network in a folder, of the configured kind, or a smaller model by any
reference, whose vocabulary is mapped to the target's.
"""

from pathlib import Path

import numpy as np

from forerun.build.beside import check_meant
from forerun.checkpoints.checkpoint import Checkpoint
from forerun.checkpoints.folder import files_by_tensor
from forerun.checkpoints.gguf.header import is_gguf
from forerun.checkpoints.shard import QUANTISED
from forerun.drafts.assistant import Assistant, holds_assistant, open_assistant
from forerun.drafts.block_folder import BlockFile, holds_block, open_block
from forerun.drafts.eagle_folder import DraftFile, open_draft
from forerun.drafts.gguf_block import holds_block_file, open_block_file
from forerun.drafts.gguf_eagle import holds_head_file, open_head_file
from forerun.drafts.gguf_prediction import holds_layers_alone, open_layers_alone
from forerun.drafts.prediction_folder import holds_prediction, open_prediction
from forerun.drafts.prediction_layers import PredictionLayers
from forerun.drafts.standalone_draft import StandaloneDraft, VocabularyMap, equal_vocabulary
from forerun.errors import ConfigError, ModelError
from forerun.hub.catalog import BUILT_IN, open_model
from forerun.options.config import EngineConfig
from forerun.text.tokenizer import Tokenizer

AnyDraftFile = DraftFile | BlockFile | PredictionLayers | Assistant


def open_draft_file(config: EngineConfig, folder: Path, target: Checkpoint) -> AnyDraftFile:
    """Open the network in a draft's folder or GGUF file, of the kind that the configured algorithm
    runs. EAGLE also accepts prediction layers and assistants, as in SGLang. Weights are
    memory-mapped, not read. Raises ModelError if the draft cannot be used, ConfigError if it is of
    another kind.
    """
    method, arch = config.algorithm, target.architecture
    if holds_assistant(folder):
        check_meant(config, folder)
        return open_assistant(folder, arch)
    if method.kind == "assistant":
        raise ConfigError(
            f"speculative-algorithm is {method.name}, but {folder} holds no assistant of Gemma 4; "
            "leave the algorithm out, and the draft decides it."
        )
    alone, in_file, head_file = holds_layers_alone(folder), *_kinds_in_file(folder)
    held = in_file or (not (alone or head_file) and holds_block(folder))
    if alone or (not (in_file or head_file) and holds_prediction(folder)):
        if method.kind != "layers" and method.name not in ("EAGLE", "AUTO"):
            raise ConfigError(
                f"speculative-algorithm is {method.name}, but {folder} holds prediction layers; "
                "use NEXTN."
            )
        return open_layers_alone(folder, target) if alone else open_prediction(folder, target)
    if method.kind == "layers":
        raise ConfigError(
            f"speculative-algorithm is {method.name}, but {folder} holds no prediction layers; "
            "leave speculative-draft-model-path out where the target has layers of its own, or use "
            "EAGLE with a draft head."
        )
    if held and not (method.block or method.name == "AUTO"):
        raise ConfigError(
            f"speculative-algorithm is {method.name}, but {folder} holds a block drafter; use "
            "DFLASH."
        )
    if method.block and not held:
        raise ConfigError(
            f"speculative-algorithm is {method.name}, but {folder} holds no block drafter; use "
            "EAGLE for a draft head."
        )
    if held:
        return open_block_file(folder, arch) if in_file else open_block(folder, arch)
    head = (open_head_file if head_file else open_draft)(folder, arch)
    if method.name == "EAGLE3" and head.head.algorithm != "eagle3":
        raise ConfigError(
            f"speculative-algorithm is EAGLE3, but the head in {folder} is an EAGLE-1 or EAGLE-2 "
            "head; use EAGLE."
        )
    return head


def _kinds_in_file(path: Path) -> tuple[bool, bool]:
    """Return whether a path is a GGUF file with a block drafter, or with a draft head."""
    return holds_block_file(path), holds_head_file(path)


def holds_draft_file(path: Path) -> bool:
    """Return whether a path holds an assistant, or is a GGUF file of a draft: of prediction
    layers, a block drafter or a draft head.
    """
    return holds_assistant(path) or holds_layers_alone(path) or any(_kinds_in_file(path))


def names_gguf_model(named: str) -> bool:
    """Return whether the named draft is a whole model in a GGUF file, existing or not."""
    path = Path(named)
    return (named.endswith(".gguf") or is_gguf(path)) and not any(_kinds_in_file(path))


def holds_model(named: str) -> bool:
    """Return whether the named draft is a whole model: a built-in one, or a folder whose files have
    a language model's embedding and no tensor that combines features with it.
    """
    folder = Path(named)
    if not (folder / "config.json").is_file():
        return named in BUILT_IN
    if holds_block(folder) or holds_prediction(folder) or holds_assistant(folder):
        return False
    names = set(files_by_tensor(folder, QUANTISED))
    embeds = any(name.endswith("model.embed_tokens.weight") for name in names)
    return embeds and not names & {"fc.weight", "model.fc.weight"}


Spelling = tuple[bool, bytes]
"""The identity of a token: whether it is special (text cannot contain it), and its bytes."""


def open_standalone(
    reference: str, revision: str | None, target: Tokenizer, vocab: int
) -> StandaloneDraft:
    """Open the model called `reference` as a drafter for a target of V = `vocab`, with the tokens
    that both vocabularies have; fetches it if needed. Raises ModelError, also if the two share no
    token; DownloadError if it cannot be fetched.
    """
    model = open_model(reference, revision=revision)
    vocabulary = _shared_vocabulary(target, vocab, model.tokenizer, model.architecture.vocab)
    if not len(vocabulary.target_ids):
        raise ModelError(
            f"the draft model {reference} shares no token with the target, so it cannot draft for "
            "it; name a model with the same tokenizer"
        )
    return StandaloneDraft(model.name, model.checkpoint, vocabulary)


def _shared_vocabulary(target: Tokenizer, vocab: int, draft: Tokenizer, own: int) -> VocabularyMap:
    """Return the map between the tokens of a draft model with `own` ids and those of the target, V
    = `vocab`.
    """
    theirs, mine = _spellings(target, vocab), _spellings(draft, own)
    common = min(len(theirs), len(mine))
    alike = all(a[1] == b[1] for a, b in zip(theirs, mine, strict=False))
    if alike and not any(map(_is_token, theirs[common:] + mine[common:])):
        return equal_vocabulary(vocab, own)
    by_spelling = {spelling: id for id, spelling in enumerate(mine) if _is_token(spelling)}
    same = np.array([_same(id, item, mine, by_spelling) for id, item in enumerate(theirs)])
    # Of two target ids that are spelled alike, one is enough.
    own_ids, first = np.unique(same, return_index=True)
    chosen = np.sort(first[own_ids >= 0])
    end = draft.eos_ids[0] if draft.eos_ids else 0
    inputs = [
        found if found >= 0 else end if id in target.eos_ids else _tail(item, by_spelling)
        for id, (found, item) in enumerate(zip(same.tolist(), theirs, strict=True))
    ]
    return VocabularyMap(
        inputs=np.array(inputs, np.int32),
        own_ids=same[chosen].astype(np.int32),
        target_ids=chosen.astype(np.int32),
        shared=len(chosen),
    )


def _spellings(tokenizer: Tokenizer, vocab: int) -> list[Spelling]:
    special = tokenizer.special_ids
    return [(id in special, tokenizer.token_bytes(id)) for id in range(vocab)]


def _is_token(spelling: Spelling) -> bool:
    """Return whether an id has a token; other ids pad a vocabulary."""
    return bool(spelling[1])


def _same(id: int, item: Spelling, mine: list[Spelling], by_spelling: dict[Spelling, int]) -> int:
    """Return the draft's id of the target's token `id`; -1 if it has none."""
    if not _is_token(item):
        return -1
    if id < len(mine) and mine[id][1] == item[1]:
        return id
    return by_spelling.get(item, -1)


def _tail(item: Spelling, by_spelling: dict[Spelling, int]) -> int:
    """Return the id of the longest token of the draft's vocabulary with which a missing token ends;
    0 if there is none.
    """
    text = item[1]
    ends = (by_spelling.get((False, text[begin:])) for begin in range(len(text)))
    return next((id for id in ends if id is not None), 0)
