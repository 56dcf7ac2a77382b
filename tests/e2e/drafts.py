"""One target, and a draft of every kind beside it, as folders; and one that is often right.

made = make(folder)              paths by name
Hinted(model, texts, 0)          a draft model that is often right
"""

import json

import numpy as np
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from forerun.interface.draft_model import BlockCandidates, Candidates
from forerun.models.folder import FolderCheckpoint
from tests.drafters.draft_models import Told
from tests.drafters.test_nextn import with_layers
from tests.drafters.test_standalone import other_vocabulary
from tests.models import tiny
from tests.parity.blocks import random_block
from tests.parity.heads import Target, Twin

METHODS = {
    "EAGLE": {"speculative_algorithm": "EAGLE", "draft": "eagle1"},
    "EAGLE3": {"speculative_algorithm": "EAGLE3", "draft": "eagle3"},
    "EAGLE+NGRAM": {"speculative_algorithm": "EAGLE+NGRAM", "draft": "eagle3"},
    "NAIVE": {"speculative_algorithm": "NAIVE", "draft": "eagle3"},
    "NGRAM": {"speculative_algorithm": "NGRAM"},
    "NEXTN": {"speculative_algorithm": "NEXTN", "model": "layered"},
    "NEXTN, map": {"speculative_algorithm": "NEXTN", "model": "layered", "map": "map"},
    "STANDALONE, itself": {"speculative_algorithm": "STANDALONE", "draft": "target"},
    "STANDALONE, smaller": {"speculative_algorithm": "STANDALONE", "draft": "small"},
    "STANDALONE, other vocabulary": {"speculative_algorithm": "STANDALONE", "draft": "poorer"},
    "STANDALONE, map": {"speculative_algorithm": "STANDALONE", "draft": "small", "map": "map"},
    "DFLASH": {"speculative_algorithm": "DFLASH", "draft": "block"},
    "DFLASH, causal": {"speculative_algorithm": "DFLASH", "draft": "causal"},
}  # fmt: skip
"""What is asked for; draft, model and map name what `make` made."""


def make(root):
    """Folders and files by name. All but the heads are drafts of the first target; `layered` is the
    same target with a prediction layer in its file.
    """
    hf = tiny.model("llama", num_hidden_layers=6)
    small = tiny.model("llama", num_hidden_layers=3)
    small.load_state_dict(hf.state_dict(), strict=False)
    target = tiny.save_folder(hf, root / "target")
    arch, dense = FolderCheckpoint(target).architecture, Target(FolderCheckpoint(target))
    Twin(dense, root / "eagle1", {"algorithm": "eagle1", "fc_bias": True})
    Twin(dense, root / "eagle3", {})
    random_block(arch, root / "block")
    random_block(arch, root / "causal", causal=True, layers=1)
    with_layers(hf, [prediction_layer(hf)], root / "layered", "mimo")
    tiny.save_folder(small, root / "small")
    turned = np.roll(np.arange(tiny.VOCAB), 3)
    other_vocabulary(hf, root / "poorer", turned[turned < 290])
    (root / "map").mkdir()
    kept = [id for id in range(tiny.VOCAB) if id % 5]
    (root / "map" / "map.json").write_text(json.dumps(kept))
    return root


def prediction_layer(hf):
    """A random decoder layer, its three norms and its fuse."""
    torch.manual_seed(5)
    made, width = LlamaDecoderLayer(hf.config, 0), hf.config.hidden_size
    with torch.no_grad():
        for weight in made.parameters():
            spread = 0.2 if weight.dim() == 1 else 1.5 / weight.shape[-1] ** 0.5
            weight.normal_(1.0 if weight.dim() == 1 else 0.0, spread)
    norms = [1 + 0.2 * torch.randn(width) for _ in range(3)]
    return made, *norms, torch.randn(width, 2 * width) / width**0.5


class Hinted(Told):
    """Asks another draft model, and at three of four places puts the token that comes before what
    it says: paths of every length are accepted, and wrong ones branch off them everywhere.
    """

    def extend(self, extension, features):
        found = self._model.extend(extension, features)
        asked = [(slot, 0) for slot in self._read(extension)]
        return Candidates(*self._hinted(asked, found.ids, found.log_probs))

    def expand(self, level):
        found = self._model.expand(level)
        return Candidates(*self._hinted(self._below(level), found.ids, found.log_probs))

    def block(self, block):
        found = self._model.block(block)
        asked = [(slot, depth) for slot in block.slots for depth in range(block.depth)]
        flat = (len(asked), found.ids.shape[-1])
        parts = self._hinted(asked, found.ids.reshape(flat), found.log_probs.reshape(flat))
        return BlockCandidates(*(part.reshape(found.ids.shape) for part in parts))

    def _hinted(self, asked, ids, log_probs):
        ids, log_probs = np.array(ids), np.array(log_probs)
        for row, (slot, depth) in enumerate(asked):
            text = self._rows[int(slot)]
            if (len(text) + int(depth)) % 4 == 0:
                continue
            told = self._coming(text, int(depth))
            (place,) = np.nonzero(ids[row] == told)
            ids[row, place[0] if len(place) else -1] = ids[row, 0]
            ids[row, 0], log_probs[row, 0] = told, 0.0
        return ids, log_probs
