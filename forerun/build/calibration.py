"""Measures the time of steps on this machine, in a fraction of a second at start-up, after
everything that steps run is compiled.
"""

from collections.abc import Callable
from dataclasses import replace
from math import log
from random import Random
from statistics import median
from time import perf_counter

import numpy as np

from forerun.control.constants import MIN_REPEATS, OUTLIER
from forerun.control.step_costs import StepCosts
from forerun.draft_shape import DraftShape
from forerun.errors import ConfigError
from forerun.interface.draft_model import (
    CANDIDATES,
    DraftBlock,
    DraftExtension,
    DraftLevel,
    DraftModel,
)
from forerun.interface.executor import Executor, ExecutorLimits
from forerun.interface.next_draft import OnDeviceDraftSpec
from forerun.interface.plan import Outcome, Plan
from forerun.interface.slot_init import SlotInit, TokenText
from forerun.options.config import EngineConfig
from forerun.speculative.sampling import Sampling
from forerun.speculative.tree import Draft, batch
from forerun.types import Ints

NODES = (1, 2, 8, 4, 16, 64, 32, 3, 5, 6)
"""Node counts that are timed, the most informative first; none is begun after SECONDS. Each comes
after one that is not much larger, because a long step displaces the weights from the caches (8
nodes of the default model take 6.0 ms after 64, 5.3 after 16, 5.2 after 8).
"""
PER_ROW = 8
"""Most nodes of one row; more nodes are spread over more rows, as in service."""
CACHED = 256
"""Most cached tokens with which reading the cache is timed: as many as can be computed in SECONDS,
at least a quarter of this. (A 1B model on two cores takes a second for 256; the result with 128 is
the same within a fifth.)
"""
UNWRITTEN = 1024
"""The same if pages need not be computed first (Capabilities.unwritten): the more cached tokens,
the larger their share of a step's time. (With 1,000 unwritten and 1,000 computed tokens, in
milliseconds: 1.77, 1.94 and 1.70 of a 1B model, .62 to .71 and .84 of the default; with 256
computed ones 1.55, 1.58 and .58, .71.)
"""
SECONDS = 0.5
"""Seconds for all node counts together; three times that on a slow machine."""
REPEATS = 8
"""Most repeats per count."""
ALIKE = 1.1
"""If MIN_REPEATS steps take more than a count's share of SECONDS, the step is timed once if its
time is as expected from the counts around it, and twice if the longer of two times is at most this
many times the shorter. (Steps of 16, 32 and 64 nodes of a 1B model on two cores at real-time
priority: 1.00 to 1.05 in 14 of 16 pairs, 1.4 and 1.8 in the others. Simulated, such a model with
other processes running: .51 s instead of 1.20, with errors of costs no larger.)
"""


def measure_costs(executor: Executor) -> StepCosts:
    """Time steps of several sizes, and return their costs. All slots must be closed, and are closed
    again afterwards. Raises ConfigError as `timed_nodes`.

    The result is the median of a few repeats. They are interleaved, so that a slow moment does not
    disturb one size alone. (The minimum would favour large steps on a machine with other load:
    there four nodes took 1.25 times one node at best, but 1.4 times mostly.) Each step has other
    tokens, so that it uses other experts, as text does; such draft tokens are wrong, so rarely more
    than the root's token is accepted.
    """
    possible = timed_nodes(executor)
    times = _time_interleaved(executor, possible)
    largest = max(times)
    attend_ms = _attention_ms(executor, min(times[largest]) / largest)
    executor.release_scratch()
    return StepCosts(tuple(sorted(times)), estimated_ms(times), attend_ms=attend_ms)


def timed_nodes(executor: Executor) -> list[int]:
    """Return the counts of NODES that an executor has room for, at least two. Raises ConfigError if
    there are fewer.
    """
    limits = executor.limits
    limit = min(limits.scored_nodes, executor.capabilities.timed)
    possible = [nodes for nodes in NODES if nodes <= limit and _fits(limits, nodes)]
    if len(possible) < 2:
        raise ConfigError(
            f"a step of at most {limits.scored_nodes} nodes and a context of {limits.context} "
            "tokens are too small to measure the time of a draft token; raise "
            "chunked-prefill-size or context, or use --policy fixed."
        )
    return possible


def timed_tokens(limits: ExecutorLimits) -> int:
    """Return the most cached tokens with which reading the cache is timed."""
    return min(UNWRITTEN, min(limits.context, limits.pages * limits.page_size) - PER_ROW - 1)


def estimated_ms(times: dict[int, list[float]]) -> tuple[float, ...]:
    """Return the milliseconds of a step by ascending number of nodes.

    times  seconds of timed steps, by number of nodes
    """
    counts = sorted(times)
    ms = [1000.0 * median(times[nodes]) for nodes in counts]
    return tuple(rising(smoothed(counts, ms), [len(times[nodes]) for nodes in counts]))


def rising(ms: list[float], weights: list[int]) -> list[float]:
    """Return the ascending times nearest to `ms`, with these weights (isotonic regression, by
    pooling adjacent violators): a larger step never takes less time, so two times that contradict
    this are both wrong and share the error.
    """
    pools: list[tuple[float, int, int]] = []
    for time, weight in zip(ms, weights, strict=True):
        pools.append((time, weight, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (one, heavy, few), (two, light, more) = pools[-2:]
            mean = (one * heavy + two * light) / (heavy + light)
            pools[-2:] = [(mean, heavy + light, few + more)]
    return [time for time, _, count in pools for _ in range(count)]


def smoothed(counts: list[int], ms: list[float]) -> list[float]:
    """Return the times with disturbed ones replaced: a time above OUTLIER times the one expected
    from the counts around it (between them time is a power of nodes) becomes that.

    One slow step of 32 nodes made a draft token with 64 rows look cheap. Convexity is not assumed:
    kernels work in fours, and if nodes share experts of a sparse model, or the reading of weights,
    a further node costs less than the one before it.
    """
    smooth = [*ms]
    for place in range(1, len(ms) - 1):
        (one, here, two), (low, high) = (
            counts[place - 1 : place + 2],
            (smooth[place - 1], ms[place + 1]),
        )
        fraction = log(here / one) / log(two / one)
        between = low * (high / low) ** fraction
        smooth[place] = ms[place] if ms[place] <= OUTLIER * between else between
    return smooth


def _time_interleaved(executor: Executor, possible: list[int]) -> dict[int, list[float]]:
    """Time steps of the counts `possible`, interleaved. Returns their seconds by number of nodes,
    for at least two counts.
    """
    random, times = Random(0), dict[int, list[float]]()  # noqa: S311
    for _ in range(REPEATS):
        for nodes in possible:
            step = _steps(executor.limits, nodes, random)
            taken = times.get(nodes, [])
            everything = sum(map(sum, times.values()))
            share = SECONDS / len(possible)
            if _enough(taken, share) or _confirmed(nodes, times, share):
                continue
            if len(times) >= 2 and not taken and everything > SECONDS:
                continue
            if taken and everything > 3 * SECONDS:
                continue
            for _ in range(0 if taken else executor.capabilities.first_steps):
                _time_step(executor, step)
            times[nodes] = [*taken, _time_step(executor, step)]
    return times


def _enough(taken: list[float], share: float) -> bool:
    """Return whether a count was timed often enough: MIN_REPEATS times and for its share of the
    time; or twice, if steps are long and both took about the same time.
    """
    if len(taken) == 2:
        return MIN_REPEATS * min(taken) > share and max(taken) <= ALIKE * min(taken)
    return len(taken) >= MIN_REPEATS and sum(taken) > share


def _confirmed(nodes: int, times: dict[int, list[float]], share: float) -> bool:
    """Return whether the only time of a long step is as expected from the counts around it, within
    ALIKE: on the straight line between two others; for the largest, between that line and a time in
    proportion to the one before it; not below smaller steps nor above larger ones. A disturbed time
    is not, nor are its neighbours, so all of them are timed again.
    """
    counts = sorted(times)
    if len(times.get(nodes, [])) != 1 or MIN_REPEATS * times[nodes][0] < share or len(counts) < 3:
        return False
    taken = [median(times[count]) for count in counts]
    here = counts.index(nodes)
    one, two = [place for place in _nearest(here, len(counts)) if place != here]
    slope = (taken[two] - taken[one]) / (counts[two] - counts[one])
    line = taken[one] + slope * (nodes - counts[one])
    lower_bounds = [line, *taken[:here]]
    upper_bounds = taken[here + 1 :] or [taken[here - 1] * nodes / counts[here - 1]]
    upper_bounds += [line] if one < here < two else []
    return max(lower_bounds) / ALIKE <= taken[here] <= ALIKE * min(upper_bounds)


def _nearest(place: int, many: int) -> range:
    """Return three adjacent indices of `many`, with `place` in the middle unless it is at an
    end.
    """
    first = min(max(place - 1, 0), many - 3)
    return range(first, first + 3)


def _fits(limits: ExecutorLimits, nodes: int) -> bool:
    rows = -(-nodes // PER_ROW)
    pages = -(-(PER_ROW + 1) // limits.page_size)
    return limits.context > PER_ROW and rows <= limits.slots and rows * pages <= limits.pages


def _attention_ms(executor: Executor, seconds: float) -> float:
    """Return the milliseconds that 1,000 cached tokens add to a node. Nodes with many cached tokens
    and with none are timed in turn, so that both run under the same load.

    seconds  time of one prompt token
    """
    limits = executor.limits
    cached, chunk_tokens = timed_tokens(limits), limits.max_nodes
    if not executor.capabilities.unwritten:
        cached = min(CACHED, max(CACHED // 4, int(SECONDS / seconds)), cached)
        if limits.checkpoints:  # Recurrent states exist at ends of pages only.
            cached, chunk_tokens = (
                count - count % limits.page_size for count in (cached, chunk_tokens)
            )
        if not (cached and chunk_tokens):
            return 0.0
        _fill(executor, cached, chunk_tokens)
    nodes = min(PER_ROW, limits.scored_nodes)
    chain = np.arange(nodes, dtype=np.int32)[None]
    steps = _Step(limits, chain, nodes - 1, cached), _Step(limits, chain, nodes - 1)
    far: list[float] = []
    near: list[float] = []
    share = SECONDS / len(NODES) / 2
    while not (_enough(far, share) and _enough(near, share)) and len(far) < MIN_REPEATS:
        # The far step first: the near one overwrites the start of the cache, not its length. Both
        # evict the checkpoint of the cached tokens where there are few (recurrent states).
        if limits.checkpoints and executor.reusable_prefix_len(np.zeros(cached, np.int32)) < cached:
            _fill(executor, cached, chunk_tokens)
        far.append(_time_step(executor, steps[0]))
        near.append(_time_step(executor, steps[1]))
    return max(0.0, 1e6 * (min(far) - min(near)) / (nodes * cached))


def _fill(executor: Executor, cached: int, chunk_tokens: int) -> None:
    """Write `cached` tokens to the cache, in chunks of `chunk_tokens`."""
    for start in range(0, cached, chunk_tokens):
        chunk = np.zeros((1, min(chunk_tokens, cached - start)), np.int32)
        _time_step(executor, _Step(executor.limits, chunk, 0, start, samples=False))


class _Step:
    """One step to time: rows of `tokens` int32[rows,n] after `cached` tokens; the last
    `draft_tokens` of each row are a chain of draft tokens.
    """

    def __init__(
        self,
        limits: ExecutorLimits,
        tokens: Ints,
        draft_tokens: int,
        cached: int = 0,
        samples: bool = True,
    ) -> None:
        rows, length = tokens.shape
        width = -(-(cached + length + 1) // limits.page_size)
        width = min(width, limits.pages // rows)
        self.plan = Plan(
            slots=np.arange(rows, dtype=np.int32),
            kv_len=np.full(rows, cached, np.int32),
            known=tuple(tokens[:, : length - draft_tokens]),
            samples=np.full(rows, samples),
            max_nodes=np.full(rows, draft_tokens, np.int32),
            max_depth=np.full(rows, draft_tokens, np.int32),
            page_table=np.arange(rows * width, dtype=np.int32).reshape(rows, width),
            constrained=np.zeros(rows, np.bool_),
        )
        parents = np.arange(-1, draft_tokens - 1, dtype=np.int32)
        scores = np.zeros(draft_tokens, np.float32)
        chains = tokens[:, length - draft_tokens :]
        self.drafts = [Draft(chain, parents, scores) for chain in chains]


def _steps(limits: ExecutorLimits, nodes: int, random: Random) -> _Step:
    """Return a step of `nodes` nodes without context: one row up to PER_ROW nodes, then more rows.
    Tokens are drawn from the whole vocabulary: a sparse model's experts depend on them.
    """
    rows = -(-nodes // PER_ROW)
    drawn = random.choices(range(limits.vocab), k=nodes // rows * rows)
    return _Step(limits, np.array(drawn, np.int32).reshape(rows, -1), nodes // rows - 1)


def _time_step(executor: Executor, step: _Step) -> float:
    """Run one step and return its seconds, without the time to open and close its slots."""
    return _run_step(executor, step, None)[0]


def _run_step(
    executor: Executor, step: _Step, request: OnDeviceDraftSpec | None
) -> tuple[float, Outcome]:
    """Run one step and return (its seconds, without the time to open and close its slots; its
    outcome).
    """
    plan = replace(step.plan, on_device_draft=request)
    for slot, cached, known in zip(plan.slots, plan.kv_len, plan.known, strict=True):
        text = TokenText(np.zeros(int(cached) + len(known), np.int32))
        greedy = Sampling(temperature=0.0)
        executor.open(SlotInit(int(slot), text, text.total, greedy, cached=int(cached)))
    try:
        started = perf_counter()
        trees = batch(plan.known, step.drafts)
        outcome = executor.finish(executor.begin(plan, trees))
        return perf_counter() - started, outcome
    finally:
        for slot in plan.slots:
            executor.close(int(slot))


def with_draft_model(
    costs: StepCosts, model: DraftModel, executor: Executor, page_size: int, depth: int
) -> StepCosts:
    """Measure a draft model and return the costs with it: a pass per level of draft tokens, or its
    part of a block, and the pass over accepted tokens, which every step runs. If steps draft by
    themselves: the added time of a step that grows one level, and of each further level, at most
    `depth`. All slots must be closed, and are closed again.
    """
    within, outcome = _times_within(executor, min(depth, PER_ROW // 2))
    if within is not None:
        follow, further = within
        return replace(costs, draft_ms=further, follow_ms=follow, drafts_in_step=True)
    pages = np.arange(-(-PER_ROW // page_size), dtype=np.int32)[None]
    zero, ends = np.zeros(1, np.int32), np.array([0, 1], np.int32)
    one = zero + np.int32(1)
    blocks = model.traits.block_size
    features = outcome.features.select(zero) if outcome.features is not None else None
    scored = zero[:0] if blocks else zero
    extension = DraftExtension(zero, zero, ends, zero, zero, pages, scored, CANDIDATES)
    level = DraftLevel(zero, zero - one, ends, one, zero, pages, first=0, candidates=CANDIDATES)
    block = DraftBlock(zero, zero, zero, pages, depth=blocks, candidates=1)

    def fastest(work: Callable[[], object]) -> float:
        return 1000.0 * min(_seconds(work) for _ in range(2 * REPEATS))

    needs_none = model.traits.features.kind == "none"
    extend_ms = fastest(lambda: model.extend(extension, None if needs_none else features))
    if blocks:
        draft_token_ms = fastest(lambda: model.block(block)) / blocks
    else:
        draft_token_ms = fastest(lambda: model.expand(level))
    return replace(costs, draft_ms=draft_token_ms, follow_ms=extend_ms)


def _times_within(
    executor: Executor, max_levels: int
) -> tuple[tuple[float, float] | None, Outcome]:
    """Return (milliseconds that a step takes longer if it also extends the draft model and grows
    one level, milliseconds of each further level up to `max_levels`), or None if steps do not
    draft by themselves; and the last step's outcome.
    """
    step, fastest = _steps(executor.limits, 2, Random(0)), {}  # noqa: S311
    for levels in dict.fromkeys((1, 0, max_levels)):
        request = OnDeviceDraftSpec(step.plan.slots, width=1, levels=levels) if levels else None
        taken = []
        for _ in range(REPEATS):
            seconds, outcome = _run_step(executor, step, request)
            taken.append(seconds)
            if levels and outcome.drafts is None:
                return None, outcome
        fastest[levels] = 1000.0 * min(taken)
    follow = max(0.0, fastest[1] - fastest[0])
    further = max(0.0, fastest[max_levels] - fastest[1]) / max(max_levels - 1, 1)
    return (follow, further), outcome


def _seconds(work: Callable[[], object]) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started


def prepare(
    config: EngineConfig,
    executor: Executor,
    within: bool,
    progress: Callable[[str, int, int], None] | None,
) -> None:
    """Compile and capture everything that steps will run. Call it after the draft model is
    attached, since that would invalidate the result.

    within    a draft is loaded whose trees steps grow by themselves
    progress  called with (what, done, total); None = not called
    """
    shape = config.draft_shape
    drafts = shape.nodes if config.speculates else 0
    levels = min(drafts, shape.depth) if within else 0
    width = shape.width if levels else 0

    executor.warm_up(DraftShape(drafts, width, levels), progress or (lambda *_: None))
