"""The target's own prediction layer as pure functions, which compute what
drafts/prediction_layers.py says, and the model that runs them with the target (level_model.py).

Weights are in params["draft"]: `embedding_norm`, `hidden_norm`, `norm` [H], `fuse` [2H,H], the
parameters of the layer under `layer`, `ids`, `frequencies`; `embed` [V,H] and `head` [Vd,H] where
these are not the target's.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from forerun.checkpoints.prediction_naming import (
    EMBEDDING_NORM,
    FINAL_NORM,
    FUSE,
    HIDDEN_NORM,
)
from forerun.drafts.prediction_layers import (
    PredictionLayers,
)
from forerun.errors import ModelError
from forerun.executors.draft_model import declared_layers
from forerun.executors.jax.draft_models.level_model import JaxLevelModel
from forerun.executors.jax.drafts.draft_network import Ran
from forerun.executors.jax.executor import JaxExecutor
from forerun.executors.jax.network.attention import Layer
from forerun.executors.jax.network.decoder import Attend, JaxDecoder
from forerun.executors.jax.network.kv import NetworkSizes
from forerun.executors.jax.network.layers import product, rms_norm, rotation
from forerun.executors.jax.network.weights import Params, load_layer, load_named


class PredictionHead(NamedTuple):
    """A DraftNetwork of one MTP layer, applied repeatedly."""

    about: PredictionLayers
    target: JaxDecoder

    @property
    def sizes(self) -> NetworkSizes:
        """Sizes of the arrays that the layer keeps between steps. It reads the target's last
        residual stream.
        """
        arch = self.target.arch
        return NetworkSizes(
            features=(arch.layers,),
            width=arch.hidden,
            cache=self.about.cache,
            hidden=arch.hidden,
            read=arch.hidden,
            vocab=self.about.vocab,
            parameters=self.about.parameters,
            cut=self.about.architecture.latent is None,
        )

    @property
    def fixed(self) -> tuple[Any, ...]:
        """The values that its functions depend on; see DraftNetwork."""
        return self.about.architecture, self.about.zeroed, self.about.hidden_first, self.target

    def enter(self, params: Params, features: Array) -> Array:
        """Return features [...,H], the target's residual stream after the last layer, after the
        target's final norm.
        """
        return self.target.final_norm(params, features)

    def run(
        self, params: Params, tokens: Array, hidden: Array, position: Array, attend: Attend
    ) -> Ran:
        """Run one draft step (DeepSeek-V3, arXiv 2412.19437, section 2.2) over target ids tokens
        int32[R,N] with hidden states [R,N,H]: fuse both, one decoder layer, final norm. The
        normalised output is the head's input and the feedback; where `zeroed` is true the entry at
        position 0 has an embedding of zeros.
        """
        weights, eps = params["draft"], self.target.arch.norm_eps
        spec = self.about.architecture.layer_specs[0]
        embedding = weights if "embed" in weights else params
        embedded = self.target.sharding.put(self.target.embed(embedding, tokens), None, None, None)
        normed = rms_norm(embedded, weights["embedding_norm"], eps)
        if self.about.zeroed:
            normed = jnp.where((position == 0)[..., None], 0, normed)
        parts = [normed, rms_norm(hidden, weights["hidden_norm"], eps)]
        beside = jnp.concatenate(parts[::-1] if self.about.hidden_first else parts, -1)
        x = self.target.sharding.put(product(beside, weights["fuse"]), None, None, None)
        rotary = rotation(position, weights["frequencies"], spec.rope.attention_factor)
        after, (keys, values) = self.target.layer(
            spec, weights["layer"], x, rotary, partial(attend, Layer(0, spec.attention))
        )
        out = rms_norm(after, weights["norm"], eps)
        return Ran(out, out, keys[None], values[None])

    def logits(self, params: Params, read: Array) -> Array:
        """Return float32[n,Vd] from `Ran.read` [n,H], by its own head if it has one, else by the
        target's.
        """
        head = params["draft"].get("head")
        if head is None:
            return self.target.read(params, read)
        logits = product(read, head.T).astype(jnp.float32)
        return self.target.sharding.put(logits, None, None)


def load_prediction(head: PredictionHead, dtype: Any) -> Params:
    """Load params["draft"] of the first MTP layer to the devices, matrices in `dtype`. Raises
    ModelError if a tensor cannot be read.
    """
    draft, sharding = head.about, head.target.sharding
    own = {
        "embedding_norm": draft.own(0, EMBEDDING_NORM),
        "hidden_norm": draft.own(0, HIDDEN_NORM),
        "norm": draft.own(0, FINAL_NORM),
        "fuse": draft.own(0, FUSE),
    }
    if "model.embed_tokens.weight" in draft.files:
        own["embed"] = "model.embed_tokens.weight"
    params = load_named(draft, own, dtype, sharding)
    params["layer"] = load_layer(draft, dtype, sharding)
    spec = draft.architecture.layer_specs[0]
    frequencies = spec.rope.frequencies(draft.architecture.rope_size)
    params["frequencies"] = jax.device_put(frequencies, sharding.replicated)
    params["ids"] = jax.device_put(draft.target_ids.astype(np.int32), sharding.replicated)
    name = "lm_head.weight"
    if draft.vocab != draft.architecture.vocab or name in draft.files:
        if name not in draft.names():
            name = "model.embed_tokens.weight"
        rows = draft.tensor(name)[draft.target_ids].astype(jnp.dtype(dtype))
        divides = draft.vocab % sharding.shards == 0
        where = sharding.weight("head", 2) if divides else sharding.of(None, None)
        params["head"] = jax.device_put(rows, where)
    return params


class JaxPredictionModel(JaxLevelModel):
    """The DraftModel of the target's MTP layer on XLA. Raises ModelError if there are layers for
    several depths, MemoryPlanError if it does not fit.
    """

    def __init__(self, executor: JaxExecutor, draft: PredictionLayers) -> None:
        if draft.count > 1:
            raise ModelError(
                f"{draft.path} has {draft.count} prediction layers, one for each depth, and the "
                "jax executor drafts with one: use --speculative-num-steps 1, which reads the "
                "first alone, or --executor cpu or torch"
            )
        head = PredictionHead(draft, executor.decoder)
        super().__init__(
            executor,
            head,
            declared_layers(draft, executor.limits.max_nodes),
            lambda: load_prediction(head, executor.dtype),
        )
