"""A block drafter as pure functions; what they compute is torch/block.py's.

Weights are in params["draft"], copied to every device: `fc`, `hidden_norm`, `norm`, `layers` (a
dictionary each, by the last parts of the canonical names), `ids`, `frequencies`; `mask_embedding`,
`embed` [V,H] and `head` [Vd,H] where they are not the target's; `pairs` (pairs.py) where tokens
depend on those above.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.drafts.block_config import KERNEL_SIZE, PAIRS, BlockHead, expected_block_tensors
from forerun.drafts.block_folder import BlockFile
from forerun.executors.jax.drafts.pairs import load_pairs
from forerun.executors.jax.network.attention import Layer
from forerun.executors.jax.network.decoder import Attend, JaxDecoder
from forerun.executors.jax.network.kv import NetworkSizes, sanitised
from forerun.executors.jax.network.layers import (
    product,
    rms_norm,
    rotate,
    rotation,
    softcapped,
    swiglu,
)
from forerun.executors.jax.network.weights import Params
from forerun.executors.pair_scores import PairScores
from forerun.networks.layer_spec import AttentionSpec


class BlockNetwork(NamedTuple):
    """The constants of a block drafter: its description, and the target's."""

    about: BlockHead
    target: JaxDecoder

    @property
    def sizes(self) -> NetworkSizes:
        """Sizes of the arrays that the drafter keeps between steps, in addition to the target's."""
        about = self.about
        return NetworkSizes(
            features=about.features,
            width=about.target_hidden * len(about.features),
            cache=about.cache,
            hidden=0,
            read=0,
            vocab=about.top_k or about.vocab,
            parameters=about.parameters + about.tables,
            cut=False,
            block=about.depth,
            confident=about.confidence > 0,
        )

    @property
    def fixed(self) -> tuple[Any, ...]:
        """The values that its functions depend on; see DraftNetwork."""
        return self.about, self.target

    @property
    def first(self) -> int:
        """Index of the first place of a block that predicts a draft token: 0 if the root's own
        place does (`anchored`), else 1.
        """
        return 0 if self.about.anchored else 1

    def target_keys_values(
        self, params: Params, features: Array, position: Array
    ) -> tuple[Array, Array]:
        """Return keys and values, each [layers,R,N,G,E], of the target's features, for the
        drafter's cache.

        features  [R,N,F*H] concatenated aux hidden states
        position  int32[R,N]
        """
        weights = params["draft"]
        context = self._normed(weights, "hidden_norm", product(features, weights["fc"]))
        pairs = [
            self._keys_values(layer, context, self._rotary(params, position))
            for layer in weights["layers"]
        ]
        keys, values = (jnp.stack(part) for part in zip(*pairs, strict=True))
        return keys, values

    def block(self, params: Params, roots: Array, position: Array, attend: Attend) -> Array:
        """Return the output head's input, [R,places,H], for one block below each root, in one pass.

        roots     int32[R] target ids of the decided tokens that begin the blocks; mask tokens
                  follow
        position  int32[R,places]
        attend    attention over the drafter's pages and the block itself
        """
        about, weights = self.about, params["draft"]
        tokens = jnp.full(position.shape, max(about.mask, 0), jnp.int32).at[:, 0].set(roots)
        embedding = weights if "embed" in weights else params
        x = self.target.embed(embedding, tokens)
        x = self.target.sharding.put(x, None, None, None)
        if about.embedding_scale is not None:
            x = x * np.asarray(about.embedding_scale, x.dtype)
        if about.own_mask:
            masks = jnp.broadcast_to(weights["mask_embedding"], x[:, 1:].shape).astype(x.dtype)
            x = jnp.concatenate([x[:, :1], masks], 1)
        rotary = self._rotary(params, position)
        windows = about.windows or (None,) * about.layers
        for number, (layer, window) in enumerate(zip(weights["layers"], windows, strict=True)):
            which = Layer(number, AttentionSpec(about.head_size**-0.5, window))

            def mixed(normed: Array, layer: Params = layer, which: Layer = which) -> Array:
                queries = self._heads(layer, "q", normed, rotary)
                context = attend(which, queries, *self._keys_values(layer, normed, rotary))
                return product(context.reshape(*normed.shape[:2], -1), layer["o_proj"])

            def fed(normed: Array, layer: Params = layer) -> Array:
                opened = product(normed, layer["gate_proj"]), product(normed, layer["up_proj"])
                return product(swiglu(*opened), layer["down_proj"])

            normed = self._normed(layer, "input_layernorm", x)
            x = x + self._around(layer, "attention_conv", normed, mixed)
            normed = self._normed(layer, "post_attention_layernorm", x)
            x = x + self._around(layer, "mlp_conv", normed, fed)
        return self._normed(weights, "norm", x)

    def logits(self, params: Params, read: Array) -> Array:
        """Return logits float32[n,Vd] for the output head's input [n,H]."""
        about, weights = self.about, params["draft"]
        if "head" in weights:
            found = product(read, weights["head"].T).astype(jnp.float32)
        else:
            found = self.target.read(params, read)
        return softcapped(found * np.float32(about.logit_scale), about.logit_cap or None)

    def _around(
        self, layer: Params, name: str, normed: Array, work: Callable[[Array], Array]
    ) -> Array:
        """Return `work` applied to blocks normed [R,places,H], between the layer's convolutions of
        that name, if it has them: torch/drafts/block.py.
        """
        group = self.about.convolved
        if not group:
            return work(normed)
        dynamic = product(normed, layer[f"{name}.kernel_projection"])
        dynamic = dynamic.reshape(*normed.shape[:2], 2, KERNEL_SIZE, -1)
        kernels = layer[f"{name}.base_kernel"] + jnp.repeat(dynamic, group, -1)

        def convolved(x: Array, side: int) -> Array:
            before = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))
            kernel = kernels[:, :, side]
            mixed: Array = kernel[:, :, 0] * x + kernel[:, :, 1] * before
            return mixed.astype(x.dtype)

        return convolved(work(convolved(normed, 0)), 1)

    def _rotary(self, params: Params, position: Array) -> tuple[Array, Array]:
        factor = self.about.rope.attention_factor
        return rotation(position, params["draft"]["frequencies"], factor)

    def _heads(self, layer: Params, part: str, x: Array, rotary: tuple[Array, Array]) -> Array:
        """Return queries or keys [R,N,heads,E], normalised if the drafter does so, and rotated."""
        found = product(x, layer[f"{part}_proj"])
        heads = found.reshape(*x.shape[:2], -1, self.about.head_size)
        if self.about.qk_norm:
            heads = self._normed(layer, f"{part}_norm", heads)
        return rotate(heads, *rotary)

    def _keys_values(
        self, layer: Params, x: Array, rotary: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        """Return keys and values, each [R,N,G,E], keys rotated, of features or of the block's
        states.
        """
        values = product(x, layer["v_proj"]).reshape(*x.shape[:2], -1, self.about.head_size)
        return sanitised(self._heads(layer, "k", x, rotary), values)

    def _normed(self, weights: Params, name: str, x: Array) -> Array:
        return rms_norm(x, weights[name], self.about.norm_eps)


_PARTS = "self_attn", "mlp"
_OWN = {"embed_tokens": "embed", "lm_head": "head"}


def load_block(
    network: BlockNetwork,
    checkpoint: Checkpoint,
    draft: BlockFile,
    scores: PairScores | None,
    dtype: Any,
) -> Params:
    """Load params["draft"] of a block drafter to the devices, matrices in `dtype`, vectors in
    float32. A drafter with a vocabulary of its own but no head gets the target's rows of it, read
    from `checkpoint`. Raises ModelError if a tensor cannot be read.
    """
    about, sharding = network.about, network.target.sharding

    def put(values: Any, turned: bool = False) -> Array:
        wide = np.ndim(values) > 1
        values = values.T if wide and turned else values
        array = np.array(values, jnp.dtype(dtype) if wide else np.float32, order="C")
        placed: Array = jax.device_put(array, sharding.replicated)
        return placed

    layers: list[Params] = [{} for _ in range(about.layers)]
    params: Params = {
        "ids": jax.device_put(draft.target_ids.astype(np.int32), sharding.replicated),
        "frequencies": put(about.rope.frequencies(about.head_size)),
    }
    for name in expected_block_tensors(about):
        if name.startswith(PAIRS):
            continue
        plain = name.removesuffix(".weight")
        if plain.startswith("layers."):
            _, number, part, *rest = plain.split(".")
            short = rest[-1] if rest and part in _PARTS else ".".join([part, *rest])
            layers[int(number)][short] = put(draft.tensor(name), np.ndim(draft.tensor(name)) == 2)
        elif plain != "d2t":
            params[_OWN.get(plain, plain)] = put(draft.tensor(name), plain == "fc")
    if not about.own_head and about.vocab != about.target_vocab:
        whole = checkpoint.tensor(checkpoint.architecture.head_tensor)
        params["head"] = put(whole[draft.target_ids])
    if scores is not None:
        params["pairs"] = load_pairs(scores, dtype, sharding)
    return {**params, "layers": tuple(layers)}
