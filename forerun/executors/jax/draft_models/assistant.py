"""Gemma 4's assistant as pure functions, and the model that runs it with its target
(level_model.py). Its computation is described in drafts/assistant.py.

Weights are in params["draft"] as in weights.py, with `before` [2H,Hd], `behind` [Hd,H] and
`ids`; `rows` [Vd,Hd] of its head where not all tokens may be proposed; of an ordered head
`centroids` [Hd,C] and `clusters` int32[C,V/C].
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from forerun.drafts.assistant import BEFORE, BEHIND, CENTROIDS, Assistant
from forerun.executors.draft_model import declared_layers
from forerun.executors.jax.draft_models.level_model import JaxLevelModel
from forerun.executors.jax.drafts.draft_network import Ran
from forerun.executors.jax.executor import JaxExecutor
from forerun.executors.jax.network.attention import Layer
from forerun.executors.jax.network.decoder import Attend, JaxDecoder
from forerun.executors.jax.network.kv import NetworkSizes
from forerun.executors.jax.network.layers import product, products, rotation
from forerun.executors.jax.network.sharding import where_it_divides
from forerun.executors.jax.network.weights import Params, load_named, load_params


class AssistantNetwork(NamedTuple):
    """A DraftNetwork whose layers read the target's keys and values, and whose draft tokens all
    have one position.

    decoder  its own layers
    target   whose embedding, final norm and pages it uses
    """

    about: Assistant
    decoder: JaxDecoder
    target: JaxDecoder

    @property
    def sizes(self) -> NetworkSizes:
        """Sizes of the arrays that the assistant keeps between steps. It reads the target's last
        residual stream.
        """
        arch, clusters = self.target.arch, self.about.clusters
        scored = None if clusters is None else clusters.top_k * clusters.tokens.shape[1]
        return NetworkSizes(
            features=(arch.layers,),
            width=arch.hidden,
            cache=(),
            hidden=arch.hidden,
            read=self.decoder.arch.hidden,
            vocab=scored or self.about.vocab,
            parameters=self.about.parameters,
            cut=False,
            borrows=self.target.table_numbers,
        )

    @property
    def fixed(self) -> tuple[Any, ...]:
        """The values that its functions depend on; see DraftNetwork."""
        return self.decoder, self.target

    def enter(self, params: Params, features: Array) -> Array:
        """Return features [...,H], the target's residual stream after the last layer, after the
        target's final norm.
        """
        return self.target.final_norm(params, features)

    def run(
        self, params: Params, tokens: Array, hidden: Array, position: Array, attend: Attend
    ) -> Ran:
        """Run target ids tokens int32[R,N] with hidden states [R,N,H], at `position` int32[R,N],
        after all positions that they attend to; with a window w to the last w + 1 of those.
        """
        weights, arch = params["draft"], self.decoder.arch
        embedded = self.target.sharding.put(self.target.embed(params, tokens), None, None, None)
        embedded = embedded * np.asarray(self.target.arch.embedding_scale, embedded.dtype)
        x = product(jnp.concatenate([embedded, hidden], -1), weights["before"])
        for spec, layer in zip(arch.layer_specs, weights["layers"], strict=True):
            rope = arch.rope_of(spec)
            frequencies = weights["frequencies"][arch.ropes.index(rope)]
            rotary = rotation(position, frequencies, rope[0].attention_factor)
            how, source = spec.attention, spec.reads or 0
            if how.window is not None:  # Measured from the end of the attended positions.
                how = replace(how, window=how.window + 2)
            kind = self.target.kind(self.target.arch.layer_specs[source])
            theirs = Layer(self.target.place(source), how, kind)
            x, _ = self.decoder.layer(spec, layer, x, rotary, partial(attend, theirs), ())
        read = self.decoder.final_norm(weights, x)
        nothing = jnp.zeros((0, *position.shape, 1, 1), x.dtype)
        return Ran(read, product(read, weights["behind"]), nothing, nothing)

    def logits(self, params: Params, read: Array) -> Array:
        """Return float32[n,Vd] from normalised states [n,Hd]; for an ordered head -inf for tokens
        outside of the best clusters.
        """
        weights, clusters = params["draft"], self.about.clusters
        if "rows" in weights:
            return product(read, weights["rows"].T).astype(jnp.float32)
        if clusters is None:
            return self.decoder.read(weights, read)
        best = lax.top_k(product(read, weights["centroids"]), clusters.top_k)[1]
        ids = weights["clusters"][best].reshape(len(read), -1)
        head = weights["embed"] if self.decoder.arch.tied_head else weights["head"]
        chosen = products("nh,nkh->nk", read, head[ids]).astype(jnp.float32)
        whole = jnp.full((len(read), self.about.vocab), -jnp.inf)
        return whole.at[jnp.arange(len(read))[:, None], ids].set(chosen)


def load_assistant(network: AssistantNetwork, dtype: Any) -> Params:
    """Load params["draft"] of an assistant onto the devices, in `dtype`. Raises what reading a
    tensor raises (ModelError).
    """
    about, sharding = network.about, network.decoder.sharding
    own = {"before": f"{BEFORE}.weight", "behind": f"{BEHIND}.weight"}
    clusters, vocab = about.clusters, about.architecture.vocab
    if clusters is not None:
        own["centroids"] = f"{CENTROIDS}.weight"
    params = load_params(about, dtype, sharding, stacked=False)
    params |= load_named(about, own, dtype, sharding)
    params["ids"] = jax.device_put(about.target_ids.astype(np.int32), sharding.replicated)
    if clusters is not None:
        params["clusters"] = jax.device_put(clusters.tokens, sharding.replicated)
    if about.vocab < vocab:
        head = "embed" if network.decoder.arch.tied_head else "head"
        rows = params.pop(head)[about.target_ids]
        params["rows"] = jax.device_put(rows, sharding.replicated)
    return params


class JaxAssistantModel(JaxLevelModel):
    """The DraftModel of Gemma 4's assistant on XLA. Raises MemoryPlanError if it does not fit."""

    def __init__(self, executor: JaxExecutor, draft: Assistant) -> None:
        arch, target = draft.architecture, executor.decoder
        own = JaxDecoder(arch, where_it_divides(arch, target.sharding))
        network = AssistantNetwork(draft, own, target)
        super().__init__(
            executor,
            network,
            declared_layers(draft, executor.limits.max_nodes),
            lambda: load_assistant(network, executor.dtype),
        )
