"""Reads a folder with prediction layers that were trained for a target, separate from its
checkpoint.

config.json identifies the target: `architectures` with a name that ends in NextN (SGLang's name for
such drafts), `num_nextn_predict_layers`, and the target's `hidden_size`, `vocab_size` and
`num_target_layers`; `draft_vocab_size` if the layers choose among some of its tokens, whose ids are
in `d2t`. Everything else about a layer, rope and sizes included, is as in the target's last layer.
The tensors have the names that they would have in the target's own checkpoint
(prediction_layers.py), numbers of layers included. Every key is supported or rejected; a missing,
unexpected or wrongly shaped tensor is named.
"""

from pathlib import Path

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.checkpoints.folder import files_by_tensor
from forerun.checkpoints.shard import MAPS
from forerun.drafts.eagle_folder import mapped_ids
from forerun.drafts.prediction_layers import PredictionLayers, open_prediction_layers
from forerun.errors import ModelError
from forerun.networks.config_json import architectures, harmless, read_json
from forerun.networks.keys import Keys

SUFFIX = "ForCausalLMNextN"
"""The end of such a draft's architecture name."""


def holds_prediction(folder: Path) -> bool:
    """Return whether a draft's configuration names prediction layers. Raises ModelError if there is
    no configuration.
    """
    return any(name.endswith(SUFFIX) for name in architectures(read_json(folder / "config.json")))


def open_prediction(folder: Path, target: Checkpoint) -> PredictionLayers:
    """Open the prediction layers in a folder, for `target`. Raises ModelError if they are damaged,
    incomplete, or for another target.
    """
    config, arch = read_json(folder / "config.json"), target.architecture
    if not any(name.endswith(SUFFIX) for name in architectures(config)):
        raise ModelError(
            f"{folder} holds no prediction layers: config.json names no architecture that ends in "
            f"{SUFFIX}"
        )
    keys = Keys(config, f"{folder}/config.json: ")
    keys.get("architectures")
    required = {
        "hidden_size": arch.hidden,
        "vocab_size": arch.vocab,
        "num_target_layers": arch.layers,
    }
    faults = [
        f"{name} is {keys.integer(name)}, the target's is {value}"
        for name, value in required.items()
        if keys.integer(name) != value
    ]
    if faults:
        raise ModelError(f"{folder}: these layers are for another target: " + "; ".join(faults))
    declared = keys.integer("num_nextn_predict_layers")
    vocab = keys.integer("draft_vocab_size", arch.vocab)
    keys.refuse_the_rest(harmless)
    files = files_by_tensor(folder, MAPS)
    named = {name: (files.pop(name), name) for name in ("d2t",) if name in files}
    if vocab != arch.vocab and not named:
        raise ModelError(
            f"{folder}: draft_vocab_size is {vocab} of {arch.vocab}, but there is no d2t"
        )
    ids = mapped_ids(vocab, arch.vocab, named, folder)
    return open_prediction_layers(target, files, declared, folder, ids)
