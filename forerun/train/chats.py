"""Stage 1 of `forerun train`: the target generates answers, which are stored as a corpus. Needs no
torch, so that an n-gram table can be made without it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forerun.checkpoints.checkpoint import Checkpoint
from forerun.text.tokenizer import Tokenizer
from forerun.train.answers import (
    AnswerStore,
    Chat,
    ChatEncoder,
    ChatGenerator,
    GenerationConfig,
    TextGenerator,
)
from forerun.train.corpus import Corpus, write_chats
from forerun.train.presets import TrainConfig
from forerun.train.prompts import Problems, read_prompts

Report = Callable[[str, int, int], None]
"""Called with (what, done, total) during a stage."""


@dataclass(frozen=True)
class TrainingTarget:
    """The target: its weights, tokenizer and chat template.

    core     whether the compiled core will serve it, in which case its features are the ones to
             train on
    threads  of the core; None = its own choice
    """

    checkpoint: Checkpoint
    tokenizer: Tokenizer
    chat: ChatEncoder
    name: str
    core: bool = False
    threads: int | None = None


def write_corpus(
    backend: TextGenerator,
    source: TrainingTarget,
    config: TrainConfig,
    prompts: Path | None,
    out: Path,
    report: Report,
) -> tuple[Corpus, Problems]:
    """Generate answers, kept in `out`/answers, and write the corpus to `out`/corpus.

    backend  generates the answers
    prompts  a jsonl file of chats; None: the target generates the user's turns
    report   called with ("answers", chats written, chats to write)

    Continues an interrupted run. Returns the corpus, and what was left out. Raises ModelError if
    almost no chat is usable.
    """
    generation = GenerationConfig(
        answers=config.answers,
        max_tokens=config.answer_tokens,
        greedy=config.greedy,
        hot=config.hot,
        temperature=config.temperature,
        follow_up=config.follow_up,
        minutes=config.answer_minutes,
        seed=config.seed,
    )
    store = AnswerStore(out / "answers")
    generator = ChatGenerator(
        backend, source.chat, source.tokenizer, generation, config.width, store.settled
    )

    def done(number: int, chat: Chat | None) -> None:
        store.add(number, chat)
        report("answers", len(store.chats), config.answers)

    try:
        chats = None if prompts is None else read_prompts(prompts, generator.problems)
        generator.generate(chats, done, len(store.chats))
    finally:
        store.save()
    return write_chats(out / "corpus", store.chats, config.held_out), generator.problems
