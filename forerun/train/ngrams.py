"""Counts a target's answers into an n-gram table (forerun.drafts.ngram_table)."""

from pathlib import Path

import numpy as np

from forerun.drafts.ngram_counts import SEEN, count_ngrams, write_ngrams
from forerun.train.corpus import Corpus

JUDGED = 4000
"""Held-out tokens that a table is evaluated on."""


def make_table(corpus: Corpus, vocab: int, folder: Path) -> float:
    """Count the training chats' answers, write the table to `folder`, and evaluate it on held-out
    answers. Returns the share, 0 to 1, of held-out answer tokens that its best prediction hits. If
    nothing could be counted, returns 0 and writes no file. Raises OSError if the disk refuses.
    """
    end = int(corpus.starts[corpus.chats - corpus.held_out])
    tokens, loss_mask = np.asarray(corpus.tokens), np.asarray(corpus.loss_mask)
    starts = corpus.starts[: corpus.chats - corpus.held_out + 1]
    table = count_ngrams(tokens[:end], loss_mask[:end], starts, vocab)
    write_ngrams(table, folder)
    hits = judged = 0
    for chat in corpus.held:
        span = corpus.span(chat)
        for at in corpus.scored(chat).tolist():
            before = tokens[span.start + max(0, at + 1 - len(SEEN)) : span.start + at + 1]
            likely = table.follow(before.tolist())
            hits += bool(likely) and max(likely, key=likely.__getitem__) == tokens[span][at + 1]
            judged += 1
        if judged >= JUDGED:
            break
    return hits / max(judged, 1)
