"""What drafts, of every kind, beside the target that it is for: as folders, made when they are
needed.

A reference gives log-probabilities without any cache: (text, draft tokens below it) ->
float32[depth + 1,Vd], of what follows the text and each of the draft tokens.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import tokenizers
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from forerun.checkpoints.folder import FolderCheckpoint
from forerun.drafts.eagle_config import head_for
from forerun.executors.torch.drafts.eagle import EagleHead
from forerun.train.export import export_head
from tests.drafters import assistants
from tests.drafters.prediction import counting, dense, in_gguf, random_layer, with_layers
from tests.models import tiny
from tests.parity.blocks import PAIRED, VARIANTS, dense_block, dense_pairs, random_block, streams
from tests.parity.heads import RandomHead, Target


@dataclass(frozen=True)
class Kind:
    """model, draft  folders, or a file; draft None: it lies in the model's own
    depth         tokens of its chains
    reference     None: nothing to compare with
    others        references of what it would be read wrongly: never near
    network       what the target computes, where other folders hold the same
    """

    method: str
    model: Path
    draft: Path | None = None
    depth: int = 3
    reference: Callable | None = None
    others: tuple[Callable, ...] = ()
    network: str | None = None

    @property
    def text(self):
        """The same for kinds whose targets write the same texts."""
        return self.network or str(self.model)


class Kinds:
    """By name: the family, and which of it (see MAKERS)."""

    def __init__(self, root):
        self.root, self._made = root, {}

    def __getitem__(self, name):
        if name not in self._made:
            family, _, which = name.partition(", ")
            kind = MAKERS[family](self, which)
            said = kind.reference and lru_cache(4096)(kind.reference)
            self._made[name] = replace(kind, reference=said)
        return self._made[name]

    def folder(self, name):
        return self.root / name.replace(" ", "_").replace("'", "")

    @cached_property
    def hf(self):
        return tiny.model("llama", num_hidden_layers=4, max_position_embeddings=512)

    @cached_property
    def target(self):
        return tiny.save_folder(self.hf, self.folder("target"))

    @cached_property
    def layered(self):
        """A target of prediction layers, whose folder has none."""
        return tiny.model("llama")


def blind(hf, *layers):
    """The last token alone moves it then, by no norm: a scale moves no argmax."""
    with torch.no_grad():
        hf.model.norm.weight.fill_(float(hf.config.model_type not in tiny.DELTAS))
        for layer in (*hf.model.layers, *layers):
            net = hasattr(layer, "linear_attn")
            (layer.linear_attn.out_proj if net else layer.self_attn.o_proj).weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return hf


# --- whole models ------------------------------------------------------------------------------


def standalone(kinds, which):
    """The target itself, also as a file and under another numbering of the same tokens; its first
    layers; itself with a vocabulary that lacks some.
    """
    small = kinds.hf
    turned = np.roll(np.arange(tiny.VOCAB), 3)  # The token at i is the target's turned[i].
    folder = kinds.folder(f"draft {which}")
    if which == "itself":
        draft = kinds.target
    elif which == "GGUF":
        draft = tiny.write_gguf(kinds.hf, folder.with_suffix(".gguf"))
    elif which == "first layers":
        small = tiny.model("llama", num_hidden_layers=3, max_position_embeddings=512)
        small.load_state_dict(kinds.hf.state_dict(), strict=False)
        draft = tiny.save_folder(small, folder)
    else:
        ids = turned if which == "renumbered" else turned[turned < 290]
        draft = other_vocabulary(kinds.hf, folder, ids)

    @torch.no_grad()
    def reference(text, path):
        logits = small(torch.tensor([[*text, *path]])).logits[0, len(text) - 1 :]
        return logits.log_softmax(-1).numpy()

    return Kind("STANDALONE", kinds.target, draft, reference=reference)


def other_vocabulary(hf, folder, ids):
    """The same network over the target's tokens `ids`, in this order."""
    layers = hf.config.num_hidden_layers
    other = tiny.model("llama", num_hidden_layers=layers, vocab_size=len(ids), eos_token_id=None)
    state = dict(hf.state_dict())
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = state[name][torch.from_numpy(ids)]
    other.load_state_dict(state)
    tiny.save_folder(other, folder)
    spec = json.loads((folder / "tokenizer.json").read_text())
    place = {int(id): position for position, id in enumerate(ids)}
    vocab = {text: place[id] for text, id in spec["model"]["vocab"].items() if id in place}
    spec["model"]["vocab"] = vocab
    spec["model"]["merges"] = [
        pair for pair in spec["model"]["merges"] if {*pair, "".join(pair)} <= vocab.keys()
    ]
    spec["added_tokens"] = [
        token | {"id": place[token["id"]]} for token in spec["added_tokens"] if token["id"] in place
    ]
    tokenizers.Tokenizer.from_str(json.dumps(spec))
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return folder


# --- prediction layers -------------------------------------------------------------------------


def prediction(hf, layers, folder, naming, depth=3, zeroed=False, centred=False):
    """zeroed: as `dense` has it; where it is, nothing is near what reads the first token or carries
    states from before the final norm.
    naming: "GGUF" makes a file. centred: files have the layers' own norms without their 1.
    """

    def read(zeroed, raw=False):
        def reference(text, path):
            logits = dense(hf, layers, naming == "mimo", text, path, zeroed, raw)
            return torch.stack(logits).log_softmax(-1).detach().numpy()

        return reference

    stored = layers
    if centred:
        stored = [(made, *(norm - 1 for norm in norms), fuse) for made, *norms, fuse in layers]
    model = (
        in_gguf(hf, stored, folder.with_suffix(".gguf"))
        if naming == "GGUF"
        else with_layers(hf, stored, folder, naming)
    )
    others = (read(False), read(True, raw=True)) if zeroed else ()
    # A layer is no part of the target; on the core a file of floats stays one.
    network = f"{hf.config.model_type}{' in GGUF' * (naming == 'GGUF')}"
    return Kind("NEXTN", model, None, depth, read(zeroed), others, network)


def one_layer(kinds, naming):
    """A random one."""
    hf = kinds.layered
    return prediction(hf, [random_layer(hf, 5)], kinds.folder(f"one {naming}"), naming)


def three_layers(kinds, naming):
    """Random ones, one for each depth, and one token beyond them; Qwen3-Next's share their norms
    and fuse.
    """
    hf = kinds.layered
    layers = [random_layer(hf, 5 + depth) for depth in range(3)]
    if naming == "qwen3-next":
        layers = [(made, *layers[0][1:]) for made, *_ in layers]
    return prediction(hf, layers, kinds.folder(f"three {naming}"), naming, 4)


def family_layer(kinds, family, file=False):
    """A family's own layer: GLM-4.5's, with experts, whose first row reads no token; DeepSeek's,
    with latents.
    """
    hf = tiny.model(family, max_position_embeddings=512)
    torch.manual_seed(3)
    made = type(hf.model.layers[-1])(hf.config, hf.config.num_hidden_layers - 1)
    with torch.no_grad():
        for name, weight in [*made.named_parameters(), *made.named_buffers()]:
            centre = float("norm" in name and family not in tiny.DELTAS)
            weight.normal_(centre, 0.2 if weight.dim() == 1 else 0.15)
    width = hf.config.hidden_size
    norms = [1 + 0.2 * torch.randn(width) for _ in range(3)]
    layer = made, *norms, torch.randn(width, 2 * width) / 8
    if family in tiny.DELTAS and not file:
        return prediction(hf, [layer], kinds.folder(family), "qwen3-next", centred=True)
    naming, folder = (
        ("GGUF", kinds.folder(f"file of {family}")) if file else ("deepseek", kinds.folder(family))
    )
    return prediction(hf, [layer], folder, naming, zeroed=family == "glm4_moe")


def family_file(kinds, family):
    """The same as llama.cpp keeps them."""
    return family_layer(kinds, family, file=True)


def counting_layers(kinds, which):
    """Right for their depth alone: in order, the last two swapped, the first alone."""
    hf, layers = counting()
    order = {"right": (0, 1, 2), "swapped": (0, 2, 1), "one": (0,)}[which]
    layers = [layers[n] for n in order]
    return Kind("NEXTN", with_layers(hf, layers, kinds.folder(f"by {which}"), "deepseek"), depth=4)


# --- heads -------------------------------------------------------------------------------------


def right(kinds, method):
    """A target that looks at the last token alone, with a prediction layer, and an EAGLE-1 head;
    both do the same, so that what they propose is what the target says.
    """
    root = kinds.folder("right")
    hf = tiny.model("llama", num_hidden_layers=6, max_position_embeddings=512)
    layer, width = LlamaDecoderLayer(hf.config, 0), hf.config.hidden_size
    blind(hf, layer)
    fuse = torch.cat([torch.eye(width), torch.zeros(width, width)], 1)
    if not (root / "target").exists():
        ones = [torch.ones(width) for _ in range(3)]
        with_layers(hf, [(layer, *ones, fuse)], root / "target", "deepseek")
        arch = FolderCheckpoint(root / "target").architecture
        about = head_for(arch, arch.vocab, "eagle1")
        head = EagleHead(about)
        with torch.no_grad():
            for weight in (head.layer.self_attn.o_proj.weight, head.layer.mlp.down_proj.weight):
                weight.zero_()
            head.fc.weight.copy_(fuse)
        export_head(head, np.arange(arch.vocab, dtype=np.int32), root / "head")
    target = root / "target"
    draft = {"EAGLE": root / "head", "NEXTN": None, "STANDALONE": target}[method]
    return Kind(method, target, draft)


def qwen(kinds, count):
    """Qwen3.5 that looks at the last token alone, with one prediction layer for all depths, or one
    for each, which share norms and fuse: all propose what the target says.
    """
    hf = tiny.model("qwen3_5_text", max_position_embeddings=512)
    layers = [type(hf.model.layers[3])(hf.config, 3) for _ in range(int(count))]
    blind(hf, *layers)
    width = hf.config.hidden_size
    fuse = torch.cat([torch.eye(width), torch.zeros(width, width)], 1)
    own = *(torch.zeros(width) for _ in range(3)), fuse
    folder = kinds.folder(f"qwen {count}")
    return Kind("NEXTN", with_layers(hf, [(each, *own) for each in layers], folder, "qwen3-next"))


def random_head(kinds, _):
    """An untrained EAGLE-3 head, which knows every second token."""
    hf = tiny.model("llama", num_hidden_layers=4, max_position_embeddings=512)
    model = tiny.save_folder(hf, kinds.folder("deep"))
    dense_head = RandomHead(Target(FolderCheckpoint(model)), kinds.folder("random head"), {})

    def reference(text, path):
        return dense_head.log_probs([*text, *path], len(path) + 1, only=len(text) - 2)[
            :, len(text) - 2
        ].numpy()

    return Kind("EAGLE", model, dense_head.folder, reference=reference)


# --- Gemma 4's assistant -------------------------------------------------------------------------

BLIND = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
BLIND |= {"final_logit_softcapping": None, "num_hidden_layers": 2, "max_position_embeddings": 512}
BLIND |= {"layer_types": ["sliding_attention", "full_attention"]}


def assistant(kinds, which):
    """A random one, beside layers that read others' keys and values, or make values of keys, or as
    a file; one that is right, and one that is right for every second token.
    """
    folder = kinds.folder(f"assistant {which}")
    if which in ("right", "half"):
        hf = blind(tiny.model("gemma4_text", **BLIND))
        made, reference, others = assistants.right_for(hf, 1 + (which == "half")), None, ()
    else:
        keyed = {"attention_k_eq_v": True, "num_global_key_value_heads": 1} | BLIND
        changes = keyed if which == "values of keys" else {"max_position_embeddings": 512}
        hf = tiny.model("gemma4_text", **changes)
        made = assistants.beside(hf, ordered=which == "ordered")

        def read(moving):
            def logits(text, path):
                scores = assistants.dense(hf, made, text, path, moving)
                if which == "ordered":  # Unscored tokens have what the least of the others has.
                    scores[scores == scores.min(-1, keepdim=True).values] = -torch.inf
                return scores.log_softmax(-1).numpy()

            return logits

        reference, others = read(0), (read(1),)
    target = kinds.folder("blind gemma" if reference is None else f"target of {which}")
    if not target.exists():
        tiny.save_folder(hf, target)
    if which == "GGUF":
        draft = assistants.in_gguf(made, folder.with_suffix(".gguf"))
    else:
        made.save_pretrained(folder)
        draft = folder
    return Kind("FROZEN_KV_MTP", target, draft, reference=reference, others=others)


# --- blocks ------------------------------------------------------------------------------------


def block(kinds, variant):
    """A random block drafter (tests/parity/blocks.py); what it says of each depth does not depend
    on what stands above, but for those that are PAIRED, which are far from what they say without.
    """
    arch = FolderCheckpoint(kinds.target).architecture
    changes = (VARIANTS | PAIRED)[variant]
    draft = random_block(arch, kinds.folder(f"block {variant}"), **changes)
    states = lru_cache(64)(lambda text: streams(kinds.hf, text))

    @lru_cache(64)
    def below(text):
        return dense_block(draft, kinds.hf, text, states(text)).numpy()

    def marginals(text, path):
        return below(tuple(text))

    def pairs(text, path):
        return dense_pairs(draft, kinds.hf, text, path, states(tuple(text)))[0].numpy()

    reference, others = (pairs, (marginals,)) if variant in PAIRED else (marginals, ())
    return Kind("DFLASH", kinds.target, draft.path, draft.head.depth, reference, others)


MAKERS = {
    "STANDALONE": standalone,
    "NEXTN": one_layer,
    "NEXTN by depth": three_layers,
    "NEXTN of": family_layer,
    "NEXTN in GGUF": family_file,
    "counting": counting_layers,
    "right": right,
    "qwen": qwen,
    "ASSISTANT": assistant,
    "EAGLE": random_head,
    "DFLASH": block,
}
