"""A gated delta net, written down once for reading: one token after the other, in float64.

Yang et al., arXiv 2412.06464, equation 10; layer_spec.GatedDelta says the same in words.
"""

import numpy as np

from forerun.networks.layer_spec import GatedDelta
from forerun.types import Floats


class Recurrence:
    """The state of one text in one layer, advanced token by token.

    kernel  float32[C,W] of the convolution
    window  [W-1,C] what it has read of the last tokens; zeros before the first
    state   [Hv,Dk,Dv]
    """

    def __init__(self, about: GatedDelta, kernel: Floats) -> None:
        self.about, self.kernel = about, kernel.astype(np.float64)
        self.window = np.zeros((about.window - 1, about.channels))
        self.state = np.zeros((about.value_heads, about.key_size, about.value_size))

    def token(self, mixed: Floats, decay: Floats, beta: Floats) -> Floats:
        """[Hv,Dv] that one token reads, of its C numbers, and decay and beta [Hv] of its heads."""
        about = self.about
        seen = np.concatenate([self.window, mixed[None]])
        self.window = seen[1:]
        passed = (seen * self.kernel.T).sum(0)
        passed = passed / (1 + np.exp(-passed))
        queries, keys, values = np.split(passed, [about.keys, 2 * about.keys])
        queries, keys = (part.reshape(about.key_heads, about.key_size) for part in (queries, keys))
        queries, keys = (
            part / np.sqrt((part * part).sum(-1, keepdims=True) + 1e-6) for part in (queries, keys)
        )
        outputs = []
        for head, value in enumerate(values.reshape(about.value_heads, about.value_size)):
            group = head * about.key_heads // about.value_heads
            if about.tiled:
                group = head % about.key_heads
            key, state = keys[group], self.state[head]
            state *= decay[head]
            state += np.outer(key, beta[head] * (value - state.T @ key))
            outputs.append(state.T @ queries[group] / np.sqrt(about.key_size))
        return np.stack(outputs)
