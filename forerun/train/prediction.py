"""Training an MTP layer (SGLang's NEXTN) for a target that has none.

Its computation is described in forerun.drafts.prediction_layers. It is unrolled over its own
outputs as an EAGLE head is (unroll.py), since a single layer serves all depths in this way. It
reads the target's hidden state after the final norm, computed here from the last layer's residual
stream.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.drafts.prediction_folder import SUFFIX
from forerun.errors import ModelError
from forerun.executors.torch.decoder.elementwise import Rotary
from forerun.executors.torch.drafts.draft_layer import TRAINED, Attend, DraftLayer, LayerShape, Norm
from forerun.networks.arch import Architecture
from forerun.networks.layer_spec import Dense
from forerun.networks.rope import Rope
from forerun.train.loss import DraftVocabulary
from forerun.types import Ints


@dataclass(frozen=True, slots=True)
class PredictionSpec:
    """One MTP layer for `target`: a decoder layer like the target's last one.

    vocab  Vd
    """

    target: Architecture
    vocab: int

    def __post_init__(self) -> None:
        """Raise ModelError for a target for which no such layer can be trained."""
        beyond, feed_forward = self.target.beyond_llama(), self.target.layer_specs[-1].feed_forward
        if isinstance(feed_forward, Dense) and feed_forward.bias:
            beyond.append("biases in the feed-forward")
        if beyond:
            raise ModelError(
                f"a prediction layer is trained for Llama's block only, and this target has "
                f"{', '.join(beyond)}; use --method eagle3"
            )

    @property
    def hidden(self) -> int:
        """H, the target's hidden size."""
        return self.target.hidden

    @property
    def target_hidden(self) -> int:
        """H as well, since the layer is as wide as the target."""
        return self.target.hidden

    @property
    def head_size(self) -> int:
        """E of the target's attention heads."""
        return self.target.head_size

    @property
    def rope(self) -> Rope:
        """The rope of the target's last layer, which this layer uses too."""
        return self.target.layer_specs[-1].rope

    @property
    def layer(self) -> LayerShape:
        """The shape of the layer, that of the target's last one."""
        arch, spec = self.target, self.target.layer_specs[-1]
        sizes = arch.hidden, arch.heads, arch.kv_heads, arch.head_size, spec.active_width
        biases = spec.qkv_bias, spec.o_bias
        return LayerShape(*sizes, arch.norm_eps, None, ("input_layernorm",), spec.qk_norm, *biases)

    @property
    def features(self) -> tuple[int, ...]:
        """(L,): it reads the stream after the target's last layer, numbered as in DraftHead."""
        return (self.target.layers,)


class PredictionLayer(DraftLayer):
    """The MTP layer. Its parameters have DeepSeek-V3's names without the layer's prefix, except
    `lm_head`, which is a frozen copy of the target's rows.
    """

    def __init__(self, about: PredictionSpec) -> None:
        nn.Module.__init__(self)
        hidden, eps = about.hidden, about.target.norm_eps
        self.head = about
        self.enorm, self.hnorm = Norm(hidden, eps), Norm(hidden, eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.build(about.layer, TRAINED)
        self.shared_head = nn.ModuleDict({"norm": Norm(hidden, eps)})
        self.lm_head = nn.Linear(hidden, about.vocab, bias=False)
        self.lm_head.weight.requires_grad_(False)
        self.target_norm = Norm(hidden, eps).requires_grad_(False)

    @property
    def final_norm(self) -> Norm:
        """The norm whose result is the input of the output head and of the next draft step."""
        norm = self.shared_head["norm"]
        assert isinstance(norm, Norm)
        return norm

    def fuse(self, features: Tensor) -> Tensor:
        """Return the target's hidden states [...,H] after its final norm, from features [...,H],
        its last residual stream.
        """
        made: Tensor = self.target_norm(features)
        return made

    def forward(
        self,
        tokens: Tensor,
        embedding: Tensor,
        hidden: Tensor,
        rotary: Rotary,
        attend: Attend,
        only: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run one draft step over N rows. Returns the inputs of the output head and of the next
        step, which are the same tensor [R,H]; R = N, or the number of rows in `only`.

        tokens     int64[N] the tokens to read
        embedding  [V,H] the target's
        hidden     [N,H] of each token: `fuse`'s result, or an earlier step's output
        rotary     cos and sin of the rows' positions
        attend     the layer's attention; all N rows provide keys and values
        only       int64[R] the rows that are computed to the end; None = all
        """
        parts, eps, norms = self.parts, self.shape.norm_eps, (self.enorm.weight, self.hnorm.weight)
        x = self.eh_proj(parts.draft_inputs(tokens, embedding, hidden, norms, eps))
        normed = parts.norm(x, self.entry_norm(), eps)
        residual, fed = self.run(normed, x, rotary, attend, 0, only)
        _, out = parts.add_norm(residual, fed, self.final_norm.weight, eps)
        return out, out


@torch.no_grad()
def start_layer(
    layer: PredictionLayer, checkpoint: Checkpoint, vocabulary: DraftVocabulary, seed: int
) -> None:
    """Initialise `layer` in place: the target's last layer, which reads almost only the hidden
    state, and the target's norms and output rows. `seed` draws the small random weights. Raises
    ModelError for a missing tensor.
    """
    generator = torch.Generator().manual_seed(seed)
    about = layer.head

    def stored(name: str) -> Tensor:
        return torch.from_numpy(checkpoint.tensor(name).copy())

    for name, parameter in layer.named_parameters():
        if name.startswith(("input_layernorm", "self_attn", "post_attention", "mlp")):
            parameter.copy_(stored(f"model.layers.{about.target.layers - 1}.{name}"))
    small = torch.randn(layer.eh_proj.weight.shape, generator=generator) * 0.01
    small[:, about.hidden :] += torch.eye(about.hidden)
    layer.eh_proj.weight.copy_(small)
    final = stored("model.norm.weight")
    layer.final_norm.weight.copy_(final)
    layer.target_norm.weight.copy_(final)
    layer.lm_head.weight.copy_(vocabulary.rows)


def export_prediction(layer: PredictionLayer, target_ids: Ints, folder: Path) -> None:
    """Write config.json and model.safetensors (bfloat16) to `folder`, as
    forerun.drafts.prediction_folder reads them.

    target_ids  int32[Vd] ascending; stored as offsets d2t unless they are all ids

    Raises OSError if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    about, frozen = layer.head, ("lm_head.", "target_norm.")
    prefix = f"model.layers.{about.target.layers}."
    tensors = {
        prefix + name: parameter.detach().cpu().to(torch.bfloat16).contiguous()
        for name, parameter in layer.named_parameters()
        if not name.startswith(frozen)
    }
    config = {
        "architectures": [f"{about.target.family.title().replace('_', '')}{SUFFIX}"],
        "num_nextn_predict_layers": 1,
        "num_target_layers": about.target.layers,
        "hidden_size": about.hidden,
        "vocab_size": about.target.vocab,
    }
    if about.vocab != about.target.vocab:
        config["draft_vocab_size"] = about.vocab
        offsets = target_ids.astype(np.int64) - np.arange(about.vocab)
        tensors["d2t"] = torch.from_numpy(offsets)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
