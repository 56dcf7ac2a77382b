"""Reads experts from llama.cpp's metadata."""

from typing import Literal

from forerun.checkpoints.gguf.header import GgufFile
from forerun.networks.arch import ArchitectureSizes, Family
from forerun.networks.keys import Keys
from forerun.networks.layer_spec import Experts, Router

_GATING: dict[int, Literal["softmax", "sigmoid"]] = {1: "softmax", 2: "sigmoid", 3: "softmax"}
"""`expert_gating_func` of llama.cpp. The third is a softmax over the chosen experts only, which
equals one over all with normalised weights. Others are not supported.
"""
_SIGMOID, _OF_THE_CHOSEN = 2, 3


_GATED: tuple[Family, ...] = ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text")
"""Architectures whose shared expert has a gate."""


def experts_of(keys: Keys, sizes: ArchitectureSizes, file: GgufFile, family: Family) -> Experts:
    """Return the experts of a family's layers. llama.cpp assumes, without keys, that Qwen2-MoE does
    not normalise its weights, and that GLM-4.5 scores by sigmoids. Raises ModelError naming the
    key.
    """
    count, top_k = keys.integer("expert_count"), keys.integer("expert_used_count")
    total_width = keys.integer("feed_forward_length", 0)
    # In Mixtral's files an expert has the feed-forward's width; elsewhere all experts together.
    together = total_width if family == "mixtral" else total_width // max(top_k, 1)
    width = keys.integer("expert_feed_forward_length", together) or together
    groups = keys.integer("expert_group_count", 1) or 1
    corrected = family in ("glm4_moe", "deepseek_v3", "minimax_m2", "lfm2_moe")
    gating = _gating(keys, 2 if family in ("glm4_moe", "minimax_m2") else 1)
    plain = family in ("qwen2_moe", "glm4_moe", "deepseek_v2", "deepseek_v3")
    normalised = keys.flag("expert_weights_norm", not plain)
    router = Router(
        _GATING[gating],
        normalised=normalised or gating == _OF_THE_CHOSEN,
        bias=family == "gpt_oss",
        scale=keys.real("expert_weights_scale", 0.0) or 1.0,
        correction=corrected,
        summed=1 if family == "deepseek_v2" else 2,
        groups=groups,
        topk_group=keys.integer("expert_group_used_count", groups) or groups,
    )
    shared = 0
    if family in _GATED:
        shared = keys.integer("expert_shared_feed_forward_length", total_width) or total_width
    elif corrected or family == "deepseek_v2":
        shared = width * keys.integer("expert_shared_count", 0)
    gated, biased = family in _GATED, family == "gpt_oss"
    return Experts(count, top_k, width, router, shared, shared_gate=gated, bias=biased)


def scored_by_softmax(keys: Keys) -> bool:
    """Return whether a deepseek2 file scores experts by a softmax, as DeepSeek V2, or by sigmoids,
    as V3. Early files of V2 lack the key, so the softmax is the default.
    """
    return _gating(keys, 1) != _SIGMOID


def _gating(keys: Keys, default: int) -> int:
    code = keys.integer("expert_gating_func", default) or default
    if code not in _GATING:
        known = " or ".join(f"{number} ({name})" for number, name in _GATING.items())
        raise keys.unfit("expert_gating_func", code, f"{known} to run here")
    return code
