"""The table of families: how to read each one's config.json, with transformers' defaults.

A new family is a row of READERS and the function that reads its layers (families_dense.py,
families_experts.py, families_delta.py, families_conv.py; docs/reference/families.md). It reads
every key that changes the model; config_json.py rejects the rest.
"""

from collections.abc import Callable
from dataclasses import dataclass

from forerun.networks import families_conv as conv
from forerun.networks import families_delta as delta
from forerun.networks import families_dense as dense
from forerun.networks import families_experts as experts
from forerun.networks import families_gemma as gemma
from forerun.networks.arch import Architecture, ArchitectureSizes, Family
from forerun.networks.family_parts import Layers, optional_real
from forerun.networks.keys import Keys


@dataclass(frozen=True, slots=True)
class Reader:
    """The rules that read one family's config.json into an Architecture.

    class_name  the only value of `architectures` for this family, besides its base model's
    layers      reads the keys about layers
    head_size   default of head_dim; None = hidden / heads
    every_head  without num_key_value_heads, every head has its own keys
    norm_eps    default of rms_norm_eps
    tied        default of tie_word_embeddings
    sizes       reads the sizes; None: as in most families
    centred     norm weights are stored minus 1
    granite     Granite's own scales of embeddings and logits
    gemma       Gemma's settings of the whole model: tied by default, embeddings scaled by sqrt(H),
                capped logits
    """

    class_name: str
    layers: Callable[[Keys, ArchitectureSizes], Layers]
    head_size: int | None = None
    every_head: bool = False
    gemma: bool = False
    granite: bool = False
    centred: bool = False
    norm_eps: float = 1e-6
    tied: bool = False
    sizes: Callable[[Keys], ArchitectureSizes] | None = None

    def read(self, family: Family, keys: Keys) -> Architecture:
        """Read a configuration into an Architecture. Raises ModelError naming the key that is
        missing or cannot be used.
        """
        classes = keys.get("architectures", [self.class_name])
        if classes not in ([self.class_name], [self.class_name.replace("ForCausalLM", "Model")]):
            raise keys.unfit("architectures", classes, f"[{self.class_name!r}] to run here")
        if not self.gemma:
            keys.require("hidden_act", "silu")
        sizes = self._sizes(keys) if self.sizes is None else self.sizes(keys)
        return Architecture(
            family=family,
            hidden=sizes.hidden,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_size=sizes.head_size,
            vocab=sizes.vocab,
            context=sizes.context,
            norm_eps=keys.real("rms_norm_eps", self.norm_eps),
            layer_specs=self.layers(keys, sizes),
            tied_head=keys.flag("tie_word_embeddings", self.tied or self.gemma),
            norm_offset=float(self.centred),
            embedding_scale=self._embedding_scale(keys, sizes),
            final_softcap=_final_softcap(keys, family) if self.gemma else None,
            logit_scale=1 / _positive(keys, "logits_scaling") if self.granite else 1.0,
        )

    def _embedding_scale(self, keys: Keys, sizes: ArchitectureSizes) -> float:
        if self.granite:
            return keys.real("embedding_multiplier", 1.0)
        return sizes.hidden**0.5 if self.gemma else 1.0

    def _sizes(self, keys: Keys) -> ArchitectureSizes:
        hidden = keys.integer("hidden_size")
        heads = keys.integer("num_attention_heads")
        return ArchitectureSizes(
            layers=keys.integer("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=keys.integer("num_key_value_heads", heads if self.every_head else None),
            head_size=keys.integer("head_dim", self.head_size or hidden // max(heads, 1)),
            vocab=keys.integer("vocab_size"),
            context=keys.integer("max_position_embeddings"),
        )


def _final_softcap(keys: Keys, family: Family) -> float | None:
    return optional_real(keys, "final_logit_softcapping", 30.0 if family == "gemma2" else None)


def _positive(keys: Keys, name: str) -> float:
    value = keys.real(name, 1.0)
    if value <= 0:
        raise keys.unfit(name, value, "positive")
    return value


READERS: dict[Family, Reader] = {
    "llama": Reader("LlamaForCausalLM", dense.llama, every_head=True),
    "mistral": Reader("MistralForCausalLM", dense.mistral),
    "qwen2": Reader("Qwen2ForCausalLM", dense.qwen2),
    "qwen3": Reader("Qwen3ForCausalLM", dense.qwen3, head_size=128),
    "qwen2_moe": Reader("Qwen2MoeForCausalLM", experts.qwen2_moe),
    "qwen3_moe": Reader("Qwen3MoeForCausalLM", experts.qwen3_moe),
    "gemma2": Reader("Gemma2ForCausalLM", gemma.gemma2, head_size=256, gemma=True, centred=True),
    "gemma3_text": Reader(
        "Gemma3ForCausalLM", gemma.gemma3, head_size=256, gemma=True, centred=True
    ),
    "mixtral": Reader("MixtralForCausalLM", experts.mixtral, norm_eps=1e-5),
    "glm4_moe": Reader("Glm4MoeForCausalLM", experts.glm4_moe, head_size=128, norm_eps=1e-5),
    "deepseek_v3": Reader(
        "DeepseekV3ForCausalLM", experts.deepseek_v3, sizes=experts.deepseek_sizes
    ),
    "deepseek_v2": Reader(
        "DeepseekV2ForCausalLM", experts.deepseek_v2, sizes=experts.deepseek_sizes
    ),
    "gpt_oss": Reader("GptOssForCausalLM", experts.gpt_oss, head_size=64, norm_eps=1e-5),
    "phi3": Reader("Phi3ForCausalLM", dense.phi3, every_head=True, norm_eps=1e-5),
    "smollm3": Reader("SmolLM3ForCausalLM", dense.smollm3, tied=True),
    "granite": Reader("GraniteForCausalLM", dense.granite, every_head=True, granite=True),
    "olmo2": Reader("Olmo2ForCausalLM", dense.olmo2, every_head=True, norm_eps=1e-5),
    "qwen3_next": Reader("Qwen3NextForCausalLM", delta.qwen3_next, head_size=256, centred=True),
    "qwen3_5_text": Reader("Qwen3_5ForCausalLM", delta.qwen3_5, head_size=256, centred=True),
    "qwen3_5_moe_text": Reader(
        "Qwen3_5MoeForCausalLM", delta.qwen3_5_moe, head_size=256, centred=True
    ),
    "seed_oss": Reader("SeedOssForCausalLM", dense.seed_oss, head_size=128),
    "olmo3": Reader("Olmo3ForCausalLM", dense.olmo3, every_head=True, norm_eps=1e-5),
    "exaone4": Reader("Exaone4ForCausalLM", dense.exaone4, norm_eps=1e-5),
    "glm4_moe_lite": Reader(
        "Glm4MoeLiteForCausalLM",
        experts.glm4_moe_lite,
        norm_eps=1e-5,
        sizes=experts.deepseek_sizes,
    ),
    "ministral3": Reader(
        "Ministral3ForCausalLM", dense.ministral3, norm_eps=1e-5, sizes=dense.ministral_sizes
    ),
    "minimax_m2": Reader("MiniMaxM2ForCausalLM", experts.minimax_m2, head_size=128),
    "granitemoehybrid": Reader(
        "GraniteMoeHybridForCausalLM", dense.granite_hybrid, every_head=True, granite=True
    ),
    "lfm2": Reader("Lfm2ForCausalLM", conv.lfm2, norm_eps=1e-5, tied=True),
    "lfm2_moe": Reader("Lfm2MoeForCausalLM", conv.lfm2_moe, norm_eps=1e-5, tied=True),
    "gemma4_text": Reader("Gemma4ForCausalLM", gemma.gemma4, head_size=256, gemma=True),
    "hunyuan_v1_dense": Reader(
        "HunYuanDenseV1ForCausalLM", dense.hunyuan, every_head=True, norm_eps=1e-5
    ),
}
