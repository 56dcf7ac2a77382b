"""The composition root: builds an engine on a target.

config -> target.open_target -> Target (executor, tokenizer, memory plan) Target + config ->
make_engine -> Engine load = both
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from forerun.build import text_table, tuned
from forerun.build.drafting import (
    drafting_sentence,
    lossy_sentence,
    model_drafter,
    policy_for,
)
from forerun.build.executor_entry import Progress
from forerun.build.page_store import Learns, attach_store, learns
from forerun.build.small_draft import missing
from forerun.build.target import Target, open_target
from forerun.build.text_table import TextTable
from forerun.build.with_cpu import ngram_drafter
from forerun.constrain.matcher.tree_mask import TreeGrammars
from forerun.drafters.none import NoDrafter
from forerun.drafts.ngram_table import NgramTable
from forerun.engine.thread import Engine, EngineOptions
from forerun.errors import ModelError
from forerun.interface.drafter import Drafter, TableDrafter
from forerun.machine import stamp
from forerun.options.config import EngineConfig
from forerun.options.sampling_params import NEUTRAL
from forerun.text.chat import ChatTemplate
from forerun.text.tokenizer import Tokenizer
from forerun.types import Ints


@dataclass(frozen=True, slots=True)
class Frontend:
    """The part of a loaded model that a server needs besides its engine, which may run in another
    process: to make requests from clients' bodies, and answers from the results.

    context   longest sequence in tokens, prompt and output together
    info      facts for /server_info and `doctor`, as JSON values
    sampling  the model's defaults for requests (see Target)
    """

    tokenizer: Tokenizer
    chat: ChatTemplate | None
    name: str
    context: int
    config: EngineConfig
    info: dict[str, Any]
    sampling: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Loaded(Frontend):
    """A model with its engine, as used by `serve`, `run` and `LLM`.

    text_table  n-gram table of ordinary text; None if it is not used
    """

    engine: Engine
    target: Target
    text_table: TextTable | None = None

    def close(self) -> None:
        """Stop the engine, then release the target. Waits for the engine's thread; idempotent."""
        if self.text_table is not None:
            self.text_table.close()
        self.engine.shutdown()
        self.target.close()


def make_engine(target: Target, config: EngineConfig) -> Engine:
    """Return a new engine on `target`, not started; one at a time. `config` decides drafting and
    the queue; everything else was decided when the target was opened. Uses the table of ordinary
    text if it is cached already; `text_table_of` counts it.
    """
    lookup = _lookup(config, target)
    if _uses_text_table(config, target):
        vocab = target.memory.limits.vocab
        if (table := text_table.cached_table(target.tokenizer, vocab)) is not None:
            lookup.use(table)
    return _engine_on(target, config, lookup)[0]


def _engine_on(target: Target, config: EngineConfig, lookup: TableDrafter) -> tuple[Engine, Learns]:
    grammars = TreeGrammars(target.memory.limits.vocab, target.table)
    drafter = _drafter(config, target, grammars, lookup)
    policy = policy_for(config, target.costs, drafter, grammars)
    fault = target.fault if not config.speculates else None
    options = EngineOptions(
        max_waiting=config.max_waiting,
        overlap=bool(config.overlap),
        accept_threshold_single=config.speculative_accept_threshold_single,
        accept_threshold_acc=config.speculative_accept_threshold_acc,
        adapters=tuple((adapter.name, adapter.digest) for adapter in target.adapters),
    )
    engine = Engine(target.executor, drafter, policy, target.tokenizer, grammars, options, fault)
    target.executor.watch(engine.fail)
    return engine, learns(policy, drafter, lookup)


def load(config: EngineConfig, progress: Progress | None = None) -> Loaded:
    """Open the target and start an engine on it. If `config` has no option of speculation, the
    profile of `forerun tune` decides it, if there is one. Raises what `open_target` raises.
    """
    target = open_target(config, progress)
    profile = tuned.find(config, target.config)
    if profile is not None:
        target = replace(target, config=profile.on(target.config))
    lookup = _lookup(target.config, target)
    engine, learning = _engine_on(target, target.config, lookup)
    table = text_table_of(
        target, lambda found: engine.run_in_engine(lambda core: lookup.use(found))
    )
    store = attach_store(
        target.config,
        target.executor,
        engine,
        learning,
        target.network,
        target.files,
        progress,
    )
    engine.start()
    counted = target.table is not None and target.table.answers
    drafting = drafting_sentence(
        config, target.config, target.table is not None, target.fault, counted
    )
    drafting += missing(config, target.config, target.memory.weights)
    return Loaded(
        engine=engine,
        tokenizer=target.tokenizer,
        chat=target.chat,
        name=target.name,
        context=target.memory.limits.context,
        config=target.config,
        info=_facts(target)
        | {
            "profile": profile.name if profile else None,
            "lossy": lossy_sentence(target.config),
            "kv_store": store,
            "drafting": drafting if table is None else f"{drafting}; {table.sentence}",
        },
        sampling=target.sampling,
        target=target,
        text_table=table,
    )


def text_table_of(
    target: Target, use: Callable[[NgramTable], None] = lambda _: None
) -> TextTable | None:
    """Provide an n-gram table of ordinary text, in the background, if n-grams draft on the target
    and its draft has no table. Returns None if not, or if an option excludes it.

    use  called with the table, and before with the part that is ready sooner
    """
    config = target.config
    if not _uses_text_table(config, target):
        return None
    vocab = target.memory.limits.vocab
    return text_table.load_or_count(config.model, config.revision, target.tokenizer, vocab, use)


def _uses_text_table(config: EngineConfig, target: Target) -> bool:
    enabled = config.speculates and config.algorithm.lookup and config.speculative_ngram_text
    small = target.tokenizer.vocab_size < text_table.MIN_VOCAB
    return enabled and not small and target.table is None


def _facts(target: Target) -> dict[str, Any]:
    """Return JSON values that describe a target, for /server_info, `doctor` and benchmarks."""
    return {
        "model": target.name,
        "family": target.family or target.name,
        "parameters": target.parameters,
        "config": asdict(target.config),
        "sampling_defaults": {**NEUTRAL, **target.sampling},
        "memory": target.memory.describe(),
        "executor": target.executor.describe(),
        "embeddings": _embeddings(target),
        "adapters": [{"name": one.name, "path": str(one.path)} for one in target.adapters],
        "costs": asdict(target.costs) if target.costs else None,
        "machine": stamp(),
    }


def _embeddings(target: Target) -> dict[str, Any]:
    """Return the pooling of embeddings and their length, by name."""
    rule, size = target.embedding
    return {**asdict(rule), "size": size}


def _lookup(config: EngineConfig, target: Target) -> TableDrafter:
    """Return the n-gram drafter. With a table of the target's own answers it has no cache of
    answers (decision 0054); with one of other text it has.
    """
    own = target.table is not None and target.table.answers
    capacity = 0 if own else config.speculative_ngram_capacity
    return ngram_drafter(target.memory.limits.slots, target.table, capacity)


def _drafter(
    config: EngineConfig, target: Target, grammars: TreeGrammars, lookup: TableDrafter
) -> Drafter:
    """Return the drafter of a configuration: on its draft model, else `lookup`. A new kind of
    drafter without a draft model is to be created here, by `config.algorithm.name`.
    """
    shape = config.draft_shape
    if not config.speculates or shape.nodes == 0 or shape.depth == 0:
        return NoDrafter()
    model = target.draft_model
    if model is not None and config.algorithm.model:
        return model_drafter(config, target.memory.limits, model, lookup, grammars.mask)
    return lookup


def encode_chat(loaded: Loaded | Target, messages: Sequence[dict[str, Any]]) -> Ints:
    """Return int32[T], the ids of a conversation up to the beginning of the model's answer. Raises
    ModelError if the model has no chat template, RequestError if the template rejects the messages.
    """
    if loaded.chat is None:
        raise ModelError(
            f"{loaded.name} has no chat template; it continues text. Use plain prompts "
            "(`forerun run --raw`)."
        )
    return loaded.chat.encode(list(messages))
