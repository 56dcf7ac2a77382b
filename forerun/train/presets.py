"""The options of `forerun train`, and the presets. Imports no torch, because `--help` imports this
module.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

from forerun.errors import ConfigError
from forerun.options.fields import option, settle
from forerun.options.flags import own_option


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The options of training a draft. `presets` has sets of values that belong together."""

    answers: int = option(2000, "answers the target writes", low=2)
    answer_tokens: int = option(384, "longest answer, in tokens", low=8)
    greedy: float = option(0.5, "share of answers written at temperature 0", low=0, high=1)
    hot: float = option(0.0, "share of answers written at temperature 1", low=0, high=1)
    temperature: float = option(0.8, "temperature of the other answers", low=0, high=2)
    follow_up: float = option(0.1, "share of chats with a second turn", low=0, high=1)
    answer_minutes: float = option(0.0, "begin no answer after this long (0 = no limit)", low=0)
    start_from: str | None = option(
        None,
        "go on from this draft head (EAGLE-1 or EAGLE-3, any dialect) with a fresh schedule; "
        "shape and vocabulary are its own",
    )
    held_out: int = option(64, "chats kept aside to choose the best checkpoint", low=1)
    draft_vocab: int = option(16384, "size of the draft vocabulary", low=16)
    epochs: float = option(4.0, "passes over the answers", low=0.01)
    batch_tokens: int = option(
        2400, "answer tokens in one training step; what they answer comes on top", low=16
    )
    length: int = option(512, "longest training sequence, in tokens (its end is kept)", low=16)
    steps: int = option(
        3, "unrolled steps of the training-time test; draft tokens of a block", low=1, high=16
    )
    decay: float = option(0.8, "weight of each further unrolled step or draft token", low=0, high=1)
    thin: float = option(
        1.0, "share of rows that goes on to each further unrolled step", low=0.01, high=1
    )
    ema: float = option(
        0.0,
        "decay of a running average of the weights, such as 0.999; the better of average and "
        "weights is kept (0 = no average)",
        low=0,
        high=0.99999,
    )
    rate: float = option(1e-3, "highest learning rate", low=1e-7, high=1)
    train_minutes: float = option(
        0.0, "train this long at most; the learning rate falls in time (0 = all epochs)", low=0
    )
    check_every: int = option(100, "training steps between held-out checks", low=1)
    width: int = option(32, "answers written at once", low=1, high=4096)
    method: str = option(
        "eagle3",
        "what is made: an EAGLE-3 head, an EAGLE-1 head (eagle; EAGLE-2 is the same one), a "
        "prediction layer (mtp, for NEXTN) or a block drafter, each with an n-gram table, or the "
        "table alone",
        choices=("eagle3", "eagle", "mtp", "block", "table"),
    )
    feature_noise: float = option(
        0.2,
        "width of the uniform noise on the hidden states that an EAGLE-1 head reads, in a text of "
        "512 tokens; inversely in shorter and longer ones",
        low=0,
        high=10,
    )
    block_layers: int = option(1, "decoder layers of a block drafter", low=1, high=64)
    block_features: int = option(3, "hidden states that a block drafter reads", low=1, high=64)
    block_anchors: int = option(64, "blocks of an answer in one training step", low=1)
    block_causal: bool = option(
        True,
        "a place of a block sees those before it only, and the root predicts too; else all see "
        "all, and the masks alone predict (DFlash)",
    )
    block_rank: int = option(
        0,
        "rank of the table by which a block drafter's tokens depend on the one above, with a "
        "confidence beside it (DSpark; 0 = neither)",
        low=0,
        high=4096,
    )
    train_device: str = option("cpu", "torch device that trains")
    train_bfloat16: bool = option(
        False,
        "matrix products of training in bfloat16, as always on a GPU: faster on CPUs with "
        "AVX-512 BF16 or AMX, slower on others",
    )
    seed: int = option(0, "seed of prompts, noise and shuffling", low=0)

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of bounds."""
        settle(self)
        if self.greedy + self.hot > 1:
            raise ConfigError(
                f"greedy is {self.greedy} and hot is {self.hot}: these shares of the answers add "
                "up to more than 1; lower one of them"
            )


MAPPED, UNROLLED = ("eagle3", "mtp", "block"), ("eagle3", "eagle", "mtp")
TRAINED = (*UNROLLED, "block")
METHODS: dict[str, tuple[str, ...]] = {
    "draft_vocab": MAPPED,
    **dict.fromkeys(("epochs", "batch_tokens", "steps", "decay", "ema"), TRAINED),
    **dict.fromkeys(("rate", "train_minutes", "check_every", "train_bfloat16"), TRAINED),
    "thin": UNROLLED,
    "start_from": ("eagle3", "eagle"),
    "feature_noise": ("eagle",),
    **dict.fromkeys(
        ("block_layers", "block_features", "block_anchors", "block_causal", "block_rank"),
        ("block",),
    ),
}
"""The methods that an option applies to; an option that is not listed applies to all."""

PRESETS: dict[str, tuple[str, TrainConfig]] = {
    "smoke": (
        "seconds; proves that everything works, the draft is useless",
        TrainConfig(
            answers=24,
            answer_tokens=48,
            held_out=4,
            draft_vocab=1024,
            epochs=4,
            batch_tokens=240,
            length=128,
            steps=2,
            check_every=10,
        ),
    ),
    "table": (
        "as long as the answers take: an n-gram table, which costs no arithmetic, and no head",
        TrainConfig(answers=4000, answer_tokens=224, held_out=96, method="table"),
    ),
    "cpu": (
        "about an hour and a half on two cores for a model of 135M; a modest draft",
        TrainConfig(
            answers=2500,
            answer_tokens=224,
            held_out=96,
            draft_vocab=8192,
            batch_tokens=1200,
            thin=0.5,
            check_every=100,
        ),
    ),
    "gpu-25min": (
        "25 minutes of a large GPU; a good draft for a small model",
        TrainConfig(
            answers=200_000,
            answer_minutes=7,
            held_out=500,
            epochs=6,
            train_minutes=14,
            batch_tokens=28_672,
            length=2048,
            steps=7,
            width=256,
            train_device="cuda",
        ),
    ),
    "full": (
        "your own prompts, ten epochs, seven unrolled steps",
        TrainConfig(
            answers=1_000_000,
            answer_tokens=1024,
            held_out=1000,
            epochs=10,
            batch_tokens=20_480,
            length=4096,
            steps=7,
            rate=6e-4,
            check_every=500,
            width=256,
            train_device="cuda",
        ),
    ),
}


def resolve(preset: str, changes: dict[str, Any]) -> TrainConfig:
    """Return the preset's values, replaced by the `changes` that are not None. Raises KeyError for
    an unknown preset, ConfigError for a value out of bounds or an option of other methods.
    """
    given = {name: value for name, value in changes.items() if value is not None}
    config = replace(PRESETS[preset][1], **given)
    for item in fields(TrainConfig):
        methods = METHODS.get(item.name, (config.method,))
        if item.name in given and config.method not in methods:
            flag = own_option(item).flag
            if given[item.name] is False:
                flag = f"--no-{flag[2:]}"
            raise ConfigError(
                f"{flag} belongs to --method {' or '.join(methods)}, not to {config.method}; "
                "leave it out"
            )
    return config
