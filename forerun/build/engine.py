"""The composition root: everything is put together here, with an executor of the registry's.

config -> open_target -> Target (executor, tokenizer, memory plan)
Target + config -> make_engine -> Engine
load = both
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from forerun.build import text_table, tuned
from forerun.build.calibration import measure_costs, prepare, with_draft_model
from forerun.build.chat_template import template_source
from forerun.build.device import DeviceChoice, choose_device
from forerun.build.drafting import (
    NO_DRAFT,
    DraftParts,
    drafting_sentence,
    excused,
    lossy_sentence,
    model_drafter,
    open_drafts,
    policy_for,
    resolved_drafting,
    with_draft,
    with_shipped,
)
from forerun.build.executor_entry import AnyDraft, Progress
from forerun.build.memory import MemoryPlan, Needs, few_bits_sentence, few_bits_titles, plan_memory
from forerun.build.page_store import Learns, attach_store, learns
from forerun.build.registry import EXECUTORS, check_offered, choose_executor, draft_model
from forerun.build.text_table import TextTable
from forerun.build.token_map import with_token_map
from forerun.build.with_cpu import ngram_drafter
from forerun.checkpoints.adapter import LoraAdapter, read_adapter
from forerun.checkpoints.pooling import EmbeddingRule, embedding_rule
from forerun.constrain.grammar import Grammar
from forerun.constrain.isolation.compile import Compiler, open_compiler
from forerun.constrain.matcher.matcher import CompiledGrammar
from forerun.constrain.matcher.tree_mask import TreeGrammars
from forerun.control.step_costs import StepCosts
from forerun.drafters.none import NoDrafter
from forerun.drafts.ngram_table import NgramTable
from forerun.engine.options import EngineOptions
from forerun.engine.thread import Engine
from forerun.errors import ConfigError, ModelError, RequestError
from forerun.executors.toy import HIDDEN as TOY_HIDDEN
from forerun.executors.toy import ToyExecutor
from forerun.hub.catalog import Model, open_model
from forerun.interface.draft_model import DraftModel
from forerun.interface.drafter import Drafter, TableDrafter
from forerun.interface.executor import Executor
from forerun.machine import memory_available, stamp, trim_memory
from forerun.options.config import NATIVE_DTYPES, NEUTRAL, EngineConfig
from forerun.text.chat import ChatTemplate
from forerun.text.rendering import BYTE_LEVEL_TEMPLATE
from forerun.text.tokenizer import Tokenizer
from forerun.types import Ints

TOY_VOCAB, TOY_CONTEXT, TOY_TOKEN_BYTES = 259, 4096, 8


@dataclass(frozen=True, slots=True)
class Target:
    """A loaded model with its executor; engines with different drafters may share it in turn.

    config    with every None and "auto" decided, except prefill_attention_backend, which the device
              decides
    chat      None if the model has no chat template
    costs     measured at start-up; None if the policy does not need them
    compiler  of grammars; None if the model has no end-of-text token, so no text could end
    draft     the opened draft model; None without one
    draft_model  the same, ready to run
    table     the draft's n-gram table; None without one
    fault     why a draft that was named is not used
    device    where it runs, and why; None for the toy
    sampling  the model's defaults for requests: temperature, top_p, top_k, min_p,
              repetition_penalty; a missing one is neutral
    family    of its architecture; "" for the toy
    parameters  number of weights; 0 for the toy
    network  description of the network and its draft, for page_store.attach_store
    files    their weights
    embedding  how embeddings are made, and of how many numbers
    adapters   that run beside the weights, by number
    """

    executor: Executor
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    name: str
    config: EngineConfig
    memory: MemoryPlan
    costs: StepCosts | None
    compiler: Compiler | None
    draft: AnyDraft | None = None
    draft_model: DraftModel | None = None
    table: NgramTable | None = None
    fault: str | None = None
    device: DeviceChoice | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    family: str = ""
    parameters: int = 0
    network: str = "toy"
    files: tuple[Path, ...] = ()
    embedding: tuple[EmbeddingRule, int] = (EmbeddingRule(), TOY_HIDDEN)
    adapters: tuple[LoraAdapter, ...] = ()

    def compile(self, grammar: Grammar, client: str = "") -> CompiledGrammar:
        """Compile a grammar for a request; client: see Compiler. May block for seconds.

        Raises RequestError naming the field and the place at fault, BusyError if too many wait.
        """
        if self.compiler is None:
            raise RequestError(
                f"{self.name} declares no end-of-text token, so an answer under a grammar could "
                f"not end: leave {grammar.field} out.",
                grammar.field,
            )
        return self.compiler.compile(grammar, client)

    def close(self) -> None:
        """Shut down the executor and end the compiling and rendering processes. Idempotent."""
        if self.compiler is not None:
            self.compiler.close()
        if self.chat is not None:
            self.chat.close()
        self.executor.shutdown()


@dataclass(frozen=True, slots=True)
class Frontend:
    """The part of a loaded model that a server needs beside its engine, which may run in another
    process: to make requests of clients' bodies, and answers of the results.

    Fields as in Loaded and Target.
    """

    tokenizer: Tokenizer
    chat: ChatTemplate | None
    name: str
    context: int
    config: EngineConfig
    info: dict[str, Any]
    sampling: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model with its engine: `serve`, `run` and `LLM` are built on it.

    context  longest sequence in tokens, prompt and output together
    info     facts for /server_info and `doctor`, as JSON values
    text_table  n-gram table of ordinary text; None if it is not used
    """

    engine: Engine
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    name: str
    context: int
    config: EngineConfig
    info: dict[str, Any]
    target: Target
    text_table: TextTable | None = None

    @property
    def sampling(self) -> Mapping[str, float]:
        """The model's defaults for requests (see Target)."""
        return self.target.sampling

    @property
    def frontend(self) -> Frontend:
        """The part that a server needs beside the engine; it may be sent to another process."""
        return Frontend(
            self.tokenizer,
            self.chat,
            self.name,
            self.context,
            self.config,
            self.info,
            self.sampling,
        )

    def close(self) -> None:
        """Stop the engine, then release the target. Waits for the engine's thread; idempotent."""
        if self.text_table is not None:
            self.text_table.close()
        self.engine.shutdown()
        self.target.close()


def open_target(config: EngineConfig, progress: Progress | None = None) -> Target:
    """Load a model, its draft and the executor that runs them, compile its steps, and measure their
    costs. progress: called with (what, done, total).

    Raises ModelError (DownloadError if it cannot be fetched), MemoryPlanError if it does not
    fit, ConfigError if options contradict the model or the machine.
    """
    return _open_toy(config) if config.toy else _open_model(config, progress)


def make_engine(target: Target, config: EngineConfig) -> Engine:
    """Return a new engine on `target`, not started; one at a time. `config` decides drafting and
    the queue; all else was decided when the target was opened.
    """
    return _engine_on(target, config, _lookup(config, target))[0]


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
    table = _text_table(config, target, engine, lookup)
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
        target=target,
        text_table=table,
    )


def _text_table(
    asked: EngineConfig, target: Target, engine: Engine, lookup: TableDrafter
) -> TextTable | None:
    """Provide an n-gram table of ordinary text if n-grams draft and the draft has no table of its
    own. Returns None if not, or if an option excludes it.
    """
    config = target.config
    wanted = config.speculates and config.algorithm.lookup and config.speculative_ngram_text
    named_none = asked.speculative_draft_model_path == NO_DRAFT
    small = target.tokenizer.vocab_size < text_table.MIN_VOCAB
    if not wanted or named_none or small or target.table is not None:
        return None

    def use(table: NgramTable) -> None:
        engine.run_in_engine(lambda core: lookup.use(table))

    vocab = target.memory.limits.vocab
    return text_table.provide(config.model, config.revision, target.tokenizer, vocab, use)


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
    """Return how embeddings are made, and of how many numbers."""
    rule, size = target.embedding
    if not target.executor.capabilities.hidden:
        rule = replace(rule, fault=f"the executor {target.executor.name} makes none")
    return {**asdict(rule), "size": size}


def _lookup(config: EngineConfig, target: Target) -> TableDrafter:
    """Return the n-gram drafter. Beside a table of the target's own answers it has no cache of
    answers (decision 0054); beside one of other text it has.
    """
    own = target.table is not None and target.table.answers
    capacity = 0 if own else config.speculative_ngram_capacity
    return ngram_drafter(target.memory.limits.slots, target.table, capacity)


def _drafter(
    config: EngineConfig, target: Target, grammars: TreeGrammars, lookup: TableDrafter
) -> Drafter:
    """Return the drafter of a configuration."""
    shape = config.draft_shape
    if not config.speculates or shape.nodes == 0 or shape.depth == 0:
        return NoDrafter()
    model = target.draft_model
    if model is not None and config.algorithm.model:
        return model_drafter(config, target.memory.limits, model, lookup, grammars.mask)
    return lookup


def _costs(config: EngineConfig, executor: Executor) -> StepCosts | None:
    """Measure what steps cost, if the policy needs it; else return None."""
    if config.policy != "adaptive" or not config.speculates:
        return None
    return replace(measure_costs(executor), padded=executor.capabilities.padded)


def _open_toy(config: EngineConfig) -> Target:
    config = with_shipped(config)
    if config.speculative_draft_model_path is not None:
        raise ConfigError("the toy model takes no draft; leave --speculative-draft-model-path out.")
    needs = Needs(TOY_CONTEXT, TOY_VOCAB, 0, TOY_TOKEN_BYTES, 8)
    memory = plan_memory(config, needs, memory_available())
    tokenizer, executor = Tokenizer.byte_level(), ToyExecutor(memory.limits)
    policy = "fixed" if config.policy == "auto" else config.policy
    config = resolved_drafting(config, head=False, fault=None)
    config = replace(config, executor="toy", dtype="float32", device="cpu")
    config = replace(config, overlap=bool(config.overlap))
    config = _resolved(config, memory, executor, policy=policy)
    return Target(
        executor=executor,
        tokenizer=tokenizer,
        chat=_chat(template_source(config, BYTE_LEVEL_TEMPLATE), tokenizer),
        name="toy",
        config=config,
        memory=memory,
        costs=_costs(config, executor),
        compiler=open_compiler(tokenizer),
        sampling={"temperature": 0.0} if config.sampling_defaults == "model" else {},
    )


def _open_model(config: EngineConfig, progress: Progress | None) -> Target:
    model = open_model(config.model, progress, revision=config.revision, context=config.context)
    if unstretched := model.architecture.unstretched:
        warnings.warn(unstretched, stacklevel=3)
    if towers := getattr(model.checkpoint, "towers", ()):
        left_out = f"{model.path.name}: {', '.join(towers)} not loaded; only text is supported"
        warnings.warn(left_out, stacklevel=3)
    device = choose_device(config)
    arch = model.architecture
    layered = bool(getattr(model.checkpoint, "prediction_files", None))
    config = with_shipped(
        choose_executor(config, arch, model.checkpoint), layered, model.checkpoint
    )
    entry = EXECUTORS[config.executor]
    chunk = config.chunked_prefill_size or entry.prefill_chunk(config, None)
    config = replace(config, chunked_prefill_size=chunk)
    adapters = tuple(read_adapter(name, Path(folder), arch) for name, folder in config.adapters)
    needs = entry.needs(config, arch, model.checkpoint)
    needs = replace(needs, fixed=needs.fixed + sum(adapter.bytes for adapter in adapters))
    weights = needs.weights
    parts, fault = excused(config, lambda: _drafts(config, model))
    parts = parts or DraftParts()
    draft, table = parts.model, parts.table
    if draft is not None:
        config = replace(config, speculative_token_map=parts.token_map)
    if draft is not None:
        needs = with_draft(needs, draft, entry.draft_item(config), config.max_sequences)
    memory = plan_memory(config, needs, entry.free_memory(config), fill=config.device != "cpu")
    executor = entry.build(config, model.checkpoint, memory.limits, progress or (lambda *_: None))
    if adapters:
        executor.adapt(adapters)
    here = str(executor.describe()["dtype"]) if config.dtype in NATIVE_DTYPES else None
    for title in few_bits_titles(model.checkpoint, config):
        warnings.warn(few_bits_sentence(model.path, title, weights, here), stacklevel=3)
    if config.overlap is None:
        config = replace(config, overlap=executor.capabilities.overlap)
    policy = "adaptive" if config.policy == "auto" else config.policy
    config = _resolved(config, memory, executor, policy=policy)
    metadata = getattr(model.checkpoint, "metadata", {})
    drafts: DraftModel | None = None
    if draft is not None:
        drafts, fault = excused(
            config, lambda: draft_model(config, executor, model.checkpoint, draft)
        )
    block = drafts.traits.block_size if drafts is not None else 0
    config = resolved_drafting(config, drafts is not None, fault, block, draft)
    within = drafts is not None and draft is not None and draft.kind in entry.within
    within = within and drafts is not None and not drafts.traits.on_host
    prepare(config, executor, within, progress)
    costs = _costs(config, executor)
    if costs is not None and drafts is not None:
        costs = with_draft_model(costs, drafts, executor, config.page_size)
    return Target(
        draft=draft if drafts is not None else None,
        draft_model=drafts,
        table=table,
        fault=fault,
        device=device,
        executor=executor,
        tokenizer=model.tokenizer,
        chat=_chat(template_source(config, model.chat_template), model.tokenizer),
        name=model.name,
        config=config,
        memory=memory,
        costs=costs,
        compiler=open_compiler(model.tokenizer),
        sampling=model.sampling if config.sampling_defaults == "model" else {},
        family=arch.family,
        parameters=arch.parameters,
        network=f"{arch} {drafts and drafts.traits.name} {draft and draft.cache}",
        files=(model.checkpoint.path, *([draft.path] if draft and drafts else [])),
        embedding=(embedding_rule(model.path, metadata), arch.hidden),
        adapters=adapters,
    )


def _drafts(config: EngineConfig, target: Model) -> DraftParts:
    """Return the draft model of the configured draft, if the executor runs its kind."""
    parts = open_drafts(config, target)
    if parts.model is None:
        return parts
    check_offered(config, parts.model)
    return with_token_map(config, target, parts)


def _resolved(
    config: EngineConfig, memory: MemoryPlan, executor: Executor, policy: str
) -> EngineConfig:
    """Return the configuration with the values that the memory plan and the executor decided."""
    limits, threads = memory.limits, executor.describe().get("threads")
    return replace(
        config,
        context=limits.context,
        kv_tokens=limits.pages * limits.page_size,
        chunked_prefill_size=limits.max_nodes,
        threads=config.threads or (threads if isinstance(threads, int) else None),
        policy=policy,
    )


def _chat(source: str | None, tokenizer: Tokenizer) -> ChatTemplate | None:
    return ChatTemplate(source, tokenizer) if source else None


def open_text(config: EngineConfig) -> tuple[Tokenizer, ChatTemplate | None]:
    """Return a model's tokenizer, ready to encode, and its chat template, None without one. Raises
    ModelError, DownloadError, ConfigError.
    """
    if config.toy:
        tokenizer, template = Tokenizer.byte_level(), BYTE_LEVEL_TEMPLATE
        return tokenizer, _chat(template_source(config, template), tokenizer)
    model = open_model(config.model, revision=config.revision)
    model.tokenizer.warm_up()
    chat = _chat(template_source(config, model.chat_template), model.tokenizer)
    trim_memory()
    return model.tokenizer, chat and chat.warmed_up()


def encode_chat(loaded: Loaded | Target, messages: Sequence[dict[str, Any]]) -> Ints:
    """Return int32[T], a conversation's ids up to the beginning of the model's answer. Raises
    ModelError if the model has no chat template, RequestError if the template refuses the messages.
    """
    if loaded.chat is None:
        raise ModelError(
            f"{loaded.name} has no chat template; it continues text. Use plain prompts "
            "(`forerun run --raw`)."
        )
    return loaded.chat.encode(list(messages))
