"""Stand-ins by name: a small model trained here and what drafts for it, made once for each seed and
kept in build/stand-ins until that is removed.

made = stand_in("NEXTN of glm4_moe", seed=0)
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from forerun.checkpoints.prediction_naming import ZEROED
from forerun.cli.main import main
from tests.drafters.assistants import beside
from tests.drafters.prediction import with_layers
from tests.models import tiny
from tests.stand_ins import train
from tests.stand_ins.chats import VOCAB, chats, split, write_tokenizer

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "stand-ins"
STEPS = 800
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4,
    "head_dim": 32, "max_position_embeddings": 512,
}  # fmt: skip
OF_FAMILY = {
    "glm4_moe": {"moe_intermediate_size": 64},
    "deepseek_v3": {
        "moe_intermediate_size": 64, "kv_lora_rank": 64, "q_lora_rank": 64, "head_dim": 16,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
    },
    "qwen3_5_text": {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "gemma4_text": {
        "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "global_head_dim": 32,
        "final_logit_softcapping": None,
    },
}  # fmt: skip


@dataclass(frozen=True)
class StandIn:
    """How it is served: method, folders, further options of EngineConfig."""

    method: str
    model: Path
    draft: Path | None = None
    changes: dict[str, object] = field(default_factory=dict)


def stand_in(name: str, seed: int = 0) -> StandIn:
    """Make one, or find it."""
    maker, _, which = name.partition(" of ")
    return MAKERS[maker](which, seed)


def kept(name: str, seed: int, make: Callable[[Path], None]) -> Path:
    """Return the folder that `make` fills the first time, with torch seeded."""
    folder = KEPT / f"{name}-{seed}"
    if not folder.exists():
        begun = folder.with_name(f"{folder.name}.begun")
        shutil.rmtree(begun, ignore_errors=True)
        begun.mkdir(parents=True)
        torch.manual_seed(seed)
        make(begun)
        begun.rename(folder)
    return folder


def untrained(family: str, **changes):
    """With transformers' own first weights."""
    numbers = SIZES | OF_FAMILY.get(family, {}) | changes
    hf = tiny.model(family, **numbers)
    return type(hf)(hf.config)


def llama(seed: int, layers: int = 4, width: int = 128) -> Path:
    """A model that answers most of the chats."""

    def make(folder: Path) -> None:
        hf = untrained("llama", num_hidden_layers=layers, hidden_size=width)
        written(train.whole_model(hf, seed, STEPS), folder)

    return kept(f"llama-{layers}x{width}", seed, make)


def written(hf, folder: Path) -> None:
    """As a folder of bfloat16."""
    tiny.save_folder(hf, folder, dtype=torch.bfloat16)
    write_tokenizer(folder)


def learnt(model: Path, folder: Path, seed: int, how: str) -> None:
    """Run `forerun train` on the target's own greedy answers to what it was trained on."""
    prompts = [{"messages": list(chat.messages)} for chat in split(seed)[0]]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    line = f"train --model {model} --prompts {folder / 'prompts.jsonl'} --out {folder}"
    line += f" --preset smoke --answers {len(prompts)} --answer-tokens 96 --held-out 32 --greedy 1"
    line += " --follow-up 0 --width 16 --kv-tokens 8192 --epochs 12 --batch-tokens 1200"
    line += f" --rate 3e-3 --check-every 50 --ema 0.98 --seed {seed} {how}"
    assert main(line.split()) == 0


def eagle(_: str, seed: int) -> StandIn:
    """A head of EAGLE-1."""
    model = llama(seed)
    folder = kept("eagle", seed, lambda to: learnt(model, to, seed, "--method eagle --steps 3"))
    return StandIn("EAGLE", model, folder / "draft")


def dspark(_: str, seed: int) -> StandIn:
    """A block drafter, with tables that choose a token by the one above it."""
    model, how = (
        llama(seed),
        "--method block --steps 4 --draft-vocab 1024 --block-rank 16 --epochs 30",
    )
    folder = kept("dspark", seed, lambda to: learnt(model, to, seed, how))
    return StandIn("DFLASH", model, folder / "draft")


def mapped(_: str, seed: int) -> StandIn:
    """The same head, which proposes only the commonest third of the tokens: 96 % of the answers."""
    head = eagle("", seed)

    def make(folder: Path) -> None:
        (folder / "text.txt").write_text("\n".join(chat.answer for chat in chats()))
        line = f"train --model {head.model} --token-map {folder / 'text.txt'} --out {folder}"
        assert main([*line.split(), "--draft-vocab", str(VOCAB // 3)]) == 0

    path = kept("map", seed, make) / "token_map.json"
    return StandIn("EAGLE", head.model, head.draft, {"speculative_token_map": str(path)})


def prediction(which: str, seed: int) -> StandIn:
    """A model trained with its prediction layer, or with two; a MiMo is a Qwen2 under another
    name.
    """
    family, _, two = which.partition(", ")

    def make(folder: Path) -> None:
        hf = untrained("qwen2" if family == "mimo" else family)
        how = "qwen3-next" if family in tiny.DELTAS else "mimo" if family == "mimo" else "deepseek"
        layers = train.with_prediction_layers(
            hf, 2 if two else 1, seed, STEPS, how, family in ZEROED
        )
        with_layers(hf, layers, folder, how)
        write_tokenizer(folder)
        if family == "mimo":
            config = json.loads((folder / "config.json").read_text())
            config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
            (folder / "config.json").write_text(json.dumps(config))

    return StandIn("NEXTN", kept(which, seed, make))


def standalone(_: str, seed: int) -> StandIn:
    """Two sizes, trained on the same chats."""
    return StandIn("STANDALONE", llama(seed), llama(seed, layers=2, width=64))


def assistant(_: str, seed: int) -> StandIn:
    """A Gemma 4, and an assistant trained on its keys and values."""

    def model(folder: Path) -> None:
        written(train.whole_model(untrained("gemma4_text"), seed, STEPS), folder)

    def make(folder: Path) -> None:
        hf = type(tiny.model("gemma4_text")).from_pretrained(target, dtype=torch.float32)
        made = beside(hf, hidden=64, vocab_size=VOCAB, intermediate_size=128)
        train.assistant(hf.eval(), type(made)(made.config), seed, STEPS).save_pretrained(folder)

    target = kept("gemma4", seed, model)
    return StandIn("FROZEN_KV_MTP", target, kept("assistant", seed, make))


MAKERS = {
    "EAGLE": eagle,
    "DSpark": dspark,
    "FR-Spec": mapped,
    "NEXTN": prediction,
    "STANDALONE": standalone,
    "FROZEN_KV_MTP": assistant,
}
