"""The drafting methods, under SGLang's names, in one table.

A new method is a row here, and a case of `_drafter` in build/engine.py, which creates its drafter:
without a draft model by the row's name. Such a row sets `lookup`: a row with neither `model` nor
`lookup` drafts nothing (EngineConfig.speculates).
"""

from dataclasses import dataclass
from typing import Literal

from forerun.draft_shape import DraftShape
from forerun.errors import ConfigError

DEFAULT_STEPS, MOST_STEPS, MOST_TREE_TOKENS = 8, 64, 64
NGRAM_STEPS = 15
"""Default depth of n-grams, alone and with a draft model, on the compiled core, where the policy
selects nodes one by one: a step of 16 nodes. (Replayed with costs of Gemma 3 270M, texts that loop
and others, speed over plain decoding with 8, 15 and 16: 3.44, 3.71, 3.73 and 2.39, 2.45, 2.47 at
T=0; 1.552, 1.550, 1.522 and 1.327, 1.330, 1.296 at .8. Default model: the same within .005. Beside
SmolLM2-135M for Qwen2.5 Coder 1.5B in Q4_K_M, twice six prompts, tokens a step: 1.91 and 1.78 at
T=0, 1.37 and 1.38 at .8; with 8: 1.90, 1.72, 1.36, 1.35.)
"""
STANDALONE_SHAPE = DraftShape(nodes=8, width=2, depth=8)
"""Default shape of whole models that draft on the compiled core, where the policy uses a part of
it. (SmolLM2-135M beside n-grams for Qwen2.5 Coder 1.5B, MT-bench, T=0 and .8, 7 draft tokens in
every step: 2.60 and 2.54 tokens with 4 levels 2 wide, 2.49 and 2.46 with 3 levels 4 wide, 2.43 and
2.39 with a chain of 5; n-grams alone 1.67 and 1.60. Deeper levels are grown only if they pay.)
"""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One value of speculative-algorithm.

    name      in resolved configurations and messages
    meaning   half a sentence for users
    aliases   other names with the same meaning
    model     drafts with a draft model
    kind      of draft model: a draft head, a whole model with layers and a vocabulary of its own,
              layers in the target's own checkpoint, or an assistant that reads the target's cache
    lookup    drafts with n-grams
    block     drafts a block in one pass, whose trees branch at every node
    max_topk  largest speculative-eagle-topk; None = any, 0 = the method shapes its trees itself
    max_steps longest path; None = any
    """

    name: str
    meaning: str
    aliases: tuple[str, ...] = ()
    model: bool = False
    kind: Literal["head", "whole", "layers", "assistant"] = "head"
    lookup: bool = False
    block: bool = False
    max_topk: int | None = None
    max_steps: int | None = None


ALGORITHMS = (
    Algorithm(
        "AUTO",
        "by the draft that is named: a head is EAGLE, a block drafter DFLASH, prediction "
        "layers NEXTN, an assistant FROZEN_KV_MTP, a whole model STANDALONE; with none named, "
        "where they run, NEXTN if the target has prediction layers or mtp-NAME.gguf beside it, "
        "FROZEN_KV_MTP if its assistant is, else NGRAM; on a CPU each with +NGRAM, and STANDALONE "
        "with the built-in model for large targets, where it was fetched",
        model=True,
        lookup=True,
    ),
    Algorithm(
        "EAGLE",
        "a draft head of the EAGLE family (1, 2, 3 or 3.1), as its tensors say; with no draft "
        "named, NEXTN where the target has prediction layers",
        aliases=("EAGLE2",),
        model=True,
    ),
    Algorithm("EAGLE3", "a draft head that must be of the third kind (3 or 3.1)", model=True),
    Algorithm(
        "EAGLE+NGRAM",
        "n-grams and the draft head in one tree, each node by how often such nodes were right",
        aliases=("NGRAM+EAGLE", "EAGLE3+NGRAM", "NGRAM+EAGLE3"),
        model=True,
        lookup=True,
    ),
    Algorithm(
        "NGRAM",
        "lookup in the text so far, in an n-gram table and in finished answers",
        aliases=("SUFFIX", "PROMPT_LOOKUP"),
        lookup=True,
        max_topk=0,
    ),
    Algorithm("OFF", "no speculation", aliases=("NONE",)),
    Algorithm(
        "NEXTN",
        "the target's own prediction layers, read from its checkpoint, or a draft's",
        aliases=("MTP",),
        model=True,
        kind="layers",
    ),
    Algorithm(
        "NEXTN+NGRAM",
        "n-grams and prediction layers in one tree",
        aliases=("NGRAM+NEXTN", "MTP+NGRAM", "NGRAM+MTP"),
        model=True,
        kind="layers",
        lookup=True,
    ),
    Algorithm(
        "FROZEN_KV_MTP",
        "Gemma 4's assistant, which reads the target's cache",
        aliases=("GEMMA4_MTP", "ASSISTANT"),
        model=True,
        kind="assistant",
    ),
    Algorithm(
        "FROZEN_KV_MTP+NGRAM",
        "n-grams and Gemma 4's assistant in one tree",
        aliases=("NGRAM+FROZEN_KV_MTP",),
        model=True,
        kind="assistant",
        lookup=True,
    ),
    Algorithm(
        "STANDALONE",
        "a smaller model drafts; of another vocabulary, what the two share",
        aliases=("DRAFT_MODEL",),
        model=True,
        kind="whole",
    ),
    Algorithm(
        "STANDALONE+NGRAM",
        "n-grams and a smaller model in one tree",
        aliases=("NGRAM+STANDALONE",),
        model=True,
        kind="whole",
        lookup=True,
    ),
    Algorithm(
        "DFLASH",
        "a block drafter (DFlash, DFlash2, JetSpec, DSpark): several tokens in one pass, as a "
        "chain or, with a top-k, the best tree of what it says",
        aliases=("DFLASH2", "DSPARK"),
        model=True,
        block=True,
    ),
    Algorithm(
        "DFLASH+NGRAM",
        "n-grams and a block drafter in one tree",
        aliases=("NGRAM+DFLASH",),
        model=True,
        block=True,
        lookup=True,
    ),
    Algorithm(
        "NAIVE",
        "a draft head proposes one token a step",
        aliases=("NAIVE_EAGLE",),
        model=True,
        max_topk=1,
        max_steps=1,
    ),
)
"""All drafting methods."""

NAMES = tuple(item.name for item in ALGORITHMS)
"""All values of speculative-algorithm, without aliases."""

_BY_NAME = {name: item for item in ALGORITHMS for name in (item.name, *item.aliases)}


def algorithm(name: str) -> Algorithm:
    """Return the row of a method by its name or an alias, in any case. Raises ConfigError, which
    lists the names, for an unknown one.
    """
    method = _BY_NAME.get(name.strip().upper().replace("-", "_"))
    if method is None:
        raise ConfigError(
            f"speculative-algorithm is {name!r}, but must be one of: {', '.join(NAMES)}."
        )
    return method


def capacity(steps: int, topk: int, block: bool = False) -> int:
    """Return the tokens of the largest tree, the root included: `topk` on the first level, topk x
    topk on each further one (EAGLE-2, arXiv 2406.16858, section 4.1); of a block, `topk` below
    every node.
    """
    if block and topk > 1:
        return sum(topk**depth for depth in range(steps + 1))
    return 1 + topk + (steps - 1) * topk * topk if steps > 0 else 1


def draft_shape(steps: int | None, topk: int | None, tokens: int | None) -> DraftShape:
    """Return the largest draft, with defaults for values that are None.

    tokens  of the draft, the root (the last accepted token) included. Default: chains of `steps`
            tokens, `topk` of them, but at most MOST_TREE_TOKENS or a single chain
    steps   default: as many as a chain of `tokens` has, else DEFAULT_STEPS
    """
    width = topk or 1
    if steps is None:
        chain = tokens is not None and width == 1
        steps = min(tokens - 1, MOST_STEPS) if chain and tokens is not None else DEFAULT_STEPS
    if tokens is None:
        tokens = min(steps * width + 1, max(MOST_TREE_TOKENS, steps + 1))
    return DraftShape(tokens - 1, width, steps)


def check_shape(method: Algorithm, steps: int | None, topk: int | None, tokens: int | None) -> None:
    """Raise ConfigError, with the numbers and what to change, if a method cannot draft these steps,
    top-k or tokens; None = not given.
    """
    if topk is not None and method.max_topk == 0:
        raise ConfigError(
            f"speculative-eagle-topk is {topk}, but {method.name} branches where the text did; "
            "leave it out: speculative-num-draft-tokens bounds its trees."
        )
    if topk is not None and method.max_topk is not None and topk > method.max_topk:
        raise ConfigError(
            f"speculative-eagle-topk is {topk}, but {method.name} takes at most {method.max_topk}."
        )
    steps = method.max_steps if steps is None else steps
    if steps is not None and method.max_steps is not None and steps > method.max_steps:
        raise ConfigError(
            f"speculative-num-steps is {steps}, but {method.name} drafts at most "
            f"{method.max_steps}; use EAGLE for longer paths."
        )
    if method.lookup or not method.model or tokens is None:
        return
    shape = draft_shape(steps, topk, tokens)
    topk, steps = shape.width, shape.depth
    most = capacity(steps, topk, method.block)
    if tokens > most:
        grown = f"1 + {topk} + {steps - 1} x {topk} x {topk}"
        grown = f"1 + {topk} + .. + {topk} ** {steps}" if method.block else grown
        grown = f"1 + {steps}" if topk == 1 else grown
        raise ConfigError(
            f"speculative-num-draft-tokens is {tokens}, but {steps} steps with top-k "
            f"{topk} make at most {grown} = {most} (the first is the last accepted token): "
            f"lower it to {most}, or raise speculative-num-steps or speculative-eagle-topk."
        )
