"""A smaller model as drafter: opened by any reference, its vocabulary laid beside the target's."""

import numpy as np

from forerun.errors import ModelError
from forerun.hub.catalog import open_model
from forerun.models.whole_draft import VocabularyMap, WholeDraft, equal_vocabulary
from forerun.text.tokenizer import Tokenizer

Spelling = tuple[bool, bytes]
"""The identity of a token: whether users cannot write it, and its bytes."""


def open_standalone(
    reference: str, revision: str | None, target: Tokenizer, vocab: int
) -> WholeDraft:
    """The model called `reference` as a drafter for a target of V = `vocab`, with the tokens that
    both spell alike; fetched where needed.

    Raises ModelError, also if the two share no token; DownloadError if it cannot be fetched.
    """
    model = open_model(reference, revision=revision)
    found = _shared_vocabulary(target, vocab, model.tokenizer, model.architecture.vocab)
    if not len(found.target_ids):
        raise ModelError(f"{reference} has no token that the target has; it cannot draft for it")
    return WholeDraft(model.name, model.checkpoint, found)


def _shared_vocabulary(target: Tokenizer, vocab: int, draft: Tokenizer, own: int) -> VocabularyMap:
    """Which tokens of a draft model of `own` ids are the target's, of V = `vocab`."""
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
    """Whether it is a token at all; the rest pads a vocabulary."""
    return bool(spelling[1])


def _same(id: int, item: Spelling, mine: list[Spelling], by_spelling: dict[Spelling, int]) -> int:
    """The draft's id of the target's token `id`; -1 if it has none."""
    if not _is_token(item):
        return -1
    if id < len(mine) and mine[id][1] == item[1]:
        return id
    return by_spelling.get(item, -1)


def _tail(item: Spelling, by_spelling: dict[Spelling, int]) -> int:
    """The longest token that ends a token which the draft's vocabulary lacks; 0 without one."""
    text = item[1]
    ends = (by_spelling.get((False, text[begin:])) for begin in range(len(text)))
    return next((id for id in ends if id is not None), 0)
