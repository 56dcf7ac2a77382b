"""No answer depends on drafting: every method x shape x page size x temperature x parameters, of
which every pair is in some cell.

Each cell is a `prove` of requests of nine kinds (penalties, bias, log-probabilities, several
choices, stop strings, truncation, none: measure/mixed.py), with a grammar and without, alone and in
batches that are preempted. Random drafters are hardly ever right, so draft models are hinted
(`Hinted`): what the reference said is put before what they say, at three of four places.
"""

from dataclasses import replace

import numpy as np
import pytest

from forerun.build.target import open_target
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.constrain.grammar import Grammar
from forerun.executors import cpu
from forerun.measure import prove as proving
from forerun.measure.prove import Trial, answers, prove
from forerun.measure.workload import Prompt
from tests.covering import covering, every
from tests.e2e.drafts import METHODS, Hinted, make
from tests.models import tiny
from tests.parity.heads import Target, learn
from tests.parity.tape import on_tape
from tests.worlds import draft_models as rounds
from tests.worlds.configs import small

NATIVE = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))
SHAPES = {
    "chain": {"speculative_num_steps": 3},
    "tree": {
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 16,
    },
    "wide": {
        "speculative_num_steps": 5,
        "speculative_eagle_topk": 8,
        "speculative_num_draft_tokens": 64,
    },
}
TEXT = "the quick brown fox jumps over the lazy dog and then there is another one"
WORDS = TEXT.split()
SAID = [" ".join((WORDS * 2)[n : n + 4 + n % 3]) for n in range(9)]
SAID += [TEXT, f"{TEXT} of"]  # Of which one begins as the other does.
PROMPTS = tuple(
    Prompt(f"p{n}", "e2e", ({"role": "user", "content": said},)) for n, said in enumerate(SAID)
)
TRIAL = Trial(PROMPTS, tokens=20, temperatures=(0.0, 0.8, 1.0), group=5, mixed=True)
TRIALS = {
    "parameters": TRIAL,
    "grammar": replace(TRIAL, grammar=Grammar.regex("([a-p]{2},){20}[a-p]!")),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("made"))


def configured(made, method, executor="cpu", **changes):
    asked = dict(METHODS[method])
    draft, token_map = asked.pop("draft", None), asked.pop("map", None)
    asked |= {"speculative_token_map": str(made / token_map / "map.json")} if token_map else {}
    model, draft = made / asked.pop("model", "target"), made / draft if draft else None
    return small(model, executor, draft, **{"max_sequences": 5, "kv_tokens": 192} | asked | changes)


def paged(made, method, page):
    """Room for two or three of five sequences: some are preempted, where pages are small."""
    return configured(made, method, page_size=page, kv_tokens=192 if page > 16 else 144)


@pytest.fixture
def hints(monkeypatch):
    """Texts of the reference: what was answered without speculation, newest first."""
    texts = []

    def noted(target, config, requests, *rest):
        done = answers(target, config, requests, *rest)
        if not config.speculates:
            texts[:] = [
                np.concatenate([requests[index].prompt, item.tokens]).tolist()
                for index, item in zip(done.prompts, done.done, strict=True)
            ]
        return done

    monkeypatch.setattr(proving, "answers", noted)
    return texts


def shaped(config, shape):
    """The configuration with this shape, as far as its method has one."""
    changes = {"speculative_num_steps": None, "speculative_num_draft_tokens": None} | SHAPES[shape]
    if config.speculative_algorithm == "NAIVE":
        changes = dict.fromkeys(changes)
    if config.speculative_algorithm == "NGRAM":
        changes.pop("speculative_eagle_topk", None)
    return replace(config, **changes)


def proved(config, trial, hints, note=lambda *_: None, shapes=("chain", "tree")):
    """Prove the trial on one target under each shape."""
    target = open_target(config)
    try:
        if target.draft_model is not None and hints is not None:
            model = Hinted(target.draft_model, (), 0)
            model._texts = hints
            target = replace(target, draft_model=model)
        for shape in shapes:
            proof = prove(target, shaped(target.config, shape), trial)
            runs = [run for run in proof.runs if run.speculation != "OFF"]
            assert [run.divergence for run in proof.runs if run.divergence] == [], shape
            assert len(runs) == 2 * len(trial.temperatures)
            assert all(run.identical == run.answers >= len(trial.prompts) for run in runs)
            assert all(run.draft_tokens > 0 for run in runs), shape
            assert sum(run.accepted for run in runs) > 0, shape
            note(shape, runs)
    finally:
        target.close()


@pytest.fixture
def note(record_property):
    def noted(shape, runs):
        names = ("answers", "tokens", "draft_tokens", "accepted", "preemptions", "steps")
        sums = " ".join(str(sum(getattr(run, name) for run in runs)) for name in names)
        record_property(f"{shape}", sums)

    return noted


CHAINS = ("NAIVE", "NGRAM")
"""Methods that shape their drafts themselves."""


@NATIVE
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "shape", "trial", "page", "temperature", "kv_dtype"),
    covering(
        [
            cell
            for cell in every(
                *(METHODS, ["chain", "tree"], TRIALS, [1, 16, 64], [0.0, 0.8, 1.0]),
                ["same", "q8_0"],
            )
            if cell[0] not in CHAINS or cell[1] == "chain"
        ]
    ),
)
def test_the_native_core(made, hints, note, method, shape, trial, page, temperature, kv_dtype):
    trial = replace(TRIALS[trial], temperatures=(temperature,))
    config = replace(paged(made, method, page), kv_dtype=kv_dtype)
    proved(config, trial, hints, note, (shape,))


@NATIVE
@pytest.mark.slow
@pytest.mark.parametrize("method", ["EAGLE3", "NEXTN"])
def test_sixty_four_tokens(made, hints, note, method):
    config = replace(paged(made, method, 16), kv_tokens=1024)
    proved(config, replace(TRIALS["grammar"], temperatures=(0.8,)), hints, note, ("wide",))


SHORT = replace(TRIALS["grammar"], prompts=PROMPTS[:9], tokens=8, temperatures=(0.8,))


def in_torch(made, method, page, **changes):
    config = paged(made, method, page)
    return replace(config, executor="torch", device="cpu", dtype="float32", **changes)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_torch(made, hints, note, method):
    shape = "chain" if method in CHAINS else "tree"
    proved(in_torch(made, method, 16, disable_cuda_graph=True), SHORT, hints, note, (shape,))


@pytest.fixture
def emulated(monkeypatch):
    """Rounds are captured by a tape, which is held to CUDA's rules."""
    on_tape(monkeypatch, warm=False)


@pytest.fixture(scope="module")
def learned(made):
    """A head that drafts on the device, and some prompts after which it is often right."""
    ids = tiny.tokenizer()
    ask = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    said = [
        " ".join(WORDS[n:4] + WORDS[:n] + WORDS[m : m + 1]) for n in (1, 2, 3) for m in range(15)
    ]
    whole = [ids.encode(ask.format(each)).ids for each in said]
    length = max(map(len, whole), key=[len(each) for each in whole].count)
    same = [(text, each) for text, each in zip(said, whole, strict=True) if len(each) == length][
        :12
    ]
    dense = Target(FolderCheckpoint(made / "target"))
    learn(dense, made / "learned", np.array([each for _, each in same]))
    return made / "learned", tuple(
        Prompt(text, "e2e", ({"role": "user", "content": text},)) for text, _ in same[:6]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "page", "overlap"),
    covering(every(["EAGLE3", "EAGLE+NGRAM", "NAIVE"], [1, 16], [False, True])),
)
def test_captured_rounds_that_draft(made, learned, emulated, note, method, page, overlap):
    """With requests that are decided on the device, and with all kinds."""
    folder, prompts = learned
    path, shapes = str(folder), ("chain",) if method in CHAINS else ("chain", "tree")
    config = in_torch(made, method, page, overlap=overlap, speculative_draft_model_path=path)
    plain = replace(SHORT, prompts=prompts, tokens=16, grammar=None, mixed=False)
    proved(config, replace(plain, temperatures=(0.8 * overlap,)), None, note, shapes)
    proved(config, SHORT, None, lambda shape, runs: note(f"{shape}, grammar", runs), shapes[-1:])


def with_overlap(cell):
    """Every method with overlap and without; every page size of some (of every method it is in
    tests/parity/test_rounds_that_draft.py).
    """
    method, page, overlap = cell
    return {(method, overlap), (page, overlap)}


@pytest.fixture(scope="module")
def weak(tmp_path_factory):
    """A target that mostly goes by the last token, and drafts that do the same: nobody can hint in
    a round.
    """
    return rounds.make(tmp_path_factory.mktemp("weak"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "page", "overlap"),
    covering(every(rounds.METHODS, [1, 16, 64], [False, True]), with_overlap),
)
def test_captured_rounds_of_every_draft_model(weak, emulated, note, method, page, overlap):
    config = replace(
        rounds.configured(weak, method, page), chunked_prefill_size=320, overlap=overlap
    )
    plain = replace(SHORT, tokens=16, grammar=None, mixed=False)
    proved(config, replace(plain, temperatures=(1.0 if overlap else 0.8,)), None, note)
    proved(config, SHORT, None, lambda shape, runs: note(f"{shape}, grammar", runs), ("tree",))


@pytest.mark.slow
def test_captured_rounds_of_lookups(made, emulated, hints, note):
    proved(in_torch(made, "NGRAM", 16), SHORT, hints, note, ("chain",))


@NATIVE
@pytest.mark.parametrize(
    ("method", "page", "kv_dtype"),
    [
        ("EAGLE3", 1, "q8_0"),
        ("NEXTN, map", 16, "same"),
        ("STANDALONE, other vocabulary", 64, "q8_0"),
    ],
)
def test_some_of_it(made, hints, note, method, page, kv_dtype):
    """What the whole suite always runs."""
    trial = replace(TRIALS["grammar"], tokens=12, temperatures=(0.8,))
    config = replace(paged(made, method, page), kv_dtype=kv_dtype)
    proved(config, trial, hints, note, ("tree",))
