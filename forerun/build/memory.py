"""Plans memory: everything else is counted first, and the rest is for pages of the key/value
cache.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from forerun.checkpoints.gguf.parts import parts_of
from forerun.errors import ConfigError, MemoryPlanError
from forerun.interface.executor import ExecutorLimits, window_pages_of
from forerun.networks.arch import Architecture
from forerun.networks.cache_layer import CacheLayer
from forerun.options.config import EngineConfig

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8": 2}
"""Bytes of a number of dense weights, and of keys and values."""


def item_bytes(config: EngineConfig) -> int:
    """Return the bytes of a number that torch and XLA compute with."""
    if config.dtype == "file":
        return 4 if config.device == "cpu" else 2
    return ITEM_BYTES[config.dtype]


TOKENS_PER_SEQUENCE = 256
"""Tokens of the cache planned by default for each of `max_sequences`; sequences share them on
demand.
"""

KEPT_WINDOWS, MOST_WINDOWS, FEWEST_WINDOWS = 8, 16, 4
"""Number of whole windows in the page pool of sliding-window layers, if they have their own: with
few sequences; at most, unless these have TOKENS_PER_SEQUENCE each; and at least, if memory is
short. A window is for a running sequence or a place where a text may continue. With 1, 2, 4, 8 and
16 agents in turns, prompts of 6,571 tokens of which 5,698 are found in the cache, the share of
these that is computed again is with 4 windows 11, 5, 25, 25 and 24 %, with 8 .3, .7, .2, 25 and 23
%, with 16 .1, .1, .1, .1 and 23 %: two windows per agent suffice (`python -m bench.windows`,
counted; with windows of 128 and 1,024 tokens the same within 6 points, except for four of 128: 1
%).
"""

HOST_SHARE = 0.6
"""Share of the free memory to use on a host, where other programs run too and the scratch of
prompts is not planned.
"""

DEVICE_SHARE = 0.88
"""Share of the free memory to use on a device (a GPU or TPU); not measured."""


CHECKPOINTS = 2
"""Checkpoints of a recurrent state for each of `max_sequences`: a sequence stores two from which
others may continue (executors/state_slots.py).
"""

CHUNK = 512
"""Default number of prompt and draft tokens in one step, on the CPU."""

SCORED = 512
"""Nodes in one step whose logits choose a token, unless max-sequences is larger: on an H100 or H200
more are bound by products and no longer free (64 x 8 in bench/results/gpu-roofline.md).
"""


@dataclass(frozen=True, slots=True)
class Needs:
    """The memory needs of a model, in bytes unless noted.

    context    longest sequence the model was made for, tokens
    vocab      V
    weights    all weights, in the executor's own format
    per_token  keys and values of one token, all layers
    windowed   the part of it in sliding-window layers, if the executor frees the pages behind the
               window
    window     tokens that it keeps of a sequence there
    per_node   scratch of one node in a step: activations
    per_scored scratch of one node that chooses a token: its row of logits
    fixed      scratch that does not depend on nodes, such as features for a draft model
    state      recurrent states of one text, all layers that have one
    captured   rounds are captured: their intermediate results have memory of their own, which all
               rounds share and no other step uses
    """

    context: int
    vocab: int
    weights: int
    per_token: int
    per_node: int
    per_scored: int = 0
    fixed: int = 0
    captured: bool = False
    state: int = 0
    windowed: int = 0
    window: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The executor's limits, and the bytes for each purpose.

    graphs  intermediate results of captured rounds; the driver's own memory for the programs is not
            counted
    states  recurrent states of all sequences and checkpoints
    windows the part of `cache` in sliding-window layers, if they have pages of their own
    """

    limits: ExecutorLimits
    weights: int
    cache: int
    scratch: int
    graphs: int = 0
    states: int = 0
    windows: int = 0

    def describe(self) -> dict[str, int]:
        """Return the bytes by purpose, for /server_info and `doctor`."""
        return {
            "weights": self.weights,
            "cache": self.cache,
            "scratch": self.scratch,
            "graphs": self.graphs,
            "states": self.states,
            "windows": self.windows,
        }

    def sentence(self) -> str:
        """Return the plan as one line of text for users, sizes in decimal units."""
        limits = self.limits
        return (
            f"room for {limits.pages * limits.page_size:,} tokens in the key/value cache "
            f"({human(self.cache)}, filled as it is used{self.windows_clause()}), sequences up to "
            f"{limits.context:,} tokens, {limits.slots} at once; weights {human(self.weights)}"
        )

    def windows_clause(self) -> str:
        """Return the cache of sliding-window layers, as the end of a sentence; "" if they keep all
        pages.
        """
        if not self.windows:
            return ""
        last = f"{self.limits.window:,} tokens of each sequence"
        return f"; {human(self.windows)} for the last {last}"


def plan_memory(
    config: EngineConfig, needs: Needs, available: int, *, fill: bool = False
) -> MemoryPlan:
    """Divide `available` bytes of memory into weights, scratch and pages; at most a share of them
    is used (mem_fraction_static, DEVICE_SHARE or HOST_SHARE).

    fill  give the cache all bytes that remain, on a device of its own; else only as many as
          `context` and max_sequences need

    Raises MemoryPlanError, with the parts and the option to lower, if they do not fit; ConfigError
    if `context` and `kv_tokens` contradict the model or each other.
    """
    share = config.mem_fraction_static or (DEVICE_SHARE if fill else HOST_SHARE)
    page, budget = config.page_size, int(available * share)
    context = min(config.context or needs.context, needs.context)
    if config.context and config.context > needs.context:
        raise ConfigError(
            f"context is {config.context}, but this model was made for {needs.context} tokens: "
            "give at most that many, or leave it out."
        )
    if config.kv_tokens and config.context and config.kv_tokens < config.context:
        raise ConfigError(
            f"kv-tokens is {config.kv_tokens}: too small for one sequence of "
            f"context {config.context}. Raise kv-tokens or lower context."
        )
    nodes = config.chunked_prefill_size or CHUNK
    scored = min(nodes, max(SCORED, config.max_sequences))
    scratch = nodes * needs.per_node + scored * needs.per_scored + needs.fixed
    graphs = scored * (needs.per_node + needs.per_scored) if needs.captured else 0
    checkpoints = CHECKPOINTS * config.max_sequences if needs.state else 0
    states = needs.state * (config.max_sequences + checkpoints)
    left = max(0, budget - needs.weights - scratch - graphs - states)
    kv_tokens = config.kv_tokens or max(context, config.max_sequences * TOKENS_PER_SEQUENCE)
    minimum = config.kv_tokens or config.context or min(context, 4 * page, 1024)
    room, windows = left // max(1, needs.per_token), 0
    if needs.windowed:
        # On a device of its own many run at once: as many beyond their windows as if every page
        # were kept, MOST_WINDOWS at most.
        running = min(room // needs.window, MOST_WINDOWS) if fill else 0
        plans = (
            _with_windows(config, needs, left, nodes, kv_tokens, fewest)
            for fewest in (max(running, FEWEST_WINDOWS), FEWEST_WINDOWS)
        )
        room, windows = next(filter(None, plans), (room, 0))
    if room < minimum:
        raise MemoryPlanError(_refusal(needs, (scratch + graphs, states), minimum, budget, share))
    tokens = room if fill and not config.kv_tokens else min(kv_tokens, room)
    pages = ceil(tokens / page) if tokens < room else max(1, tokens // page)
    limits = ExecutorLimits(
        page_size=page,
        pages=pages,
        slots=config.max_sequences,
        max_nodes=nodes,
        context=min(context, pages * page),
        vocab=needs.vocab,
        max_scored=scored,
        checkpoints=checkpoints,
        window=needs.window if windows else 0,
        window_pages=windows,
    )
    near = windows * page * needs.windowed
    cache = pages * page * (needs.per_token - bool(windows) * needs.windowed) + near
    return MemoryPlan(limits, needs.weights, cache, scratch, graphs, states, near)


def _with_windows(
    config: EngineConfig, needs: Needs, left: int, nodes: int, kv_tokens: int, fewest: int
) -> tuple[int, int] | None:
    """Return (tokens that `left` bytes have room for, pages of sliding-window layers) if these
    layers free the pages behind the window; None if that gives fewer tokens than keeping all pages,
    of `kv_tokens` or as many as fit.

    fewest  whole windows, if memory is short
    """
    page = config.page_size
    token = needs.per_token - needs.windowed  # Bytes, in layers that see everything.
    spare = (left - kv_tokens * token) // (needs.windowed * page)
    windows = _window_pages(config, needs, ceil(nodes / page), spare, fewest)
    rest = left - windows * page * needs.windowed
    # Where every layer has a window, tokens behind it cost nothing.
    room = rest // token if token else (kv_tokens + page) * (rest >= 0)
    unwindowed = min(kv_tokens, left // needs.per_token)  # Tokens if every page is kept.
    return (room, windows) if windows * page < kv_tokens and room > unwindowed else None


def _window_pages(config: EngineConfig, needs: Needs, step: int, spare: int, fewest: int) -> int:
    """Return the pages of sliding-window layers: those that a step writes (`step`), and whole
    windows, as many as the texts of max_sequences need, or as fit into `spare` pages, at least
    `fewest`.
    """
    sequences, page = config.max_sequences, config.page_size
    per_sequence = window_pages_of(needs.context, needs.window, page)
    short = ceil(sequences * TOKENS_PER_SEQUENCE / page)  # If most texts are shorter than windows.
    enough = min(
        max(sequences, KEPT_WINDOWS) * per_sequence, max(short, MOST_WINDOWS * per_sequence)
    )
    return step + max(min(sequences, fewest) * per_sequence, min(enough, spare - step))


def _refusal(needs: Needs, scratch: tuple[int, int], tokens: int, budget: int, share: float) -> str:
    """Return the message that a model does not fit. scratch: bytes of (steps, recurrent states)."""
    step, states = scratch
    extra = f"recurrent states {human(states)} + " if states else ""
    return (
        f"The model does not fit: weights {human(needs.weights)} + scratch {human(step)} + {extra}"
        f"key/value cache for {tokens:,} tokens {human(tokens * needs.per_token)} exceed the "
        f"{human(budget)} that may be used ({share:.0%} of the memory that is free now, "
        "mem-fraction-static). Lower kv-tokens, context, max-sequences or chunked-prefill-size, "
        "raise mem-fraction-static, or choose a smaller model."
    )


def human(count: int) -> str:
    """Return bytes as text in decimal units: 98362432 -> '98.4 MB'."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def needs_of(arch: Architecture, weights: int, per_token: int) -> Needs:
    """Return a model's needs, given bytes of all its weights and of one token's keys and values.
    Scratch is that of a decoder in float32, including the rows of a node's experts and latent
    attention's intermediate results.
    """
    return Needs(
        context=arch.context,
        vocab=arch.vocab,
        weights=weights,
        per_token=per_token,
        per_node=4
        * (
            (4 + arch.expert_rows) * arch.hidden
            + 3 * arch.ffn
            + arch.latent_numbers
            + 2 * arch.layers * arch.token_vector
        ),
        per_scored=4 * (arch.vocab // 4),
        state=arch.state_bytes,
    )


def window_needs(arch: Architecture, needs: Needs, windowed: int) -> Needs:
    """Return the needs of a model whose sliding-window layers free the pages behind the window, if
    they can. windowed: bytes of one token's keys and values in them.
    """
    if not arch.widest_window:
        return needs
    return replace(needs, windowed=windowed, window=arch.widest_window + 1)


def dense_needs(config: EngineConfig, arch: Architecture, checkpoint: object) -> Needs:
    """Return the needs of a model whose weights are converted to config.dtype, in bytes; does not
    read the checkpoint. Sliding-window layers free the pages behind the window.
    """
    width = item_bytes(config)
    # In float32 on the CPU, torch packs a tied head once more.
    twice = arch.tied_head and config.device == "cpu" and width == 4
    embedding = arch.vocab * arch.hidden
    weights = width * (arch.parameters + (embedding if twice else 0))
    if config.dtype == "float8":  # All but embeddings and head is one byte a number.
        weights -= arch.parameters - embedding * (1 if arch.tied_head else 2)
        weights += arch.token_numbers
    needs = needs_of(arch, weights, cached_bytes(config, arch.caches))
    return window_needs(arch, needs, cached_bytes(config, arch.windowed_caches))


def cached_bytes(config: EngineConfig, caches: Iterable[CacheLayer]) -> int:
    """Return the bytes of one token's keys and values in layers of torch or XLA; in float8 each
    head of a token also has a scale of 4 bytes.
    """
    item, scale = (1, 4) if config.kv_dtype == "float8" else (item_bytes(config), 0)
    heads = ((c.planes * c.kv_heads, c.head_size * item + scale) for c in caches)
    return sum(count * numbers for count, numbers in heads)


def few_bits_titles(checkpoint: object, config: EngineConfig) -> list[str]:
    """Return how a checkpoint stores quantised matrices: the methods in a folder's configuration;
    GGUF if torch keeps the file's own format; else none.
    """
    as_stored = config.executor == "torch" and config.dtype == "file"
    titles = [method.title for method in getattr(checkpoint, "methods", ())]
    return titles or ["GGUF"] * as_stored


def few_bits_sentence(path: Path, title: str, weights: int, here: str | None = None) -> str:
    """Return the sentence that a quantised checkpoint takes `weights` bytes in memory.

    title  how it stores its matrices
    here   how the executor stores them, as text for users; None: they are dequantised

    Raises OSError if its files no longer exist.
    """
    how = "they are widened when they are read" if here is None else f"here {here}"
    return (
        f"{path.name} stores its matrices in few bits ({title}); {how}: {human(weights)} of "
        f"weights, {human(bytes_on_disk(path))} on disk."
    )


def bytes_on_disk(path: Path) -> int:
    """Return the bytes of a file with its further parts, or of the files directly in a folder.
    Raises OSError if the path does not exist.
    """
    if path.is_file():
        return sum(part.stat().st_size for part in parts_of(path))
    return sum(item.stat().st_size for item in path.iterdir() if item.is_file())
