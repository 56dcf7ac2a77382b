"""The engine turn by turn on the toy: texts, stop conditions, logprobs, errors, aborts."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from forerun.control.policy import FixedPolicy
from forerun.control.step_costs import StepCosts
from forerun.engine.request import Finish
from forerun.errors import BusyError, ContextError, EngineError, RequestError
from forerun.executors.toy import ToyExecutor
from tests.control.steps import MODEL, PolicyOnTable
from tests.covering import covering, every
from tests.engine.carrying import CarryingToy
from tests.engine.toys import (
    RecordingSink,
    ask,
    best,
    finish,
    following,
    limits,
    logits,
    make,
    reference,
    run,
    step,
    submit,
)  # fmt: skip

DRAFTERS = ("none", "ngram", "oracle", "adversary", "erratic")
SAMPLED = {"temperature": 0.8, "seed": 7}


# --- the same text, whatever speculates -------------------------------------------------


CHANGES = {}, SAMPLED, SAMPLED | {"top_k": 3, "frequency_penalty": 0.5}


@pytest.mark.parametrize("draft_ms", [0.0, 100.0])
def test_a_policy_that_learns_changes_speed_only(draft_ms):
    costs = StepCosts(nodes=(1, 64), verify_ms=(1.0, 1.5), draft_ms=draft_ms)
    engine = make("ngram", policy=PolicyOnTable(costs, 4, 4, MODEL), pages=160, max_nodes=32)
    requests = [ask(str(i), f"Prompt {i % 3}", 40, **SAMPLED) for i in range(5)]
    sink = run(engine, *requests)
    sink.expect(*requests)
    assert (engine.stats().draft_tokens > 20) == (draft_ms == 0)
    assert all(budget.reason for budget in engine.stats().load.granted)


def test_guesses_take_no_page_from_anyone():
    """With draft tokens that are all rejected, sequences run exactly when they do without."""

    def history(name):
        engine = make(name, page_size=2, pages=20, slots=6, max_nodes=64)
        run(engine, *(ask(str(i), f"Prompt {i}", 20) for i in range(6)))
        return engine.stats().preemptions, engine.stats().steps

    assert history("adversary") == history("none") and history("none")[0] > 0


def test_the_oracle_is_always_right():
    engine = make("oracle", nodes=4, depth=4)
    sink = run(engine, ask(max_tokens=21, prompt="abc"))
    stats = sink.last().stats
    assert sink.tokens() == following(b"abc", 21)
    # One token after the prefill, then four draft tokens and one of the target's own, four times.
    assert (stats.steps, stats.draft_tokens, stats.accepted) == (5, 16, 16)
    assert stats.histogram == (1, 0, 0, 0, 4)
    total = engine.stats()
    assert (total.drafts, total.draft_tokens, total.accepted) == (4, 16, 16)
    assert total.accepted_at == (4, 4, 4, 4) and total.acceptance_length == 21 / 5


def test_the_adversary_is_never_right():
    engine = make("adversary", nodes=4, depth=4)
    sink = run(engine, ask(max_tokens=21, prompt="abc"))
    stats = sink.last().stats
    assert sink.tokens() == following(b"abc", 21)
    assert (stats.steps, stats.accepted, stats.histogram) == (21, 0, (21,))
    assert stats.draft_tokens == 16 * 4 + 3 + 2 + 1  # Depth ends one before the last token.


# --- stop conditions --------------------------------------------------------------------


@pytest.mark.parametrize("include_stop", [False, True])
def test_stop_token_of_the_request(include_stop):
    tokens = following(b"Hello", 20)
    stop = tokens[8]
    request = ask(stop_tokens=(stop,), include_stop=include_stop)
    sink = run(make("oracle"), request)
    kept = tokens[: tokens.index(stop) + 1]
    assert sink.tokens() == kept and sink.last().stop_reason == stop
    assert sink.text().encode() == bytes(kept if include_stop else kept[:-1])


@pytest.mark.parametrize("name", ["none", "oracle"])
@pytest.mark.parametrize("include_stop", [False, True])
def test_stop_strings_end_nothing_before_min_tokens(name, include_stop):
    """As at vLLM: a stop string counts where it is complete after that many tokens."""
    text = bytes(following(b"Hello", 40)).decode()
    stop = text[7:10]
    lengths = []
    for min_tokens in range(14):
        request = ask(
            stop=("never", stop), max_tokens=40, include_stop=include_stop, min_tokens=min_tokens
        )
        sink = run(make(name, nodes=6, depth=6), request)
        sink.expect(request)
        lengths.append(len(sink.tokens()))
    assert lengths[:10] == [10] * 10 and all(length > 10 for length in lengths[10:])


def test_a_sequence_may_be_the_only_one_and_be_preempted():
    """Where others than sequences hold pages: a page store that reads."""
    engine, sink, request = make(page_size=2, pages=16), RecordingSink(), ask(max_tokens=16)
    engine.submit(request, sink)
    step(engine, 4)
    index = engine._core.scheduler.index
    held = index.take(index.available)
    step(engine, 4)
    assert engine.stats().preemptions == 1 and not engine._parts.open_slots
    for page in held:
        index.release(page)
    finish(engine)
    sink.expect(request)


@pytest.mark.parametrize("length", range(7, 11))
def test_a_prompt_without_output_takes_no_nodes_from_others(length):
    """Nor does it give others its share, and a part of it: one of its chunks is a single token."""
    engine, sink = make("oracle", nodes=16, depth=16, pages=256), RecordingSink()
    long = [ask(str(i), max_tokens=100) for i in range(3)]
    submit(engine, sink, *long)
    engine.step_once()
    engine.submit(ask("none", "x" * length, max_tokens=0), sink)
    finish(engine)
    sink.expect(*long)
    assert sink.last("none").finish == Finish.LENGTH and not engine.stats().failed_steps


# --- choices, caching, logprobs ---------------------------------------------------------


def test_prefix_of_an_earlier_request_is_found():
    engine = make(page_size=4)
    first = ask("1", "The same beginning", 8)
    run(engine, first)
    again = ask("2", "The same beginning, and more", 8)
    sink = run(engine, again)
    sink.expect(again)
    assert sink.of("2")[0].cached_tokens == 18
    # The output of a request is a prefix too.
    talk = "The same beginning" + reference(first)[1]
    sink = run(engine, ask("3", talk + "?", 8))
    assert sink.of("3")[0].cached_tokens == 24
    assert engine.stats().cached_tokens == 42


class WholePages(ToyExecutor):
    """The reference: a toy that copies no page."""

    def copy_page(self, source, target):
        return False


TEXT = "The same beginning, and more of it"


@pytest.mark.parametrize(
    ("name", "page_size"), covering(every(["none", "ngram", "oracle", "erratic"], [1, 4, 7, 16]))
)
def test_a_text_continues_within_a_page(name, page_size):
    """Wherever it parts from one that is known, one that is known whole runs its last token."""
    shape = {"page_size": page_size, "pages": 6000 // page_size, "max_nodes": 64}
    fast, slow = (make(name, executor=kind(limits(**shape))) for kind in (ToyExecutor, WholePages))
    for engine in (fast, slow):
        run(engine, ask("first", TEXT, 24, stop_tokens=()))
    for cut in range(1, len(TEXT)):
        for prompt, known in ((TEXT[:cut], cut - 1), (TEXT[:cut] + "~ other", cut)):
            request = ask(f"{prompt}", prompt, 6, **SAMPLED)
            sinks = [run(engine, request) for engine in (fast, slow)]
            for sink, cached in zip(sinks, (known, known // page_size * page_size), strict=True):
                sink.expect(request)
                assert sink.of(request.id)[0].cached_tokens == cached


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [3, 8])
def test_copied_pages_are_evicted_and_preempted_like_others(page_size, overlap):
    """Texts that part within pages, in a pool too small for them, under several salts."""
    kind = CarryingToy if overlap else ToyExecutor
    shape = limits(page_size=page_size, pages=96 // page_size, slots=6)
    engine = make("ngram", executor=kind(shape), overlap=overlap)
    requests = [
        ask(f"{part} {cut}", TEXT[:cut] + str(cut), 20, cache_salt="ab"[part], **SAMPLED)
        for cut in (2, 5, 9, 12, 13, 20, 21, 33)
        for part in (0, 1, 0)[: 2 + (cut < 10)]
    ]
    requests = [replace(one, id=f"{one.id} {n}") for n, one in enumerate(requests)]
    sink = run(engine, *requests)
    sink.expect(*requests)
    stats = engine.stats()
    assert stats.preemptions > 0 and stats.load.pages_held == 0
    assert any(sink.of(one.id)[0].cached_tokens % page_size for one in requests)


def test_a_salt_shares_cached_prefixes_with_itself_alone():
    """One by one, and at the same time: no sequence waits for a page that it cannot share."""
    prompt = "a prompt that everybody has"
    said = {name: replace(ask(name, prompt), cache_salt=name[0]) for name in ("a1", "b1", "a2")}
    said["none"] = ask("none", prompt)
    engine = make()
    for request in said.values():
        sink = run(engine, request)
        sink.expect(request)
        cached = sink.of(request.id)[0].cached_tokens
        assert cached == (26 if request.id == "a2" else 0), request.id
    engine = make()
    together = [said["a1"], said["b1"], said["a2"]]
    sink = run(engine, *together)
    sink.expect(*together)
    assert [sink.of(each.id)[0].cached_tokens for each in together] == [0, 0, 26]


@pytest.mark.parametrize("name", ["none", "oracle", "erratic"])
@pytest.mark.parametrize("stopped", [False, True])
def test_logprobs_of_the_output(name, stopped):
    """And of none behind its end, which a step may have said as well."""
    request = ask(max_tokens=10, logprobs=2, **SAMPLED)
    if stopped:
        stop = reference(request)[1][5]
        request = ask(max_tokens=10, logprobs=2, stop=(stop,), **SAMPLED)
    sink = run(make(name), request)
    sink.expect(request)
    entries = [entry for d in sink.of() for entry in d.logprobs]
    text = list(b"Hello")
    assert [entry.token for entry in entries] == sink.tokens()
    for entry in entries:
        raw = logits(text).astype(np.float64)
        raw -= np.log(np.exp(raw).sum())
        assert entry.logprob == pytest.approx(raw[entry.token], abs=1e-5)
        assert [token for token, _ in entry.top] == [best(text), best(text) + 1]
        text.append(entry.token)


def test_logprobs_of_the_prompt_survive_preemption():
    engine = make(page_size=2, pages=14, max_nodes=5)
    requests = [ask(str(i), f"Prompt {i}", 16, prompt_logprobs=0) for i in range(3)]
    sink = run(engine, *requests)
    assert engine.stats().preemptions > 0
    for request in requests:
        sink.expect(request)
        entries = sink.of(request.id)[0].prompt_logprobs
        assert [entry.token for entry in entries] == request.prompt[1:].tolist()


# --- refusals ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "kind", "field"),
    [
        (ask(prompt=""), RequestError, "prompt"),
        (ask(prompt=np.array([1, 259])), RequestError, "prompt"),
        (ask(prompt=np.array([-1])), RequestError, "prompt"),
        (ask(prediction=np.array([1, 259], np.int32)), RequestError, "prediction"),
        (ask(prompt="x" * 200), ContextError, "prompt"),
        (ask(prompt="x" * 190, max_tokens=3), ContextError, "max_tokens"),
        (ask(max_tokens=10**9), ContextError, "max_tokens"),
        (ask(max_tokens=-1), RequestError, "max_tokens"),
        (ask(max_tokens=4, min_tokens=5), RequestError, "min_tokens"),
        (ask(n=0), RequestError, "n"),
        (ask(n=10**9), RequestError, "n"),
        (ask(logit_bias=((300, 1.0),)), RequestError, "logit_bias"),
        (ask(logit_bias=((3, 1e39),)), RequestError, "logit_bias"),
        (ask(logit_bias=((3, float("nan")),)), RequestError, "logit_bias"),
        (ask(stop_tokens=(-5,)), RequestError, "stop_token_ids"),
        (ask(seed=-1), RequestError, "seed"),
        (ask(grammar=object()), RequestError, "grammar"),
    ],
)
def test_refused_before_anything_is_allocated(request_, kind, field):
    engine = make()
    with pytest.raises(kind) as caught:
        engine.submit(request_, RecordingSink())
    assert caught.value.field == field and str(caught.value)
    assert not engine.step_once() and engine.stats().load.waiting == 0


def test_busy():
    engine = make(max_waiting=2)
    sink = RecordingSink()
    engine.submit(ask("1", n=2), sink)
    with pytest.raises(BusyError):
        engine.submit(ask("2"), sink)
    engine.step_once()
    engine.submit(ask("2"), sink)
    finish(engine)
    assert sink.ended == {("1", 0), ("1", 1), ("2", 0)}


# --- aborts -----------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_abort_takes_effect_before_the_next_step(steps):
    """0: while it waits; 1, 2: in the middle of its prefill; 5: decoding."""
    engine = make(max_nodes=6, slots=2)
    sink = RecordingSink()
    engine.submit(ask("gone", "A prompt of several chunks", n=2, max_tokens=30), sink)
    engine.submit(ask("stays"), sink)
    step(engine, steps)
    engine.abort("gone")
    engine.step_once()
    engine.check()
    assert sink.last("gone", 0).finish == sink.last("gone", 1).finish == Finish.ABORT
    finish(engine)
    sink.expect(ask("stays"))


def test_shutdown_aborts_what_runs():
    engine = make()
    sink = RecordingSink()
    engine.submit(ask("1"), sink)
    engine.step_once()
    engine.submit(ask("2"), sink)
    engine.shutdown()
    engine.shutdown()
    assert {sink.last(id).finish for id in "12"} == {Finish.ABORT}
    assert not engine.alive
    engine.check()
    with pytest.raises(EngineError, match="was shut down"):
        engine.submit(ask("3"), sink)


# --- failures ---------------------------------------------------------------------------


class Fragile(ToyExecutor):
    """Fails, or answers NaN, for slots whose prompt begins with a given byte."""

    def __init__(self, how, **shape):
        super().__init__(limits(**shape))
        self.how = how
        self.bad = set()

    def open(self, slot_init):
        if self.how == "open" and slot_init.text.tokens[0] == ord("!"):
            raise RuntimeError("no room on the device")
        super().open(slot_init)
        if slot_init.text.tokens[0] == ord("!"):
            if self.how == "half":
                raise RuntimeError("no room on the device")
            self.bad.add(slot_init.slot)

    def close(self, slot):
        if self.how == "close" and slot in self.bad:
            raise RuntimeError("the device is gone")
        super().close(slot)
        self.bad.discard(slot)

    def begin(self, plan, trees, masks=None):
        if self.how == "verify" and self.bad & set(plan.slots.tolist()):
            raise RuntimeError("the device is on fire")
        return super().begin(plan, trees, masks)

    def finish(self, round, masks=None):
        finish = self._sampler.finish

        def spoiled(round, logits, *rest):
            def logits_of(node):
                row = np.searchsorted(round.trees.start, node, side="right") - 1
                values = logits(node).copy()
                if self.how == "nan" and int(round.plan.slots[row]) in self.bad:
                    values[5] = np.nan
                return values

            return finish(round, logits_of, *rest)

        with mock.patch.object(self._sampler, "finish", spoiled):
            return super().finish(round, masks)


def test_a_row_that_is_not_finite_ends_its_request_only():
    good = ask("good")
    sink = run(make(executor=Fragile("nan")), ask("bad", "! broken", n=2), good)
    sink.expect(good)
    for index in range(2):
        assert sink.last("bad", index).finish == Finish.ERROR
        assert "not finite" in sink.last("bad", index).error


def test_a_failed_step_ends_the_requests_in_it_and_no_others():
    engine = make(executor=Fragile("verify", slots=2))
    rest = [ask(str(i)) for i in range(2)]
    sink = run(engine, ask("bad", "! broken"), ask("with it"), *rest)
    assert sink.last("bad").finish == sink.last("with it").finish == Finish.ERROR
    assert "on fire" in sink.last("bad").error
    sink.expect(*rest)
    assert engine.alive and engine.stats().failed_steps == 1


@pytest.mark.parametrize("how", ["open", "half"])
def test_a_slot_that_cannot_be_opened_ends_its_request_only(how):
    good, later = ask("good"), [ask(str(i)) for i in range(8)]
    engine = make(executor=Fragile(how))
    sink = run(engine, ask("bad", "! broken", n=3), good, *later)
    sink.expect(good, *later)
    assert [sink.last("bad", i).finish for i in range(3)] == [Finish.ERROR] * 3
    assert "no room" in sink.last("bad").error


def test_the_engine_gives_up_after_failures_in_a_row():
    engine = make(executor=Fragile("verify", slots=1))
    sink = RecordingSink()
    for i in range(5):
        engine.submit(ask(str(i), "! broken"), sink)
    for _ in range(3):
        assert engine.alive
        engine.step_once()
    assert not engine.alive
    assert all(sink.last(str(i)).finish == Finish.ERROR for i in range(5))
    with pytest.raises(EngineError, match="on fire"):
        engine.submit(ask("6"), sink)
    assert engine.stats().load.pages_held == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_every_request_ends_where_no_slot_can_be_closed(overlap):
    """Whatever waits to be done as the engine gives up."""
    executor = Fragile("close")
    executor.capabilities = replace(executor.capabilities, overlap=overlap)
    engine, sink = make(executor=executor, overlap=overlap), RecordingSink()
    requests = [ask(str(i), "! broken", max_tokens=50) for i in range(6)]
    submit(engine, sink, *requests)
    step(engine, 4)
    for id in "015":
        engine.abort(id)
    engine.step_once()
    assert not engine.alive
    assert sink.ended == {(request.id, 0) for request in requests}
    assert engine.stats().load.pages_held == 0


def test_text_that_cannot_be_made_ends_its_request_only():
    engine, sink = make(), RecordingSink()
    bad, good = ask("bad", stop=("zzz",), max_tokens=50), ask("good", max_tokens=50)
    submit(engine, sink, bad, good)
    engine.step_once()
    with mock.patch.object(engine._core.outputs.live["bad"][0].stream, "_release") as release:
        release.side_effect = RuntimeError("no such character")
        finish(engine)
    sink.expect(good)
    assert sink.last("bad").finish == Finish.ERROR and "no such" in sink.last("bad").error
    assert engine.alive


def test_a_sink_that_raises_ends_its_request_only():
    engine = make()
    calls = []

    def broken(delta):
        calls.append(delta)
        raise RuntimeError("the client is gone")

    sink, good = RecordingSink(), ask("good")
    engine.submit(ask("bad", n=3), broken)
    engine.submit(good, sink)
    finish(engine)
    sink.expect(good)
    assert len(calls) == 1


# --- numbers ----------------------------------------------------------------------------


def test_stats_add_up():
    engine = make("oracle", slots=2)
    sink = run(engine, *(ask(str(i), f"Prompt number {i}", 12) for i in range(4)))
    stats = engine.stats()
    total = sum(len(sink.tokens(str(i))) for i in range(4))
    assert stats.output_tokens == total == 48
    assert stats.finished[Finish.LENGTH] == 4 and stats.prompt_tokens == 4 * 15
    assert sum(stats.first_token.counts) == sum(stats.duration.counts) == 4
    assert sum(stats.step_nodes.counts) == stats.steps
    assert stats.nodes == stats.step_nodes.total
    assert stats.step_seconds.total == pytest.approx(sum(stats.seconds.values()))
    # No sequence has a grammar.
    assert all((ms > 0) == (stage != "mask") for stage, ms in stats.seconds.items())


def test_time_between_steps_belongs_to_the_next_step(monkeypatch):
    """On a clock of its own, which the policy moves by a second after every step."""
    now, reports = [0.0], []

    class Slow(FixedPolicy):
        def observe(self, report):
            reports.append(sum(report.ms.values()))
            now[0] += 1.0

    for module in ("core", "step"):
        monkeypatch.setattr(f"forerun.engine.{module}.perf_counter", lambda: now[0])
    engine = make("ngram", policy=Slow(2, 2))
    run(engine, ask())
    now[0] += 60.0  # No request is there.
    run(engine, ask("s"))
    assert len(reports) > 4 and reports.count(0.0) == 2, "the first step of each: nothing before"
    assert reports.count(1000.0) == len(reports) - 2
