"""The CPU executor's arithmetic in NumPy, slowly: what a whole forward must come to.

Weights as packed (the file's own numbers, or 8 bits in groups of 32), activations in 8 bits in
groups of 32 and keys and values as halves, or all as they are where the weights are floats; sums in
float64 where the core sums in float32.
"""

import numpy as np

GROUP = 32
FLOATS = ("F32", "F16", "BF16")
KEPT = (*FLOATS, "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
"""Storage whose numbers the core keeps."""


def quantised(x):
    """x with every group of 32 rounded to 8 bits, as the core rounds: float64[..., n]."""
    count = x.shape[-1]
    padded = np.zeros((*x.shape[:-1], -(-count // GROUP) * GROUP), np.float32)
    padded[..., :count] = x
    groups = padded.reshape(*x.shape[:-1], -1, GROUP)
    largest = np.abs(groups).max(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.where(largest > 0, np.rint(groups * (np.float32(127) / largest)), 0)
    scale = largest / np.float32(127)
    return (q.astype(np.float64) * scale).reshape(padded.shape)[..., :count]


def packed(checkpoint, name):
    """A matrix as the core keeps it, float32."""
    matrix, stored = checkpoint.tensor(name), checkpoint.packed(name)
    if stored is not None and stored.kind in KEPT:
        return matrix
    rows, columns = matrix.shape
    padded = np.zeros((rows, -(-columns // GROUP) * GROUP), np.float32)
    padded[:, :columns] = matrix
    groups = padded.reshape(rows, -1, GROUP)
    scale = (np.abs(groups).max(-1, keepdims=True) / np.float32(127)).astype(np.float16)
    scale = scale.astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.where(scale > 0, np.clip(np.rint(groups / scale), -127, 127), 0)
    return (q * scale).reshape(padded.shape)[:, :columns].astype(np.float32)


def normed(x, weight, eps):
    return x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + eps) * weight


def forward(checkpoint, tokens):
    """float64[T,V] logits of one sequence."""
    return Twin(checkpoint).forward(np.asarray(tokens))


class Twin:
    def __init__(self, checkpoint):
        self.checkpoint, self.arch = checkpoint, checkpoint.architecture
        self.names = set(checkpoint.names())
        first = checkpoint.packed("model.layers.0.mlp.up_proj.weight")
        self.floats = first is not None and first.kind in FLOATS

    def product(self, name, x):
        x = x.astype(np.float32)
        weight = packed(self.checkpoint, f"{name}.weight")
        out = (x.astype(np.float64) if self.is_float(name) else quantised(x)) @ weight.T
        if f"{name}.bias" in self.names:
            out = out + self.checkpoint.tensor(f"{name}.bias")
        return out

    def is_float(self, name):
        stored = self.checkpoint.packed(f"{name}.weight")
        return stored is not None and stored.kind in FLOATS

    def kept(self, x):
        """Keys and values as the cache has them."""
        return x if self.floats else x.astype(np.float16).astype(np.float64)

    def forward(self, tokens):
        arch = self.arch
        stream = packed(self.checkpoint, "model.embed_tokens.weight")[tokens].astype(np.float64)
        for layer in range(arch.layers):
            prefix = f"model.layers.{layer}."
            x = normed(stream, self.vector(prefix + "input_layernorm.weight"), arch.norm_eps)
            stream = stream + self.attention(prefix + "self_attn.", x)
            weight = self.vector(prefix + "post_attention_layernorm.weight")
            x = normed(stream, weight, arch.norm_eps)
            gate = self.product(prefix + "mlp.gate_proj", x)
            up = self.product(prefix + "mlp.up_proj", x)
            stream = stream + self.product(
                prefix + "mlp.down_proj", gate / (1 + np.exp(-gate)) * up
            )
        x = normed(stream, self.vector("model.norm.weight"), arch.norm_eps)
        head = "model.embed_tokens" if arch.tied_head else "lm_head"
        return self.product(head, x)

    def vector(self, name):
        return self.checkpoint.tensor(name)

    def attention(self, prefix, x):
        arch, count = self.arch, len(x)
        heads = {"q": arch.heads, "k": arch.kv_heads, "v": arch.kv_heads}
        q, k, v = (
            self.product(f"{prefix}{which}_proj", x).reshape(count, n, arch.head_size)
            for which, n in heads.items()
        )
        if arch.layer_specs[0].qk_norm:
            q = normed(q, self.vector(prefix + "q_norm.weight"), arch.norm_eps)
            k = normed(k, self.vector(prefix + "k_norm.weight"), arch.norm_eps)
        q, k, v = self.rotated(q), self.kept(self.rotated(k)), self.kept(v)
        shared = arch.heads // arch.kv_heads
        k, v = np.repeat(k, shared, 1), np.repeat(v, shared, 1)
        scores = np.einsum("ihe,jhe->hij", q, k) / np.sqrt(arch.head_size)
        scores[:, ~np.tri(count, dtype=bool)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hij,jhe->ihe", weights, v).reshape(count, -1)
        return self.product(prefix + "o_proj", mixed)

    def rotated(self, x):
        arch = self.arch
        positions = np.arange(len(x), dtype=np.float32)[:, None]
        angle = (positions * arch.rope.frequencies(arch.head_size)).astype(np.float64)
        cosine = np.cos(angle)[:, None] * arch.rope.attention_factor
        sine = np.sin(angle)[:, None] * arch.rope.attention_factor
        a, b = np.split(x, 2, -1)
        return np.concatenate([a * cosine - b * sine, b * cosine + a * sine], -1)
