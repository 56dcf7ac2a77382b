"""An EAGLE draft head as pure functions, which compute what torch/eagle.py's do, and the model that
runs them with its target (level_model.py).

Weights are in params["draft"] under the last parts of their canonical names
(forerun.drafts.eagle_config), with `ids` int32[Vd], `frequencies` float32[E/2] and, where the
head has one of its own, `embed` [V,H]. They are sharded like the target's if heads,
columns or draft vocabulary divide; what does not divide is on every shard.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.drafts.eagle_config import DraftHead, expected_draft_tensors
from forerun.drafts.eagle_folder import DraftFile
from forerun.errors import ModelError
from forerun.executors.draft_model import declared_head
from forerun.executors.jax.draft_models.level_model import JaxLevelModel
from forerun.executors.jax.drafts.draft_network import Ran
from forerun.executors.jax.executor import JaxExecutor
from forerun.executors.jax.network.attention import Layer
from forerun.executors.jax.network.decoder import Attend, JaxDecoder
from forerun.executors.jax.network.kv import NetworkSizes, sanitised
from forerun.executors.jax.network.layers import product, rms_norm, rotate, rotation, swiglu
from forerun.executors.jax.network.weights import Params
from forerun.networks.layer_spec import AttentionSpec


class JaxEagleHead(NamedTuple):
    """A DraftNetwork of a head's description, and the target's."""

    about: DraftHead
    target: JaxDecoder

    @property
    def sizes(self) -> NetworkSizes:
        """Sizes of the arrays that the head keeps between steps, in addition to the target's."""
        about = self.about
        return NetworkSizes(
            features=about.features,
            width=about.target_hidden * len(about.features),
            cache=about.cache,
            hidden=about.hidden,
            read=about.hidden,
            vocab=about.vocab,
            parameters=about.parameters,
            cut=self._by_heads,
        )

    @property
    def fixed(self) -> tuple[Any, ...]:
        """The values that its functions depend on; see DraftNetwork."""
        return self.about, self.target

    @property
    def _spec(self) -> AttentionSpec:
        """The attention of its one layer."""
        return AttentionSpec(self.about.head_size**-0.5)

    @property
    def _by_heads(self) -> bool:
        """Whether attention is sharded by head."""
        shards = self.target.sharding.shards
        return self.about.heads % shards == 0 and self.about.kv_heads % shards == 0

    def enter(self, params: Params, features: Array) -> Array:
        """Return hidden states [...,H] from the target's concatenated features [...,F*H]: by
        EAGLE's fused projection (arXiv 2503.01840), or for EAGLE-1 by the target's final norm.
        """
        about, weights = self.about, params["draft"]
        if about.algorithm == "eagle1":
            return rms_norm(features, params["norm"], self.target.arch.norm_eps)
        if about.feature_norm == "joint":
            features = rms_norm(features, weights["input_norm"], about.norm_eps)
        if about.feature_norm == "each":
            chunks = jnp.split(features, len(about.features), -1)
            normed = [
                rms_norm(chunk, weights[f"fc_norm.{index}"], about.norm_eps)
                for index, chunk in enumerate(chunks)
            ]
            features = jnp.concatenate(normed, -1)
        return product(features, weights["fc"], weights.get("fc.bias"))

    def run(
        self, params: Params, tokens: Array, hidden: Array, position: Array, attend: Attend
    ) -> Ran:
        """Run one draft step over target ids tokens int32[R,N] with hidden states [R,N,H] at
        position int32[R,N]: one decoder layer on both.
        """
        about, weights = self.about, params["draft"]
        embedded = self._embed(params, tokens)
        if about.algorithm == "eagle1":
            fused = jnp.concatenate([embedded, hidden], -1)
            residual = x = product(fused, weights["fc"], weights.get("fc.bias"))
        else:
            normed = self._normed(weights, "hidden_norm", hidden)
            beside = self._normed(weights, "input_layernorm", embedded)
            x = jnp.concatenate([beside, normed], -1)
            residual = normed if about.normed_residual else hidden
        mixed, keys, values = self._attention(weights, x, position, attend)
        residual = residual + mixed
        fed = self._feed_forward(
            weights, self._normed(weights, "post_attention_layernorm", residual)
        )
        output = residual + fed
        read = output
        if about.algorithm == "eagle3":
            read = self._normed(weights, "norm", output)
            output = read if about.normed_feedback else output
        return Ran(read, output, keys[None], values[None])

    def logits(self, params: Params, read: Array) -> Array:
        """Return float32[n,Vd] from `Ran.read`, [n,H]."""
        logits = product(read, params["draft"]["lm_head"].T).astype(jnp.float32)
        return self.target.sharding.put(logits, None, None)

    def _embed(self, params: Params, tokens: Array) -> Array:
        own = params["draft"].get("embed")
        if own is None:
            return self.target.sharding.put(self.target.embed(params, tokens), None, None, None)
        found: Array = jnp.take(own, tokens, axis=0, mode="clip")
        return found

    def _normed(self, weights: Params, name: str, x: Array) -> Array:
        return rms_norm(x, weights[name], self.about.norm_eps)

    def _attention(
        self, weights: Params, x: Array, position: Array, attend: Attend
    ) -> tuple[Array, Array, Array]:
        about, put = self.about, self.target.sharding.put
        cos, sin = rotation(position, weights["frequencies"], about.rope.attention_factor)
        axis = "model" if self._by_heads else None

        def heads(name: str, count: int) -> Array:
            projected = product(x, weights[f"{name}_proj"])
            return put(projected.reshape(*x.shape[:2], count, -1), None, None, axis, None)

        q, k = heads("q", about.heads), heads("k", about.kv_heads)
        k, v = sanitised(rotate(k, cos, sin), heads("v", about.kv_heads))
        context = attend(Layer(0, self._spec), rotate(q, cos, sin), k, v)
        context = context.reshape(*x.shape[:2], -1)
        return put(product(context, weights["o_proj"]), None, None, None), k, v

    def _feed_forward(self, weights: Params, x: Array) -> Array:
        wide = swiglu(product(x, weights["gate_proj"]), product(x, weights["up_proj"]))
        fed: Array = product(wide, weights["down_proj"])
        return self.target.sharding.put(fed, None, None, None)


def load_head(head: JaxEagleHead, checkpoint: Checkpoint, draft: DraftFile, dtype: Any) -> Params:
    """Load params["draft"] of an EAGLE head onto the devices: matrices in `dtype`, vectors in
    float32. The output head is the target's rows if the draft has none of its own.

    Raises ModelError for a head without an embedding of its width, and what reading a tensor
    raises.
    """
    about, sharding = head.about, head.target.sharding

    def put(name: str, values: Any) -> Array:
        placed: Array = jax.device_put(
            np.array(values, order="C"), _where(head, name, np.ndim(values))
        )
        return placed

    params: Params = {
        "ids": put("ids", draft.target_ids.astype(np.int32)),
        "frequencies": put("frequencies", about.rope.frequencies(about.head_size)),
    }
    for name in expected_draft_tensors(about):
        if name != "d2t":
            values = draft.tensor(name)
            array = np.asarray(values, jnp.dtype(dtype) if values.ndim > 1 else np.float32)
            short = _short(name)
            turned = array.ndim > 1 and short != "lm_head"
            params[short] = put(short, array.T if turned else array)
    if not about.trained_head:
        rows = checkpoint.tensor(head.target.arch.head_tensor)[draft.target_ids]
        params["lm_head"] = put("lm_head", np.asarray(rows, jnp.dtype(dtype)))
    own = _own_embedding(draft)
    if own is not None:
        params["embed"] = jax.device_put(np.array(own, jnp.dtype(dtype)), sharding.replicated)
    return params


def _short(name: str) -> str:
    """Return the short name of a parameter: fc.weight -> fc, layers.0.mlp.up_proj.weight ->
    up_proj, fc_norm.1.weight -> fc_norm.1.
    """
    plain = name.removesuffix(".weight")
    for prefix in ("layers.0.self_attn.", "layers.0.mlp.", "layers.0."):
        plain = plain.removeprefix(prefix)
    return plain


def _where(head: JaxEagleHead, name: str, dimensions: int) -> Any:
    """Return the sharding of a parameter with this short name."""
    about, sharding = head.about, head.target.sharding
    cut = {
        "lm_head": about.vocab % sharding.shards == 0,
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), head._by_heads),
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), about.ffn % sharding.shards == 0),
    }
    if not cut.get(name, False):
        return sharding.of(*[None] * dimensions)
    return sharding.weight("head" if name == "lm_head" else name, dimensions)


def _own_embedding(draft: DraftFile) -> Any:
    """Return the head's embedding if the target's is not as wide as the head, else None."""
    head, name = draft.head, "embed_tokens.weight"
    if head.hidden == head.target_hidden:
        return None
    if name not in draft.files or not head.trained_head:
        raise ModelError(
            f"{draft.path}: a head of width {head.hidden} beside a target of width "
            f"{head.target_hidden} needs {name} and lm_head.weight of its own"
        )
    return draft.tensor(name)


class JaxEagleModel(JaxLevelModel):
    """The DraftModel of an EAGLE head on XLA. Raises ModelError for a head without an embedding of
    its width, MemoryPlanError if it does not fit.
    """

    def __init__(self, executor: JaxExecutor, checkpoint: Checkpoint, draft: DraftFile) -> None:
        head = JaxEagleHead(draft.head, executor.decoder)
        super().__init__(
            executor,
            head,
            declared_head(draft, executor.limits.max_nodes),
            lambda: load_head(head, checkpoint, draft, executor.dtype),
        )
