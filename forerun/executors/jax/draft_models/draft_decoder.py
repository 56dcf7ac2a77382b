"""A whole model that drafts, as pure functions: the target's own decoder over other weights; and
the model that runs them with its target (level_model.py).

Weights are in params["draft"] as in weights.py, with `ids` and `inputs` int32[V], its own
id for every target id, and `rows` [Vd,H] of its output head where not all may be proposed.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from forerun.drafts.standalone_draft import StandaloneDraft
from forerun.errors import ModelError
from forerun.executors.draft_model import declared_whole
from forerun.executors.jax.draft_models.level_model import JaxLevelModel
from forerun.executors.jax.drafts.draft_network import Ran
from forerun.executors.jax.executor import JaxExecutor
from forerun.executors.jax.network.decoder import Attend, JaxDecoder
from forerun.executors.jax.network.kv import NetworkSizes
from forerun.executors.jax.network.sharding import Sharding, where_it_divides
from forerun.executors.jax.network.weights import Params, load_params


class DraftDecoder(NamedTuple):
    """A DraftNetwork on a decoder, which reads tokens alone."""

    about: StandaloneDraft
    decoder: JaxDecoder

    @classmethod
    def of(cls, about: StandaloneDraft, sharding: Sharding) -> "DraftDecoder":
        """Return the network of a draft checkpoint, sharded over the target's devices if its
        dimensions are divisible, else copied to each.
        """
        arch = about.checkpoint.architecture
        return cls(about, JaxDecoder(arch, where_it_divides(arch, sharding)))

    @property
    def sizes(self) -> NetworkSizes:
        """Sizes of the arrays that the draft model keeps between steps, in addition to the
        target's.
        """
        return NetworkSizes(
            features=(),
            width=0,
            cache=self.about.cache,
            hidden=0,
            read=self.decoder.arch.hidden,
            vocab=self.about.vocab,
            parameters=self.about.parameters,
            cut=self.decoder.sharding.cut,
            runs_root=True,
        )

    @property
    def fixed(self) -> tuple[Any, ...]:
        """The values that its functions depend on; see DraftNetwork."""
        return (self.decoder,)

    def enter(self, params: Params, features: Array) -> Array:
        """Return the features unchanged, [...,0], since a whole model reads no features."""
        del params
        return features

    def run(
        self, params: Params, tokens: Array, hidden: Array, position: Array, attend: Attend
    ) -> Ran:
        """Run one pass over target ids tokens int32[R,N], mapped to its own ids, at `position`
        int32[R,N]. Ran.read is [R,N,H] after the last layer; `hidden` is returned unchanged.
        """
        weights = params["draft"]
        own = jnp.take(weights["inputs"], tokens, mode="clip")
        ran = self.decoder.forward(weights, own, position, attend)
        (keys,), (values,) = ran.keys, ran.values
        return Ran(ran.last, hidden, keys, values)

    def logits(self, params: Params, read: Array) -> Array:
        """Return float32[n,Vd] from residual streams [n,H] after its last layer."""
        weights = params["draft"]
        if "rows" not in weights:
            return self.decoder.logits(weights, read)
        return self.decoder.read_rows(weights["rows"], self.decoder.final_norm(weights, read))


def load_decoder(network: DraftDecoder, dtype: Any, stacked: bool) -> Params:
    """Load params["draft"] of a whole draft model to the devices, in `dtype`; `stacked` if its
    layers are alike and may run in a scan. If not every token may be proposed, only the head's rows
    of those that may are kept. Raises ModelError if the checkpoint cannot be read.
    """
    about, sharding = network.about, network.decoder.sharding
    arch = network.decoder.arch
    params = load_params(about.checkpoint, dtype, sharding, stacked)
    for name, ids in (("ids", about.vocabulary.target_ids), ("inputs", about.vocabulary.inputs)):
        params[name] = jax.device_put(ids.astype(np.int32), sharding.replicated)
    if not about.vocabulary.every(arch.vocab):
        params.pop("head", None)
        whole = about.checkpoint.tensor(arch.head_tensor)
        rows = whole[about.vocabulary.own_ids].astype(jnp.dtype(dtype))
        cut = replace(sharding, cut=sharding.cut and about.vocab % sharding.shards == 0)
        params["rows"] = jax.device_put(rows, cut.weight("head", 2))
    return params


class JaxDecoderModel(JaxLevelModel):
    """The DraftModel of a whole model on XLA. Raises ModelError for a model that cannot draft here,
    MemoryPlanError if it does not fit.
    """

    def __init__(self, executor: JaxExecutor, draft: StandaloneDraft) -> None:
        arch = draft.checkpoint.architecture
        if len(arch.cache_shapes) > 1 or any(spec.reads is not None for spec in arch.layer_specs):
            raise ModelError(
                f"the jax executor cannot draft with this {arch.family} model yet: its layers keep "
                "keys and values of different shapes; use the torch executor (--executor torch)"
            )
        network = DraftDecoder.of(draft, executor.decoder.sharding)
        super().__init__(
            executor,
            network,
            declared_whole(draft, executor.limits.max_nodes),
            lambda: load_decoder(network, executor.dtype, executor.stacked),
        )
