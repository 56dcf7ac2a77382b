"""Opens a model: its files, the executor that runs it, its draft and its memory plan."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from forerun.build.cached_costs import cached_or_measured
from forerun.build.calibration import (
    measure_costs,
    prepare,
    timed_nodes,
    timed_tokens,
    with_draft_model,
)
from forerun.build.chat_template import template_source, template_variables
from forerun.build.device import DeviceChoice, choose_device
from forerun.build.drafting import (
    DraftParts,
    excused,
    open_drafts,
    resolved_drafting,
    with_draft,
    with_shipped,
)
from forerun.build.executor_entry import AnyDraft, Progress
from forerun.build.memory import MemoryPlan, Needs, few_bits_sentence, few_bits_titles, plan_memory
from forerun.build.registry import EXECUTORS, choose_executor
from forerun.build.small_draft import with_small
from forerun.build.token_map import with_token_map
from forerun.build.tuned import key_of
from forerun.checkpoints.adapter import LoraAdapter, read_adapter
from forerun.checkpoints.folder import INDEXERS
from forerun.checkpoints.mapped import release_files
from forerun.checkpoints.pooling import EmbeddingRule, embedding_rule
from forerun.constrain.grammar import Grammar
from forerun.constrain.isolation.compile import Compiler, open_compiler
from forerun.constrain.matcher.matcher import CompiledGrammar
from forerun.control.step_costs import StepCosts
from forerun.drafts.ngram_table import NgramTable
from forerun.drafts.standalone_draft import StandaloneDraft
from forerun.errors import ConfigError, RequestError
from forerun.executors.toy import HIDDEN as TOY_HIDDEN
from forerun.executors.toy import ToyExecutor
from forerun.hub.catalog import Model, open_model
from forerun.interface.draft_model import DraftModel
from forerun.interface.executor import Executor
from forerun.machine import collected_later, cores, cpu_name, memory_available, trim_memory
from forerun.options.config import NATIVE_DTYPES, EngineConfig
from forerun.text.chat import ChatTemplate
from forerun.text.rendering import BYTE_LEVEL_TEMPLATE
from forerun.text.tokenizer import Tokenizer
from forerun.version import __version__

TOY_VOCAB, TOY_CONTEXT, TOY_TOKEN_BYTES = 259, 4096, 8


@dataclass(frozen=True, slots=True)
class Target:
    """A loaded model with its executor; engines with different drafters may share it in turn.

    config    with every None and "auto" decided, except prefill_attention_backend, which the device
              decides
    chat      None if the model has no chat template
    costs     measured at start-up; None if the policy does not need them
    compiler  of grammars; None if the model has no end-of-text token, so no text could end
    draft     the opened draft model's files; None without one
    draft_model  the draft model, ready to run
    table     the draft's n-gram table; None without one
    fault     why a named draft is not used
    device    the device, with the reason; None for the toy
    sampling  the model's defaults for requests: temperature, top_p, top_k, min_p,
              repetition_penalty; a missing one is neutral
    family    of its architecture; "" for the toy
    parameters  number of weights; 0 for the toy
    network  description of the network and its draft, for page_store.attach_store
    files    of their weights
    embedding  (pooling rule of embeddings, their length)
    adapters   LoRA adapters, by number
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
        """Compile a grammar for a request. client: see Compiler. May block for seconds. Raises
        RequestError naming the field and the place of the fault, BusyError if too many wait.
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


def open_target(config: EngineConfig, progress: Progress | None = None) -> Target:
    """Load a model, its draft and the executor that runs them, compile its steps, and measure their
    costs. progress: called with (what, done, total).

    Raises ModelError (DownloadError if it cannot be fetched), MemoryPlanError if it does not
    fit, ConfigError if options contradict the model or the machine.
    """
    return _open_toy(config) if config.toy else _open_model(config, progress)


def _open_toy(config: EngineConfig) -> Target:
    config = with_shipped(config)
    if config.speculative_draft_model_path is not None:
        raise ConfigError("the toy model takes no draft; leave --speculative-draft-model-path out.")
    needs = Needs(TOY_CONTEXT, TOY_VOCAB, 0, TOY_TOKEN_BYTES, 8)
    memory = plan_memory(config, needs, memory_available())
    tokenizer, executor = Tokenizer.byte_level(), ToyExecutor(memory.limits)
    config = resolved_drafting(config, head=False, fault=None)
    config = replace(config, executor="toy", dtype="float32", device="cpu")
    config = replace(config, overlap=bool(config.overlap))
    config = _resolved(config, memory, executor, policy="fixed")
    return Target(
        executor=executor,
        tokenizer=tokenizer,
        chat=_chat(config, BYTE_LEVEL_TEMPLATE, tokenizer),
        name="toy",
        config=config,
        memory=memory,
        costs=_costs(config, executor) if _priced(config) else None,
        compiler=open_compiler(tokenizer),
        sampling=_sampling(config, {"temperature": 0.0}),
    )


def _sampling(config: EngineConfig, recommended: Mapping[str, float]) -> dict[str, float]:
    """Return the sampling parameters of requests that set none: the model's unless the options
    exclude them, and those that the options override.
    """
    usual = recommended if config.sampling_defaults == "model" else {}
    return {**usual, **config.overridden_sampling}


def _open_model(config: EngineConfig, progress: Progress | None) -> Target:
    model = open_model(config.model, progress, revision=config.revision, context=config.context)
    _warn_of_omissions(model)
    unnamed = config.speculative_draft_model_path is None
    device, config = choose_device(config), _with_executor(config, model)
    entry, arch = EXECUTORS[config.executor], model.architecture
    adapters = tuple(read_adapter(name, Path(folder), arch) for name, folder in config.adapters)
    needs = entry.needs(config, arch, model.checkpoint)
    weights = needs.weights
    needs = replace(needs, fixed=needs.fixed + sum(adapter.bytes for adapter in adapters))
    parts, fault = excused(config, lambda: _drafts(config, model))
    parts = parts or DraftParts()
    if unnamed:
        parts = with_small(config, model, parts, needs, entry)
    if parts.model is not None:
        config = replace(config, speculative_token_map=parts.token_map)
        item = entry.draft_item(config)
        needs = with_draft(needs, parts.model, item, config.max_sequences)
    memory = plan_memory(config, needs, entry.free_memory(config), fill=config.device != "cpu")
    executor = entry.build(config, model.checkpoint, memory.limits, progress or (lambda *_: None))
    if adapters:
        executor.adapt(adapters)
    _warn_of_few_bits(config, model, executor, weights)
    config = _resolved(config, memory, executor)
    draft, drafts = parts.model, None
    if draft is not None:
        drafts, fault = excused(
            config, lambda: entry.draft_model(executor, model.checkpoint, draft)
        )
        if isinstance(draft, StandaloneDraft) and unnamed:
            fault = None  # The draft was not named, so n-grams draft without it.
    block = drafts.traits.block_size if drafts is not None else 0
    config = resolved_drafting(config, drafts is not None, fault, block, draft)
    return Target(
        draft=draft if drafts is not None else None,
        draft_model=drafts,
        table=parts.table,
        fault=fault,
        device=device,
        executor=executor,
        tokenizer=model.tokenizer,
        chat=_chat(config, model.chat_template, model.tokenizer),
        name=model.name,
        config=config,
        memory=memory,
        costs=_prepared_costs(config, executor, draft, drafts, progress, model),
        compiler=open_compiler(model.tokenizer),
        sampling=_sampling(config, model.sampling),
        family=arch.family,
        parameters=arch.parameters,
        network=f"{arch} {drafts and drafts.traits.name} {draft and draft.cache}",
        files=(model.checkpoint.path, *([draft.path] if draft and drafts else [])),
        embedding=(
            embedding_rule(model.path, getattr(model.checkpoint, "metadata", {})),
            arch.hidden,
        ),
        adapters=adapters,
    )


def _warn_of_omissions(model: Model) -> None:
    """Warn of parts of the model's files that are not used."""
    if unstretched := model.architecture.unstretched:
        warnings.warn(unstretched, stacklevel=4)
    if towers := getattr(model.checkpoint, "towers", ()):
        why = "only text is supported"
        if towers == INDEXERS:
            limit = f"{model.architecture.context:,}"
            why = f"texts end at {limit} tokens, up to which attention is not sparse"
        left_out = f"{model.path.name}: {', '.join(towers)} not loaded; {why}"
        warnings.warn(left_out, stacklevel=4)


def _warn_of_few_bits(config: EngineConfig, model: Model, executor: Executor, weights: int) -> None:
    """Warn of matrices that are stored in few bits.

    weights  bytes that they take in memory
    """
    here = str(executor.describe()["dtype"]) if config.dtype in NATIVE_DTYPES else None
    for title in few_bits_titles(model.checkpoint, config):
        warnings.warn(few_bits_sentence(model.path, title, weights, here), stacklevel=4)


def _with_executor(config: EngineConfig, model: Model) -> EngineConfig:
    """Return the configuration with the executor, the draft that comes with the model, and the
    chunk size of prompts decided.
    """
    chosen = choose_executor(config, model.architecture, model.checkpoint)
    layered = bool(getattr(model.checkpoint, "prediction_files", None))
    config = with_shipped(chosen, layered, model.checkpoint)
    prefill_chunk = EXECUTORS[config.executor].prefill_chunk
    chunk = config.chunked_prefill_size or prefill_chunk(config, None)
    return replace(config, chunked_prefill_size=chunk)


def _prepared_costs(
    config: EngineConfig,
    executor: Executor,
    draft: AnyDraft | None,
    drafts: DraftModel | None,
    progress: Progress | None,
    model: Model,
) -> StepCosts | None:
    """Compile everything that steps will run, then return the costs of steps; None if the policy
    does not need them. On the compiled core they are those that its last starts measured, if
    stored.
    """
    entry = EXECUTORS[config.executor]
    within = drafts is not None and draft is not None and draft.kind in entry.within
    prepare(config, executor, within, progress)

    def measured() -> StepCosts:
        costs = _costs(config, executor, progress)
        if drafts is None:
            return costs
        depth = config.draft_shape.depth
        return with_draft_model(costs, drafts, executor, config.page_size, depth)

    if not _priced(config):
        return None
    if config.executor != "cpu":
        return measured()
    how, limits = executor.describe(), executor.limits
    facts = [
        *(key_of(config, __version__, cpu_name()), entry.arithmetic(config), cores()),
        *(str(model.architecture), how["kernels"], how["threads"], how["dtype"]),
        *(how["weight_bytes"], limits.page_size, timed_nodes(executor), timed_tokens(limits)),
        draft and [str(draft.path), draft.path.stat().st_mtime_ns],
        drafts and drafts.traits.vocab,
    ]
    return cached_or_measured(facts, measured)


def _drafts(config: EngineConfig, target: Model) -> DraftParts:
    """Return the parts of the configured draft, if the executor runs its kind."""
    parts = open_drafts(config, target)
    if parts.model is None:
        return parts
    return with_token_map(config, target, parts)


def _resolved(
    config: EngineConfig, memory: MemoryPlan, executor: Executor, policy: str = "adaptive"
) -> EngineConfig:
    """Return the configuration with the values that the memory plan and the executor decided.

    policy  the policy that "auto" resolves to
    """
    limits, threads = memory.limits, executor.describe().get("threads")
    overlap = executor.capabilities.overlap if config.overlap is None else config.overlap
    return replace(
        config,
        context=limits.context,
        kv_tokens=limits.pages * limits.page_size,
        chunked_prefill_size=limits.max_nodes,
        threads=config.threads or (threads if isinstance(threads, int) else None),
        policy=policy if config.policy == "auto" else config.policy,
        overlap=overlap,
    )


def _chat(config: EngineConfig, own: str | None, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the configured chat template, else a model's `own`; None without one."""
    source, variables = template_source(config, own), template_variables(config)
    return ChatTemplate(source, tokenizer, variables) if source else None


def open_text(config: EngineConfig) -> tuple[Tokenizer, ChatTemplate | None]:
    """Return a model's tokenizer, ready to encode, and its chat template, None without one. Raises
    ModelError, DownloadError, ConfigError.
    """
    if config.toy:
        tokenizer, template = Tokenizer.byte_level(), BYTE_LEVEL_TEMPLATE
        return tokenizer, _chat(config, template, tokenizer)
    with collected_later():
        model = open_model(config.model, revision=config.revision)
        model.tokenizer.warm_up()
    chat = _chat(config, model.chat_template, model.tokenizer)
    release_files()
    trim_memory(cycles=True)
    return model.tokenizer, chat and chat.warmed_up()


def _priced(config: EngineConfig) -> bool:
    """Return whether the policy needs the costs of steps."""
    return config.policy == "adaptive" and config.speculates


def _costs(config: EngineConfig, executor: Executor, progress: Progress | None = None) -> StepCosts:
    """Measure the costs of steps."""
    if progress is not None:
        compiled = "compiling with torch.compile, " * config.enable_torch_compile
        progress(f"{compiled}timing steps", 0, 0)
    return replace(measure_costs(executor), padded=executor.capabilities.padded)
