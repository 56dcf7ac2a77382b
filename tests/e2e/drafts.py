"""One target, and a draft of every kind beside it, as folders; and one that is often right.

made = make(folder)              paths by name
HintedModel(model, texts, 0)     a draft model that is often right
"""

import json

import numpy as np

from forerun.checkpoints.folder import FolderCheckpoint
from tests.drafters.intercepted import Oracle
from tests.drafters.kinds import other_vocabulary
from tests.drafters.prediction import random_layer, with_layers
from tests.models import tiny
from tests.parity.blocks import random_block
from tests.parity.heads import RandomHead, Target

METHODS = {
    "EAGLE": {"speculative_algorithm": "EAGLE", "draft": "eagle1"},
    "EAGLE3": {"speculative_algorithm": "EAGLE3", "draft": "eagle3"},
    "EAGLE+NGRAM": {"speculative_algorithm": "EAGLE+NGRAM", "draft": "eagle3"},
    "NAIVE": {"speculative_algorithm": "NAIVE", "draft": "eagle3"},
    "NGRAM": {"speculative_algorithm": "NGRAM"},
    "NEXTN": {"speculative_algorithm": "NEXTN", "model": "layered"},
    "NEXTN+NGRAM": {"speculative_algorithm": "NEXTN+NGRAM", "model": "layered"},
    "NEXTN, map": {"speculative_algorithm": "NEXTN", "model": "layered", "map": "map"},
    "STANDALONE, itself": {"speculative_algorithm": "STANDALONE", "draft": "target"},
    "STANDALONE+NGRAM, smaller": {
        "speculative_algorithm": "STANDALONE+NGRAM", "draft": "small",
    },
    "STANDALONE, other vocabulary": {"speculative_algorithm": "STANDALONE", "draft": "poorer"},
    "STANDALONE, map": {"speculative_algorithm": "STANDALONE", "draft": "small", "map": "map"},
    "DFLASH": {"speculative_algorithm": "DFLASH", "draft": "block"},
    "DFLASH+NGRAM, causal": {"speculative_algorithm": "DFLASH+NGRAM", "draft": "causal"},
}  # fmt: skip
"""Options of each method; draft, model and map name what `make` made."""


def make(root):
    """Folders and files by name. All but the heads are drafts of the first target; `layered` is the
    same target with a prediction layer in its file.
    """
    hf = tiny.model("llama", num_hidden_layers=6)
    small = tiny.model("llama", num_hidden_layers=3)
    small.load_state_dict(hf.state_dict(), strict=False)
    target = tiny.save_folder(hf, root / "target")
    arch, dense = FolderCheckpoint(target).architecture, Target(FolderCheckpoint(target))
    RandomHead(dense, root / "eagle1", {"algorithm": "eagle1", "fc_bias": True})
    RandomHead(dense, root / "eagle3", {})
    random_block(arch, root / "block")
    random_block(arch, root / "causal", causal=True, layers=1)
    with_layers(hf, [random_layer(hf, 5)], root / "layered", "mimo")
    tiny.save_folder(small, root / "small")
    turned = np.roll(np.arange(tiny.VOCAB), 3)
    other_vocabulary(hf, root / "poorer", turned[turned < 290])
    (root / "map").mkdir()
    kept = [id for id in range(tiny.VOCAB) if id % 5]
    (root / "map" / "map.json").write_text(json.dumps(kept))
    return root


class HintedModel(Oracle):
    """Asks another draft model, and at three of four places puts the token that comes before what
    it says: paths of every length are accepted, and wrong ones branch off them everywhere.
    """

    def intercept(self, rows, ids, log_probs):
        ids, log_probs = np.array(ids), np.array(log_probs)
        for row, (text, path) in enumerate(rows):
            if (len(text) + len(path)) % 4 == 0:
                continue
            token = self._coming(text, len(path))
            (place,) = np.nonzero(ids[row] == token)
            ids[row, place[0] if len(place) else -1] = ids[row, 0]
            ids[row, 0], log_probs[row, 0] = token, 0.0
        return ids, log_probs
