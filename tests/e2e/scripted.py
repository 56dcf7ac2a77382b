"""A toy that writes what a script says: what programs do with a tool call, and with its result.

Which text is written depends on how many results of tools stand in the conversation: `script[0]`
before the first, `script[1]` after one, and so on; the last one ever after. Then the turn ends.
Everything else is the toy's: pages, drafts, verification and sampling are real.
"""

import numpy as np

from forerun.executors.toy import END, ToyExecutor

TURN = 256
"""<|im_start|>; the answer begins behind the last one and this:"""
HEAD = b"assistant\n"
RESULT = b"<tool_response>\n"


class Scripted(ToyExecutor):
    """Every answer's most likely token is the next byte of the script, at any temperature."""

    script: tuple[str, ...] = ()

    def _logits(self, best):
        logits = np.full(self.limits.vocab, -1000, np.float32)
        logits[best] = 0
        return logits

    def _verify_row(self, prefix, trees, row, best, state):
        nodes, root = trees.nodes(row), trees.root(row)
        known = np.concatenate([prefix, trees.tokens[nodes.start : root + 1]])
        below = {root: known}
        for node in range(root, nodes.stop):
            if node != root:
                above = below[int(trees.parents[node])]
                below[node] = np.concatenate([above, trees.tokens[node : node + 1]])
            best[node] = self._next(below[node])

    def _next(self, tokens):
        """The token that follows these, int32[n]."""
        turns = np.flatnonzero(tokens == TURN)
        start = int(turns[-1]) + 1 + len(HEAD) if len(turns) else len(tokens)
        before = tokens[:start].astype(np.uint8).tobytes().count(RESULT)
        text = self.script[min(before, len(self.script) - 1)].encode()
        written = len(tokens) - start
        return text[written] if 0 <= written < len(text) else END
