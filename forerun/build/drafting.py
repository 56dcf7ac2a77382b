"""Chooses and opens the drafter of a configuration, and adds a draft to the memory plan."""

import logging
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from forerun.build.beside import meant, runs_layers, with_beside
from forerun.build.draft_file import (
    holds_draft_file,
    holds_model,
    names_gguf_model,
    open_draft_file,
    open_standalone,
)
from forerun.build.executor_entry import AnyDraft
from forerun.build.memory import Needs
from forerun.checkpoints.checkpoint import Checkpoint
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.gguf.file import GgufCheckpoint
from forerun.control.adaptive import AdaptivePolicy
from forerun.control.policy import FixedPolicy, Lookahead, Policy, off
from forerun.control.step_costs import StepCosts
from forerun.draft_shape import DraftShape
from forerun.drafters.combined import CombinedDrafter
from forerun.drafters.model_drafter import ModelDrafter
from forerun.drafts.assistant import Assistant
from forerun.drafts.block_folder import BlockFile
from forerun.drafts.gguf_prediction import open_in_gguf
from forerun.drafts.ngram_table import FILE as TABLE
from forerun.drafts.ngram_table import NgramTable, read_ngram_table
from forerun.drafts.prediction_layers import PredictionLayers, open_prediction_layers
from forerun.drafts.standalone_draft import StandaloneDraft
from forerun.errors import ConfigError, MemoryPlanError, ModelError
from forerun.hub import huggingface
from forerun.hub.catalog import Model, shipped_draft
from forerun.hub.known_drafts import known_draft, known_drafts
from forerun.hub.reference import hub_reference
from forerun.interface.draft_model import DraftModel
from forerun.interface.drafter import Drafter
from forerun.interface.executor import ExecutorLimits
from forerun.interface.features import RING_TOKENS
from forerun.networks.config_json import announced_layers
from forerun.options.algorithms import DEFAULT_STEPS, MOST_STEPS, NGRAM_STEPS, STANDALONE_SHAPE
from forerun.options.config import EngineConfig

log = logging.getLogger("forerun.build")

AUTO, NO_DRAFT = "AUTO", "none"
"""The algorithm that is decided later, and the draft path that excludes even the draft that comes
with the model.
"""

Result = TypeVar("Result")


def with_shipped(
    config: EngineConfig, layered: bool = False, target: Checkpoint | None = None
) -> EngineConfig:
    """Return the configuration with the draft that comes with its model, if it names none and the
    algorithm needs one. Raises ConfigError if there is none.

    layered  the model's checkpoint has prediction layers: EAGLE without a draft, or with the model
             itself as its draft, selects them
    target   as in with_beside

    AUTO uses the draft's n-gram table, not its head: a table costs no arithmetic, and on the
    machines measured a head's draft tokens cost more than their better acceptance saved
    (docs/results/not-taken.md). It uses prediction layers, which were trained with the whole model,
    on every executor that runs them, and an assistant (build/beside.py). Another GGUF file is a
    whole model.
    """
    config = with_beside(config, layered, target)
    if config.speculative_algorithm == AUTO:
        config = replace(config, speculative_algorithm=_automatic(config, layered, target))
    named = config.speculative_draft_model_path
    text = config.speculative_ngram_text and named != NO_DRAFT
    layers = config.algorithm.kind == "layers" or (layered and config.algorithm.name == "EAGLE")
    if layers and named in (None, NO_DRAFT, config.model):
        own = replace(config, speculative_draft_model_path=None, speculative_ngram_text=text)
        return replace(own, speculative_algorithm=meant(config, "NEXTN"))
    if not config.speculates or named not in (None, NO_DRAFT):
        if named and Path(named).is_dir():
            return replace(config, speculative_draft_model_path=str(_trained(Path(named))))
        return config
    head = config.algorithm.kind == "head"
    shipped = shipped_draft(config.model) if head and named != NO_DRAFT else None
    auto = config.speculative_algorithm == AUTO
    if shipped is not None:
        algorithm = "NGRAM" if auto else config.speculative_algorithm
        return replace(
            config, speculative_draft_model_path=str(shipped), speculative_algorithm=algorithm
        )
    if config.algorithm.model and not auto:
        folder = head or config.algorithm.kind == "assistant"
        raise ConfigError(
            f"speculative-algorithm is {config.speculative_algorithm}, but no draft is named and "
            f"none comes with {config.model}; add --speculative-draft-model-path "
            f"{'FOLDER' if folder else 'MODEL'}{_besides(config, layered)}."
        )
    return replace(config, speculative_draft_model_path=None, speculative_ngram_text=text)


def _besides(config: EngineConfig, layered: bool) -> str:
    """Return, as the rest of a sentence, a draft that a model could use without naming one."""
    if layered:
        return ", or use NEXTN: the model has prediction layers of its own"
    draft = known_draft(config.model, config.algorithm)
    return f", such as {draft}" if draft else ""


def _automatic(config: EngineConfig, layered: bool, target: Checkpoint | None) -> str:
    """Return the algorithm that AUTO resolves to, by the names of target and draft; AUTO if a
    draft's folder must be opened first.
    """
    named = config.speculative_draft_model_path
    if named is not None and names_gguf_model(named):
        return meant(config, "STANDALONE")
    own = layered and named is None and _own_run(config, target)
    return meant(config, "NEXTN") if own else AUTO


def _own_run(config: EngineConfig, target: Checkpoint | None) -> bool:
    """Return whether the executor drafts with the target's own prediction layers; they are opened
    only if their number decides it. `open_drafts` reports their errors.
    """
    if target is None or runs_layers(config, MOST_STEPS):
        return runs_layers(config, 1)
    with suppress(ModelError):
        return runs_layers(config, _layers_in(target).count)
    return runs_layers(config, 1)


def drafting_sentence(
    requested: EngineConfig,
    resolved: EngineConfig,
    table: bool,
    fault: str | None,
    own: bool = True,
) -> str:
    """Return one line for the start: the drafter, with the reason.

    requested     the configuration before it was resolved
    resolved  the same afterwards
    table     there is an n-gram table
    fault     why drafting is off although it was requested; None = it is not
    own       the table was counted in the model's own answers, so no further answers are counted
    """
    method, named = resolved.algorithm, resolved.speculative_draft_model_path
    if not resolved.speculates:
        return f"drafting: OFF ({fault or 'as requested'})"
    if requested.speculative_algorithm != AUTO:
        source = "the draft that comes with the model" if named else "the target's own layers"
        source = f"{named} beside the model" if method.kind == "assistant" else source
        why = f"as requested, by {requested.speculative_draft_model_path or source}" * method.model
        why = (why or "as requested") + _unlike_sglang(requested) * (method.kind == "head")
    elif method.kind == "layers" and named is not None:
        why = f"AUTO: {named} holds prediction layers"
    elif method.kind == "layers":
        why = "AUTO: the target has prediction layers of its own"
    elif method.kind == "assistant":
        lies = " and lies beside it" * (requested.speculative_draft_model_path is None)
        why = f"AUTO: {named} is the model's assistant{lies}"
    elif method.kind == "whole" and requested.speculative_draft_model_path is None:
        why = f"AUTO: no draft is given, and {named}, a much smaller model, is on this machine"
        why += "; --speculative-algorithm NGRAM leaves it out" + _published(requested)
    elif method.model:
        why = f"AUTO: {named} is {'a whole model' if method.kind == 'whole' else 'such a draft'}"
    elif requested.speculative_draft_model_path is None:
        why = "AUTO: no draft is given" + (", and the model's own has an n-gram table" * table)
        why += "; --speculative-algorithm OFF is plain decoding" + _published(requested)
    else:
        why = f"AUTO: {named} holds no draft model"
    if method.model and resolved.speculative_token_map is not None:
        why += f"; of the tokens in {resolved.speculative_token_map}"
    meaning = method.meaning
    if method.name == "NGRAM":
        counts = resolved.speculative_ngram_capacity > 0 and not (table and own)
        meaning = "lookup in the text so far" + ", the draft's n-gram table" * table
        meaning += ", finished answers" * counts
    return f"drafting: {method.name}, {meaning} ({why}{_seldom(resolved)})"


def _published(config: EngineConfig) -> str:
    """Return a note on the drafts that the hub has for the model; "" if none is known."""
    rows = known_drafts(config.model)
    named = ", ".join(f"{row.draft} ({row.method.name})" for row in rows)
    return f"; the hub has {named}: --speculative-draft-model-path takes one" if rows else ""


def _seldom(config: EngineConfig) -> str:
    """Return a note that one draft token of a head rarely pays on a CPU; "" if it does not
    apply.
    """
    if config.algorithm.name != "NAIVE" or config.device != "cpu" or config.policy == "fixed":
        return ""
    return (
        "; on a CPU a head's token mostly takes longer than it saves, and is then not drafted: "
        "--policy fixed drafts always"
    )


def _unlike_sglang(requested: EngineConfig) -> str:
    """Return a note on SGLang's trees, for a head without options of its tree's size; else ""."""
    given = (
        requested.speculative_num_steps,
        requested.speculative_eagle_topk,
        requested.speculative_num_draft_tokens,
    )
    if requested.algorithm.name not in ("EAGLE", "EAGLE3") or given != (None, None, None):
        return ""
    return (
        f"; chains of {DEFAULT_STEPS} draft tokens: SGLang's trees are --speculative-num-steps 5 "
        "--speculative-eagle-topk 4 --speculative-num-draft-tokens 8"
    )


def lossy_sentence(config: EngineConfig) -> str | None:
    """Return one line on the effect of the configured accept thresholds; None if they are
    lossless.
    """
    if not config.lossy:
        return None
    single, acc = (
        config.speculative_accept_threshold_single,
        config.speculative_accept_threshold_acc,
    )
    return (
        f"lossy: speculative-accept-threshold-single is {single:g} and -acc is {acc:g}, so sampled "
        "answers may hold tokens that the model did not choose; greedy ones stay exact"
    )


_MEANS = {
    PredictionLayers.kind: "NEXTN",
    Assistant.kind: "FROZEN_KV_MTP",
    StandaloneDraft.kind: "STANDALONE",
}
"""The algorithm for each kind of draft that has only one."""


def resolved_drafting(
    config: EngineConfig,
    head: bool,
    fault: str | None,
    block: int = 0,
    draft: AnyDraft | None = None,
) -> EngineConfig:
    """Return the configuration with AUTO decided, and the length and size of its trees filled in.

    head   whether there is a draft model
    draft  the opened draft model
    block  draft tokens of a block, a block drafter's default
    fault  why a named draft cannot be used, which turns drafting off

    Raises ConfigError for top-k with a method that has none.
    """
    chosen = config.speculative_algorithm
    if fault is not None:
        chosen = "OFF"
    elif head and draft is not None and draft.kind in _MEANS:
        chosen = meant(config, _MEANS[draft.kind])
        if isinstance(draft, StandaloneDraft) and config.speculative_draft_model_path is None:
            config = replace(config, speculative_draft_model_path=draft.name)
    elif chosen == AUTO:
        named = meant(config, "DFLASH" if block else "EAGLE")
        chosen = named if head or block else "NGRAM"
    config = replace(config, speculative_algorithm=chosen)
    given = (config.speculative_num_steps, config.speculative_num_draft_tokens)
    if block and given == (None, None):
        config = replace(config, speculative_num_steps=block)
    bought = config.executor == "cpu" and config.policy == "adaptive"
    if bought and given == (None, None) and not block and config.speculative_eagle_topk is None:
        nodes, width, depth = DraftShape()
        if config.algorithm.kind == "whole":
            nodes, width, depth = STANDALONE_SHAPE
        if config.algorithm.lookup:  # A draft model stops where it does not pay.
            nodes = depth = NGRAM_STEPS
        if nodes:
            config = replace(
                config,
                speculative_num_steps=depth,
                speculative_eagle_topk=width or None,
                speculative_num_draft_tokens=nodes + 1,
            )
    shape = config.draft_shape
    return replace(
        config,
        speculative_num_steps=shape.depth,
        speculative_num_draft_tokens=shape.nodes + 1,
    )


@dataclass(frozen=True, slots=True)
class DraftParts:
    """The usable parts of a draft's folder. Empty: only lookup in the text drafts.

    token_map  name of the token map that limits the model, None without one
    """

    model: AnyDraft | None = None
    table: NgramTable | None = None
    token_map: str | None = None


def open_drafts(config: EngineConfig, target: Model) -> DraftParts:
    """Open the parts of the named draft that the configuration uses; fetches one named by hub id.
    Returns no parts if no draft is named or the algorithm drafts nothing. Warns (warnings.warn) of
    a draft's peculiarities. Raises ModelError, or its DownloadError, if the draft cannot be used,
    ConfigError if it is of another kind than the algorithm.
    """
    named, method = config.speculative_draft_model_path, config.algorithm
    if config.speculates and method.kind == "layers" and named is None:
        return DraftParts(_prediction_layers(config, target.checkpoint))
    if named is None or not config.speculates:
        return DraftParts()
    if method.kind == "whole" or (method.name == AUTO and holds_model(named)):
        return DraftParts(_standalone(config, named, target))
    arch = target.architecture
    folder, head, table = _folder(named, config.speculative_draft_model_revision), None, None
    tabled = (folder / TABLE).is_file()
    if tabled and method.lookup:
        table = read_ngram_table(folder / TABLE, arch.vocab)
    if not method.model and table is None:
        raise ModelError(f"{folder} holds no {TABLE}, which {method.name} needs")
    alone = tabled and not (folder / "config.json").exists()
    if alone and method.model and method.name != AUTO:
        raise ModelError(
            f"{folder} holds an n-gram table and no head; use --speculative-algorithm NGRAM"
        )
    if method.model and not alone:
        head = open_draft_file(config, folder, target.checkpoint)
        if isinstance(head, PredictionLayers):
            head = _deep_enough(config, head)
        for warning in head.warnings:
            warnings.warn(f"draft {named}: {warning}", stacklevel=2)
    return DraftParts(head, table)


def _standalone(config: EngineConfig, named: str, target: Model) -> StandaloneDraft:
    revision, vocab = config.speculative_draft_model_revision, target.architecture.vocab
    draft = open_standalone(named, revision, target.tokenizer, vocab)
    context, needed = draft.checkpoint.architecture.context, config.context
    needed = needed or target.architecture.context
    if context < needed:
        warnings.warn(
            f"draft {named} was made for {context} tokens, but the context is {needed}: fewer "
            f"draft tokens may be accepted behind token {context}",
            stacklevel=2,
        )
    return draft


def own_layers(config: EngineConfig, target: Checkpoint) -> PredictionLayers | None:
    """Return the target's own prediction layers, as many as are used, if the configuration drafts
    with them; else None. Raises ModelError for layers that cannot be read, ConfigError if the
    algorithm needs a draft and none is named.
    """
    layered = bool(getattr(target, "prediction_files", None))
    if not layered or not config.speculates:
        return None
    shipped = with_shipped(config, layered, target)
    unnamed = shipped.speculative_draft_model_path is None
    own = shipped.algorithm.kind == "layers" and unnamed
    return _prediction_layers(shipped, target) if own else None


def _prediction_layers(config: EngineConfig, target: Checkpoint) -> PredictionLayers:
    """Return the target's prediction layers that the configured depth uses."""
    return _deep_enough(config, _layers_in(target))


def _layers_in(target: Checkpoint) -> PredictionLayers:
    match target:
        case GgufCheckpoint():
            return open_in_gguf(target)
        case FolderCheckpoint():
            declared = announced_layers(target.config)
            return open_prediction_layers(target, target.prediction_files, declared)
    return open_prediction_layers(target, {})


def _deep_enough(config: EngineConfig, layers: PredictionLayers) -> PredictionLayers:
    return layers.first(config.speculative_num_steps or layers.count)


def _folder(named: str, revision: str | None) -> Path:
    """Return the draft's folder, or its file; fetches a hub id. Raises ModelError if it is neither,
    or the folder holds no draft.
    """
    folder = Path(named)
    if holds_draft_file(folder):
        return folder
    if named and folder.is_dir():
        return _trained(folder)
    hub = hub_reference(named)
    if hub is not None:
        return huggingface.draft_fetched(hub.repository, revision)
    raise ModelError(
        f"--speculative-draft-model-path {named!r} is neither a folder nor a hub id; give the "
        "folder that holds the draft"
    )


def _trained(folder: Path) -> Path:
    """Return the subfolder `draft` of a work folder of `forerun train`; any other folder
    unchanged.
    """
    inner = folder / "draft"
    bare = not (folder / "config.json").exists() and not (folder / TABLE).exists()
    return inner if bare and inner.is_dir() else folder


def excused(config: EngineConfig, action: Callable[[], Result]) -> tuple[Result | None, str | None]:
    """Call `action`. Returns (its result, None); or (None, why speculation is off), with a warning,
    if it raises ModelError or MemoryPlanError and draft_on_error is "disable".

    Raises what `action` raises otherwise.
    """
    try:
        return action(), None
    except (ModelError, MemoryPlanError) as error:
        if config.draft_on_error != "disable":
            raise
        fault = off(str(error))
    warnings.warn(fault, stacklevel=2)
    return None, fault


def with_draft(needs: Needs, draft: AnyDraft, item: int | None, slots: int) -> Needs:
    """Return a model's memory needs with those of its draft model: weights, keys and values of all
    layers, scratch of a node, and the ring of features of all slots; in captured rounds also the
    tables of a block drafter whose tokens depend on those above.

    item  bytes of a number; None: at most 8 bits of weights, 16 of keys and values, 32 of features
    """
    count = draft.parameters
    weights = count * 34 // 32 if item is None else count * item
    if needs.captured and isinstance(draft, BlockFile):
        weights += (item or 4) * draft.head.tables
    return replace(
        needs,
        weights=needs.weights + weights,
        per_token=needs.per_token + (item or 2) * sum(layer.numbers for layer in draft.cache),
        per_node=needs.per_node + 4 * draft.node_numbers,
        per_scored=needs.per_scored + 4 * (draft.vocab // 4),
        fixed=needs.fixed + (item or 4) * (slots + 1) * RING_TOKENS * draft.feature_numbers,
    )


def model_drafter(
    config: EngineConfig,
    limits: ExecutorLimits,
    model: DraftModel,
    lookup: Drafter,
    mask: Callable[[int], bytes | None],
) -> Drafter:
    """Return a drafter on a draft model, merged with `lookup` if the algorithm combines both.

    mask  mask of the tokens that a slot's grammar allows next (see ModelDrafter)

    Logs a warning if its drafts do not fit into captured rounds.
    """
    shape = config.draft_shape
    shape = shape._replace(depth=min(shape.depth, shape.nodes))
    drafter = ModelDrafter(model, limits, shape, mask)
    captured = config.executor == "torch" and config.device != "cpu"
    if captured and not config.disable_cuda_graph and not drafter.traits.drafts_on_device:
        log.warning(
            "%s drafts outside of captured rounds, which is slower: %d draft tokens are more than "
            "the square of top-k %d; lower speculative-num-draft-tokens or raise "
            "speculative-eagle-topk",
            *(model.traits.name, shape.nodes, shape.width),
        )
    return CombinedDrafter(lookup, drafter) if config.algorithm.lookup else drafter


def policy_for(
    config: EngineConfig, costs: StepCosts | None, drafter: Drafter, lookahead: Lookahead
) -> Policy:
    """Return the policy that decides how many draft tokens a step has: adaptive if configured and
    `costs` were measured, else fixed; fixed at zero if the drafter drafts nothing.

    costs      of steps on this machine; None = not measured
    lookahead  what grammars predict
    """
    if not config.speculates:
        return FixedPolicy(0, 0)
    shape = config.draft_shape
    depth = min(shape.depth, shape.nodes, drafter.traits.max_depth)
    if costs is None or config.policy != "adaptive" or depth == 0:
        return FixedPolicy(shape.nodes if depth else 0, depth, lookahead)
    return AdaptivePolicy(costs, shape.nodes, depth, drafter.traits, lookahead)
