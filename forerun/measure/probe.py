"""Which reading of a draft's configuration is right: each is served, the most accepted one wins.

The text is the target's own under every reading, so acceptance is compared on the same tokens.
Some mistakes cost a hundredth of a token per step (features off by one layer), others nearly all,
so the sample grows where readings are close.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forerun.build.engine import open_target
from forerun.errors import ConfigError
from forerun.hub.catalog import open_model
from forerun.measure.acceptance import (
    CHAIN,
    Progress,
    Question,
    agreement,
    drafting,
    mean_length,
    serve,
    shaped,
)
from forerun.measure.workload import Prompt, read_prompts, spread
from forerun.models.block_folder import holds_block
from forerun.models.config_variants import plausible, reading_of, turned
from forerun.models.draft_config import DraftHead
from forerun.models.draft_folder import open_draft
from forerun.options.config import EngineConfig

PROMPTS, TOKENS = 20, 64
FIRST = 5
"""Every how many-th prompt the first round serves."""
CLOSE = 0.1
"""Tokens per step behind the best of the first round that are tried again on the other prompts."""
EQUAL = 0.01
"""Share of the length that chance alone may make: among equals the configuration is believed."""
FEEDBACKS = ("feedback=normed", "feedback=raw")
"""What prediction layers may carry; the first is what all families are read as."""
USELESS = 1.1
"""Tokens per step below which no reading was right: a head that drafts at random reaches 1.0."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One reading, as --draft-reading takes it. Length and agreement as in acceptance.Finding.

    tokens  that were served to find out
    """

    variant: str
    configured: bool
    length: float
    agreement: tuple[float, ...]
    tokens: int


def probe(
    config: EngineConfig,
    progress: Progress,
    prompts: Sequence[Prompt] | None = None,
    tokens: int = TOKENS,
) -> list[Attempt]:
    """Serve a chain of 3 under every plausible reading of a draft head's configuration, the
    recommended one first in the result.

    config    names the draft; each reading gets a target of its own
    progress  called with (what, readings so far, readings in all)
    prompts   None = PROMPTS built-in ones, of which every FIRST-th is served in the first round
    tokens    output tokens per prompt, greedy

    Those within CLOSE of the best, and the best with other rotary bases, are served on the other
    prompts. Raises ConfigError without a draft or for a block drafter, and what `open_target`
    raises.
    """
    named = config.speculative_draft_model_path
    if named is None:
        raise ConfigError(
            "there is no draft head to probe; add --speculative-draft-model-path FOLDER."
        )
    prompts = prompts or spread(read_prompts(), PROMPTS)
    few = [prompt for index, prompt in enumerate(prompts) if index % FIRST == 0]
    more = [prompt for index, prompt in enumerate(prompts) if index % FIRST]
    arch = open_model(config.model).architecture
    if holds_block(Path(named)):
        raise ConfigError(
            f"{named} holds a block drafter, whose configuration leaves nothing to probe; leave "
            "--probe out."
        )
    heads = plausible(open_draft(Path(named), arch).head, arch)

    def tried(heads: list[DraftHead], prompts: list[Prompt], what: str) -> list[Attempt]:
        found = []
        for index, head in enumerate(heads):
            progress(f"probe: {what}", index, len(heads))
            found.append(_attempt(config, reading_of(head), prompts, tokens))
        return found

    first = tried(heads, few, "all readings")
    best = max(range(len(heads)), key=lambda index: first[index].length)
    near = [first[best].length - attempt.length <= CLOSE for attempt in first]
    last = [head for head, close in zip(heads, near, strict=True) if close]
    finals = tried(last + turned(heads[best], arch), more, "the best again")
    others = [attempt for attempt, close in zip(first, near, strict=True) if not close]
    own = reading_of(heads[0])
    found = [replace(a, configured=a.variant == own) for a in _ranked(finals) + _ranked(others)]
    return sorted(found, key=lambda attempt: attempt.variant != _winner(finals).variant)


def probe_layers(
    config: EngineConfig,
    progress: Progress,
    prompts: Sequence[Prompt] | None = None,
    tokens: int = TOKENS,
) -> list[Attempt]:
    """`probe` for the target's own prediction layers, same arguments and result: their
    configurations leave one thing open, which hidden state goes from one draft step to the next. A
    wrong one is accepted less from the second position on. Raises what `open_target` raises.
    """
    prompts = prompts or spread(read_prompts(), PROMPTS)
    found = []
    for index, variant in enumerate(FEEDBACKS):
        progress("probe: both readings", index, len(FEEDBACKS))
        attempt = _attempt(config, variant, prompts, tokens, "NEXTN")
        found.append(replace(attempt, configured=index == 0))
    best = _winner(found)
    return sorted(found, key=lambda attempt: attempt is not best)


def _ranked(attempts: list[Attempt]) -> list[Attempt]:
    return sorted(attempts, key=lambda attempt: -attempt.length)


def _winner(finals: list[Attempt]) -> Attempt:
    """The first that no other beats by more than chance: the configured reading comes first."""
    longest = max(attempt.length for attempt in finals)
    return next(a for a in finals if a.length >= longest * (1 - EQUAL))


def _attempt(
    config: EngineConfig,
    variant: str,
    prompts: Sequence[Prompt],
    tokens: int,
    algorithm: str = "EAGLE",
) -> Attempt:
    """A target of its own for each reading: no head is left over beside the next."""
    at_once = len(prompts)
    config = replace(
        shaped(config, CHAIN),
        speculative_algorithm=algorithm,
        draft_reading=variant,
        draft_on_error="stop",
        max_sequences=at_once,
        kv_tokens=config.kv_tokens or 512 * at_once,
        disable_cuda_graph=True,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The engine that will serve says it again.
        target = open_target(config)
    try:
        question = Question("probe", tuple(prompts), 0.0, tokens, at_once)
        done, _ = serve(target, target.config, question, lambda *_: None)
    finally:
        target.close()
    histogram = drafting(done)
    return Attempt(
        variant=variant,
        configured=False,
        length=mean_length(histogram),
        agreement=agreement(histogram)[: CHAIN.depth],
        tokens=sum(len(item.tokens) for item in done),
    )
