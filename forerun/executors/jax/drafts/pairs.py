"""Change a block drafter's scores by the token above, as executors/pair_scores.py does on the host,
for all nodes of a level at once.

Weights are in params["draft"]["pairs"]: `before` [V,r] and `after` [Vd,r] in the dtype of matrices;
`joint` and `sure` [in, out] and their biases in float32, if they exist; `chances`
float32[2,2,depth,10] as OnDeviceDraftSpec has them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.nn import logsumexp, sigmoid

from forerun.drafts.block_config import BlockHead
from forerun.executors.jax.network.layers import product, products
from forerun.executors.jax.network.sharding import Sharding
from forerun.executors.jax.network.weights import Params
from forerun.executors.pair_scores import PairScores

TENTHS = 10


class JaxBelow(NamedTuple):
    """Scores of the tokens that can follow n nodes of a level in each of R rows.

    values      float32[R,n,K] log-probabilities of the level's candidates
    confidence  float32[R,n] in the best candidate; None: the drafter has none
    state       float32[R,n,r] for the nodes below; None: there is none
    """

    values: Array
    confidence: Array | None
    state: Array | None


class JaxPairs(NamedTuple):
    """Pair scores of the blocks of one pass.

    weights    params["draft"]["pairs"]
    which      int32[R,levels,K] candidates, draft ids, best first
    log_probs  float32[R,levels,K] before the bias of the previous token
    hidden     float32[R,levels,H] after the final norm
    """

    about: BlockHead
    weights: Params
    which: Array
    log_probs: Array
    hidden: Array

    def below(self, level: int, tokens: Array, state: Array | None) -> JaxBelow:
        """Return the scores of the tokens that can follow target ids tokens int32[R,n], at places
        of that level.

        state  of the nodes above the tokens, [R,n,r]; None at level 0
        """
        log_probs, hidden = self.log_probs[:, level, None], self.hidden[:, level, None]
        above = jnp.take(self.weights["before"], tokens, axis=0, mode="clip").astype(jnp.float32)
        shown, state = self._shown(hidden, above, state)
        rows = self.weights["after"][self.which[:, level]]
        bias = products("rnd,rkd->rnk", shown.astype(rows.dtype), rows).astype(jnp.float32)
        raised = log_probs + bias
        total = logsumexp(raised, -1, keepdims=True)
        if not self.about.top_k:  # Tokens that are no candidates keep their share.
            rest = 1.0 - jnp.exp(log_probs).sum(-1, keepdims=True)
            total = jnp.logaddexp(total, jnp.log(jnp.maximum(rest, 0.0)))
        return JaxBelow(raised - total, self._sure(hidden, above), state)

    def _shown(
        self, hidden: Array, above: Array, state: Array | None
    ) -> tuple[Array, Array | None]:
        """Return v float32[R,n,r] (pair_scores.py), and the state below."""
        about, joint = self.about, self.weights.get("joint")
        if joint is None:
            return above, None
        begin = 2 * about.rank if about.pair == "rnn" else 0
        own, bias = joint[begin : begin + about.hidden], self.weights["joint.bias"]
        projected = product(hidden, own, bias)
        match about.pair:
            case "selector":
                return projected * above, None
            case "gated":
                return sigmoid(projected + product(above, joint[about.hidden :])) * above, None
        state = jnp.zeros_like(above) if state is None else state
        projected = projected + product(jnp.concatenate([state, above], -1), joint[:begin])
        forget, candidate, output = jnp.split(projected, 3, -1)
        forget = sigmoid(forget)
        return jnp.tanh(output), forget * state + (1 - forget) * jnp.tanh(candidate)

    def _sure(self, hidden: Array, above: Array) -> Array | None:
        """Return float32[R,n], the confidence at a place below tokens whose rows are `above`."""
        if not self.about.confidence:
            return None
        weight, wide = self.weights["sure"], self.about.hidden
        logit = product(hidden, weight[:wide], self.weights["sure.bias"])
        if self.about.confidence > wide:
            logit = logit + product(above, weight[wide:])
        return jnp.broadcast_to(sigmoid(logit)[..., 0], above.shape[:2])


def calibrated(chances: Array, confidence: Array, values: Array, sampled: Array) -> Array:
    """Return values float32[R,n,width], best first, of which the best is the acceptance probability
    for its confidence float32[R,n], and the others keep their ratios to it.

    chances  float32[2,2,10] of the level; sampled bool[R]
    """
    tenth = jnp.minimum((confidence * TENTHS).astype(jnp.int32), TENTHS - 1)
    start, slope = chances[:, sampled.astype(jnp.int32)[:, None], tenth]
    ratios = values - values[..., :1]
    share = jnp.minimum(start + slope * confidence, 1 / jnp.exp(ratios).sum(-1))
    return jnp.log(share)[..., None] + ratios


def load_pairs(scores: PairScores, dtype: Any, sharding: Sharding) -> Params:
    """Load params["draft"]["pairs"] to the devices, copied to each, tables in `dtype`. A confidence
    is used as the acceptance probability until outcomes are counted.
    """
    before, after = (part.astype(jnp.dtype(dtype)) for part in scores.tables())
    found: Params = {"before": before, "after": after}
    for name, each in (("joint", scores.joint), ("sure", scores.confidence)):
        if each is not None:
            found |= {name: each.weight.T, f"{name}.bias": each.bias}
    chances = np.zeros((2, 2, scores.head.depth, TENTHS), np.float32)
    chances[1] = 1.0
    found["chances"] = chances
    return {
        name: jax.device_put(np.array(part), sharding.replicated) for name, part in found.items()
    }
