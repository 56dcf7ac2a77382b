"""The CPU executor's arithmetic in NumPy, slowly: what a whole forward must come to.

Weights as packed (the file's own numbers, or 8 bits in groups of 32), activations in 8 bits in
groups of 32 and keys and values as halves, or all as they are where the weights are floats; sums in
float64 where the core sums in float32.
"""

import math

import numpy as np

from forerun.checkpoints.quantised_matrices import InGroups
from forerun.executors.cpu.few_bits import kind_of
from forerun.executors.cpu.levels import LEVELS, TERNARY
from forerun.networks.layer_spec import BESIDE_NORMS, NORM_NAMES, Experts, GatedDelta
from tests.references.gated_delta import Recurrence

GROUP = 32
FLOATS = ("F32", "F16", "BF16")
KEPT = (*FLOATS, "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4", "Q5_0")
KEPT += ("Q5_1", "IQ4_NL", "IQ4_XS", "Q3_K", "Q2_K", *LEVELS, *TERNARY)
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
    grouped = checkpoint.grouped(name) if isinstance(checkpoint, InGroups) else None
    return eight_bits(matrix) if kind_of(grouped) == "few bits" else matrix


def eight_bits(matrix):
    """float32, each row in groups of 32 with a scale that is a half."""
    rows, columns = matrix.shape
    padded = np.zeros((rows, -(-columns // GROUP) * GROUP), np.float32)
    padded[:, :columns] = matrix
    groups = padded.reshape(rows, -1, GROUP)
    scale = (np.abs(groups).max(-1, keepdims=True) / np.float32(127)).astype(np.float16)
    scale = scale.astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        q = np.where(scale > 0, np.clip(np.rint(groups / scale), -127, 127), 0)
    return (q * scale).reshape(padded.shape)[:, :columns].astype(np.float32)


def in_blocks(x):
    """Heads float[..., n] as the cache stores them in q8_0: int8[..., B, 32] numbers, whose last
    block is filled with zeros, and their scales float16[..., B].
    """
    count = x.shape[-1]
    padded = np.zeros((*x.shape[:-1], -(-count // GROUP) * GROUP), np.float32)
    padded[..., :count] = x
    groups = padded.reshape(*x.shape[:-1], -1, GROUP)
    largest = np.abs(groups).max(-1)
    finite = np.isfinite(largest)
    scale = np.where(finite, np.minimum(largest / np.float32(127), np.float32(65504)), np.nan)
    scale = scale.astype(np.float16)
    kept = scale.astype(np.float32)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        limited = np.clip(groups, -127 * kept, 127 * kept)
        q = np.where(kept > 0, np.rint(limited * (np.float32(1) / kept)), 0)
    return q.astype(np.int8), scale


def from_blocks(q, scale, count):
    """The numbers float32[..., count] that blocks stand for, exactly."""
    made = q.astype(np.float32) * scale.astype(np.float32)[..., None]
    return made.reshape(*q.shape[:-2], -1)[..., :count]


def normed(x, weight, eps):
    return x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + eps) * weight


def capped(x, cap):
    return x if cap is None else cap * np.tanh(x / cap)


def gelu_tanh(gate):
    angle = np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + np.tanh(angle))


def forward(checkpoint, tokens, kv_dtype="same"):
    """float64[T,V] logits of one sequence."""
    return ReferenceModel(checkpoint, kv_dtype).forward(np.asarray(tokens))


def best(ranked, about):
    """The chosen experts of one token, best first."""
    router = about.router
    if router.groups > 1:
        grouped = ranked.reshape(router.groups, -1)
        sums = np.sort(grouped, -1)[:, -router.summed :].sum(-1)
        ranked = np.full_like(grouped, -np.inf)
        for group in np.argsort(-sums, kind="stable")[: router.topk_group]:
            ranked[group] = grouped[group]
        ranked = ranked.ravel()
    return np.argsort(-ranked, kind="stable")[: about.top_k]


class ReferenceModel:
    def __init__(self, checkpoint, kv_dtype="same"):
        self.kv_dtype = kv_dtype
        self.checkpoint, self.arch = checkpoint, checkpoint.architecture
        self.names = set(checkpoint.names())
        name = next(n for n in checkpoint.names() if n.endswith("self_attn.o_proj.weight"))
        first = checkpoint.packed(name)
        self.floats = first is not None and first.kind in FLOATS
        self.cached = {}  # By layer, keys and values that others may read.

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
        if self.kv_dtype == "q8_0":
            return from_blocks(*in_blocks(x), x.shape[-1]).astype(np.float64)
        return x if self.floats else x.astype(np.float16).astype(np.float64)

    def forward(self, tokens):
        arch = self.arch
        stream = packed(self.checkpoint, "model.embed_tokens.weight")[tokens].astype(np.float64)
        stream = stream * arch.embedding_scale
        vectors = self.vectors(tokens, stream) if arch.token_vector else None
        for layer, spec in enumerate(arch.layer_specs):
            prefix, norms = f"model.layers.{layer}.", NORM_NAMES[spec.norms]
            x = self.normed(stream, prefix, norms.before_attention)
            if isinstance(spec.recurrent, GatedDelta):
                made = self.net(prefix + "linear_attn.", x, spec.recurrent)
            elif spec.recurrent is not None:
                made = self.convolution(prefix + "conv.", x, spec.recurrent)
            else:
                made = self.attention(prefix + "self_attn.", x, spec, layer)
            stream = stream + self.normed(made, prefix, norms.after_attention) * spec.residual
            x = self.normed(stream, prefix, norms.before_feed_forward)
            if isinstance(spec.feed_forward, Experts):
                made = self.mixture(prefix + "mlp.", x, spec)
            else:
                made = self.fed(prefix + "mlp.", x, spec.activation)
            if spec.beside is not None:
                made = self.beside(prefix, stream, made, spec)
            stream = stream + self.normed(made, prefix, norms.after_feed_forward) * spec.residual
            if vectors is not None:
                gate = self.product(prefix + "per_layer_input_gate", stream)
                opened = gelu_tanh(gate) * vectors[:, layer]
                made = self.product(prefix + "per_layer_projection", opened)
                stream = stream + self.normed(made, prefix, "post_per_layer_input_norm")
            if spec.scaled:
                stream = stream * self.vector(prefix + "layer_scalar")
        x = normed(stream, self.vector("model.norm.weight") + arch.norm_offset, arch.norm_eps)
        head = "model.embed_tokens" if arch.tied_head else "lm_head"
        return capped(self.product(head, x) * arch.logit_scale, arch.final_softcap)

    def vectors(self, tokens, stream):
        """Each token's vectors float64[T,L,D]."""
        made = self.product("model.per_layer_model_projection", stream) * self.arch.hidden**-0.5
        made = made.reshape(len(tokens), self.arch.layers, -1)
        made = normed(
            made, self.vector("model.per_layer_projection_norm.weight"), self.arch.norm_eps
        )
        rows = self.vector("model.embed_tokens_per_layer.weight")[tokens].reshape(made.shape)
        return (made + rows * self.arch.token_vector**0.5) / np.sqrt(2)

    def beside(self, prefix, stream, fed, spec):
        """A feed-forward's output and that of the experts beside it."""
        behind_fed, before, behind = BESIDE_NORMS
        scale = self.vector(prefix + "moe.gate.scale") * self.arch.hidden**-0.5
        routed = normed(stream, scale, self.arch.norm_eps)
        x = self.normed(stream, prefix, before)
        mixed = self.mixture(prefix + "moe.", x, spec, spec.beside, routed)
        return self.normed(fed, prefix, behind_fed) + self.normed(mixed, prefix, behind)

    def normed(self, x, prefix, name):
        if name is None:
            return x
        weight = self.vector(f"{prefix}{name}.weight") + self.arch.norm_offset
        return normed(x, weight, self.arch.norm_eps)

    def fed(self, prefix, x, activation):
        gate, up = (self.product(f"{prefix}{part}_proj", x) for part in ("gate", "up"))
        if activation == "clamped_silu":
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
            opened = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
            return self.product(f"{prefix}down_proj", opened)
        if activation == "gelu":
            normal = 0.5 * np.vectorize(math.erfc)(-gate / np.sqrt(2))
            return self.product(f"{prefix}down_proj", gate * normal * up)
        if activation == "gelu_tanh":
            return self.product(f"{prefix}down_proj", gelu_tanh(gate) * up)
        return self.product(f"{prefix}down_proj", gate / (1 + np.exp(-gate)) * up)

    def mixture(self, prefix, x, spec, about=None, routed=None):
        """Token by token, expert by expert."""
        about, activation = about or spec.feed_forward, spec.activation
        router, routed = about.router, x if routed is None else routed
        logits = routed.astype(np.float32) @ self.vector(prefix + "gate.weight").T
        if router.bias:
            logits = logits + self.vector(prefix + "gate.bias")
        if router.scores == "sigmoid":
            scores = 1 / (1 + np.exp(-logits))
        else:
            scores = np.exp(logits - logits.max(-1, keepdims=True))
            scores /= scores.sum(-1, keepdims=True)
        ranked = scores.copy()
        if router.correction:
            ranked += self.vector(prefix + "gate.e_score_correction_bias")
        out = np.zeros_like(x)
        for token in range(len(x)):
            chosen = best(ranked[token], about)
            weights = scores[token, chosen]
            weights = weights / weights.sum() if router.normalised else weights
            if router.scaled:
                weights = weights * self.vector(prefix + "gate.per_expert_scale")[chosen]
            for expert, weight in zip(chosen, weights * router.scale, strict=True):
                made = self.fed(f"{prefix}experts.{expert}.", x[token : token + 1], activation)[0]
                out[token] += weight * made
        if about.shared:
            share = 1.0
            if about.shared_gate:
                score = x.astype(np.float32) @ self.vector(prefix + "shared_expert_gate.weight").T
                share = 1 / (1 + np.exp(-score))
            out = out + share * self.fed(prefix + "shared_expert.", x, activation)
        return out

    def vector(self, name):
        return self.checkpoint.tensor(name)

    def latent(self, prefix, x, spec):
        """Absorbed: every head's query against what is kept of all positions."""
        arch, about, count = self.arch, spec.attention.latent, len(x)
        entering, name = x, "q_proj"
        if about.query_rank:
            lower, name = self.product(prefix + "q_a_proj", x), "q_b_proj"
            entering = normed(lower, self.vector(prefix + "q_a_layernorm.weight"), about.norm_eps)
        queries = self.product(prefix + name, entering).reshape(count, arch.heads, -1)
        queries = queries * spec.attention.scale
        made = self.product(prefix + "kv_a_proj_with_mqa", x)
        norm = self.vector(prefix + "kv_a_layernorm.weight")
        latent = normed(made[:, : about.rank], norm, about.norm_eps)
        turned = self.rotated(made[:, None, about.rank :], spec.rope)[:, 0]
        keys = self.kept(np.concatenate([latent, turned], -1))
        stored = f"{prefix}kv_b_proj"
        floats = self.is_float(stored)
        bits, rounded = (np.asarray, np.asarray) if floats else (eight_bits, quantised)
        each = self.vector(f"{stored}.weight").reshape(arch.heads, -1, about.rank)
        mixed = []
        for head, matrix in enumerate(each):
            into, out_of = bits(matrix[: about.nope].T), bits(matrix[about.nope :])
            entered = rounded(queries[:, head, : about.nope].astype(np.float32)) @ into.T
            turned = self.rotated(queries[:, None, head, about.nope :], spec.rope)[:, 0]
            scores = np.concatenate([entered, turned], -1) @ keys.T
            scores[~np.tri(count, dtype=bool)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            attended = weights / weights.sum(-1, keepdims=True) @ keys[:, : about.rank]
            mixed.append(rounded(attended.astype(np.float32)) @ out_of.T)
        return self.product(prefix + "o_proj", np.concatenate(mixed, -1))

    def heads(self, prefix, which, x, spec):
        """Queries or keys, normed and rotated; or values."""
        name = f"{prefix}{'k' if which == 'v' and spec.attention.keyed_values else which}_proj"
        made, wide = self.product(name, x), spec.wide_qk_norm and which != "v"
        if wide:
            made = self.normed(made, prefix, f"{which}_norm")
        made = made.reshape(len(x), -1, self.arch.cache_of(spec).head_size)
        if which == "v":
            plain = spec.attention.normed_values
            return normed(made, 1.0, self.arch.norm_eps) if plain else made
        if spec.qk_norm and not spec.late_qk_norm:
            made = self.normed(made, prefix, f"{which}_norm")
        made = made if spec.rope.rotated == 0 else self.rotated(made, spec.rope)
        return self.normed(made, prefix, f"{which}_norm") if spec.late_qk_norm else made

    def attention(self, prefix, x, spec, layer):
        if spec.attention.latent is not None:
            return self.latent(prefix, x, spec)
        arch, count, q = self.arch, len(x), self.heads(prefix, "q", x, spec)
        if spec.reads is None:
            self.cached[layer] = [self.kept(self.heads(prefix, part, x, spec)) for part in "kv"]
        k, v = self.cached[layer if spec.reads is None else spec.reads]
        shared = arch.heads // k.shape[1]
        k, v = np.repeat(k, shared, 1), np.repeat(v, shared, 1)
        scores = np.einsum("ihe,jhe->hij", q, k) * spec.attention.scale
        scores = capped(scores, spec.attention.softcap)
        seen = np.tri(count, dtype=bool)
        if spec.attention.window:
            seen &= ~np.tri(count, k=-spec.attention.window, dtype=bool)
        scores[:, ~seen] = -np.inf
        if spec.attention.sinks:
            sinks = self.vector(prefix + "sinks")[:, None, None]
            scores = np.concatenate([scores, np.broadcast_to(sinks, (len(sinks), count, 1))], -1)
            v = np.concatenate([v, np.zeros_like(v[:1])])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hij,jhe->ihe", weights, v).reshape(count, -1)
        if spec.attention.gated:
            mixed = mixed / (1 + np.exp(-self.product(f"{prefix}gate_proj", x)))
        return self.product(prefix + "o_proj", mixed)

    def net(self, prefix, x, about):
        """A gated delta net, token by token."""
        made = {part: self.product(f"{prefix}{part}_proj", x) for part in "qkvzba"}
        recurrence = Recurrence(about, self.vector(f"{prefix}conv1d.weight")[:, 0])
        opened = np.logaddexp(0, made["a"] + self.vector(f"{prefix}dt_bias"))
        decay = np.exp(-np.exp(self.vector(f"{prefix}A_log")) * opened)
        beta = 1 / (1 + np.exp(-made["b"]))
        mixed = np.concatenate([made[part] for part in "qkv"], -1)
        read = np.stack([recurrence.token(*each) for each in zip(mixed, decay, beta, strict=True)])
        read = normed(read, self.vector(f"{prefix}norm.weight"), self.arch.norm_eps)
        read = read.reshape(len(x), -1) * made["z"] / (1 + np.exp(-made["z"]))
        return self.product(f"{prefix}out_proj", read)

    def convolution(self, prefix, x, about):
        """A gated convolution over the last tokens."""
        b, c, x = np.split(self.product(f"{prefix}in_proj", x), 3, -1)
        seen = np.concatenate([np.zeros((about.window - 1, about.channels)), b * x])
        kernel = self.vector(f"{prefix}conv.weight")[:, 0].T
        sums = sum(seen[i : i + len(b)] * each for i, each in enumerate(kernel))
        if about.bias:
            sums = sums + self.vector(f"{prefix}conv.bias")
        return self.product(f"{prefix}out_proj", c * sums)

    def rotated(self, x, rope):
        positions = np.arange(len(x), dtype=np.float32)[:, None]
        angle = (positions * rope.frequencies(x.shape[-1])).astype(np.float64)
        cosine = np.cos(angle)[:, None] * rope.attention_factor
        sine = np.sin(angle)[:, None] * rope.attention_factor
        a, b = np.split(x, 2, -1)
        return np.concatenate([a * cosine - b * sine, b * cosine + a * sine], -1)
