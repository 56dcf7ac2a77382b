"""No answer depends on drafting: every method x shape x page size x temperature x parameters, of
which every pair is in some cell.

Each cell is a `prove` of requests of nine kinds (penalties, bias, log-probabilities, several
choices, stop strings, truncation, none: measure/mixed.py), with a grammar and without, alone and in
batches that are preempted. Random drafters are hardly ever right, so draft models are hinted
(`HintedModel`): the reference's token is put before theirs at three of four places. Models of every
family draft for themselves, so that their cache, experts and attention are a drafter's too; those
with recurrent states go on from checkpoints.
"""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from forerun.build.target import open_target
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.constrain.grammar import Grammar
from forerun.executors import cpu
from forerun.executors.cpu import CpuExecutor
from forerun.executors.torch import TorchExecutor
from forerun.measure import prove as proving
from forerun.measure.prove import Trial, answers, prove
from forerun.measure.workload import Prompt
from tests.covering import covering, every, rarely
from tests.drafters.kinds import Kinds
from tests.e2e.drafts import METHODS, HintedModel, make
from tests.models import tiny
from tests.parity.heads import RandomHead, Target
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
TEXTS = [" ".join((WORDS * 2)[n : n + 4 + n % 3]) for n in range(9)]
TEXTS += [TEXT, f"{TEXT} of"]  # Of which one begins as the other does.
PROMPTS = tuple(
    Prompt(f"p{n}", "e2e", ({"role": "user", "content": text},)) for n, text in enumerate(TEXTS)
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
    chosen = dict(METHODS[method])
    draft, token_map = chosen.pop("draft", None), chosen.pop("map", None)
    chosen |= {"speculative_token_map": str(made / token_map / "map.json")} if token_map else {}
    model, draft = made / chosen.pop("model", "target"), made / draft if draft else None
    options = {"max_sequences": 5, "kv_tokens": 192} | chosen | changes
    return small(model, executor, draft, **options)


def paged(made, method, page):
    """Room for two or three of five sequences: some are preempted, where pages are small."""
    return configured(made, method, page_size=page, kv_tokens=192 if page > 16 else 144)


def hinted(monkeypatch):
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


@pytest.fixture
def hints(monkeypatch):
    return hinted(monkeypatch)


def shaped(config, shape):
    """The configuration with this shape, as far as its method has one."""
    changes = {"speculative_num_steps": None, "speculative_num_draft_tokens": None} | SHAPES[shape]
    if config.speculative_algorithm == "NAIVE":
        changes = dict.fromkeys(changes)
    if config.speculative_algorithm == "NGRAM":
        changes.pop("speculative_eagle_topk", None)
    return replace(config, **changes)


def proved(config, trial, hints=None, shapes=("chain", "tree")):
    """Prove the trial on one target under each shape; return the runs that speculated."""
    proofs = []
    with closing(open_target(config)) as opened:
        target = opened
        if target.draft_model is not None and hints is not None:
            model = HintedModel(target.draft_model, (), 0)
            model._texts = hints
            target = replace(opened, draft_model=model)
        for shape in shapes:
            proof = prove(target, shaped(target.config, shape), trial)
            runs = [run for run in proof.runs if run.speculation != "OFF"]
            assert [run.divergence for run in proof.runs if run.divergence] == [], shape
            assert len(runs) == 2 * len(trial.temperatures)
            assert all(run.identical == run.answers >= len(trial.prompts) for run in runs)
            assert all(run.draft_tokens > 0 for run in runs), shape
            assert sum(run.accepted for run in runs) > 0, shape
            proofs += runs
    return proofs


CHAINS = ("NAIVE", "NGRAM")
"""Methods that shape their drafts themselves."""
OFTEN = [
    ("EAGLE3", "tree", "grammar", 1, 0.8, "q8_0"),
    ("NEXTN, map", "tree", "grammar", 16, 0.8, "same"),
    ("STANDALONE, other vocabulary", "tree", "grammar", 64, 0.8, "q8_0"),
]
"""What the whole suite always runs, with fewer tokens."""
CELLS = [
    cell
    for cell in every(
        *(METHODS, ["chain", "tree"], TRIALS, [1, 16, 64], [0.0, 0.8, 1.0]), ["same", "q8_0"]
    )
    if cell[0] not in CHAINS or cell[1] == "chain"
]
WIDE = [(method, "wide", "grammar", 16, 0.8, "same") for method in ("EAGLE3", "NEXTN")]


@NATIVE
@pytest.mark.parametrize(
    ("method", "shape", "trial", "page", "temperature", "kv_dtype"),
    rarely(CELLS, OFTEN) + [pytest.param(*cell, marks=pytest.mark.slow) for cell in WIDE],
)
def test_the_native_core(made, hints, method, shape, trial, page, temperature, kv_dtype):
    often = (method, shape, trial, page, temperature, kv_dtype) in OFTEN
    trial = replace(
        TRIALS[trial], temperatures=(temperature,), tokens=12 if often else TRIAL.tokens
    )
    config = replace(paged(made, method, page), kv_dtype=kv_dtype)
    config = replace(config, kv_tokens=1024) if shape == "wide" else config
    proved(config, trial, hints, (shape,))


SHORT = replace(TRIALS["grammar"], prompts=PROMPTS[:9], tokens=8, temperatures=(0.8,))


@pytest.fixture
def emulated(monkeypatch):
    """Rounds are captured by a tape, which is held to CUDA's rules."""
    on_tape(monkeypatch, warm=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "captured"), [*((method, False) for method in METHODS), ("NGRAM", True)]
)
def test_torch(made, hints, request, method, captured):
    if captured:
        request.getfixturevalue("emulated")
    on = {"device": "cpu", "dtype": "float32", "disable_cuda_graph": not captured}
    config = replace(paged(made, method, 16), executor="torch", **on)
    proved(config, SHORT, hints, ("chain" if method in CHAINS else "tree",))


@pytest.fixture(scope="module")
def weak(tmp_path_factory):
    """A target that mostly goes by the last token, and drafts that do the same: nothing can hint in
    a round.
    """
    return rounds.make(tmp_path_factory.mktemp("weak"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "page", "overlap"),
    covering(
        every(rounds.METHODS, [1, 16, 64], [False, True]),
        # Every page size with every method: tests/parity/test_rounds_that_draft.py.
        lambda cell: {(cell[0], cell[2]), (cell[1], cell[2])},
    ),
)
def test_captured_rounds_of_every_draft_model(weak, emulated, method, page, overlap):
    config = rounds.configured(weak, method, page, kv_tokens=256)
    config = replace(config, chunked_prefill_size=320, overlap=overlap)
    plain = replace(SHORT, tokens=16, grammar=None, mixed=False)
    proved(config, replace(plain, temperatures=(1.0 if overlap else 0.8,)))
    proved(config, SHORT, shapes=("tree",))


# --- families ------------------------------------------------------------------------------------

FEW = Trial(PROMPTS[-4:], tokens=10, temperatures=(1.0,), group=4, mixed=True)
COMMON = (
    *("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "gpt_oss"),
    *("olmo2", "gemma3_text", "deepseek_v2", "seed_oss", "olmo3", "exaone4", "glm4_moe_lite"),
    *("minimax_m2", "ministral3", "gemma4_text", "hunyuan_v1_dense"),
)
FAMILIES = {
    "torch": (*COMMON, "phi3", "smollm3", "granite"),
    "cpu": (*COMMON, "qwen2_moe", "gemma2"),
    "rounds": ("glm4_moe", "deepseek_v3", "gpt_oss", "gemma4_text"),
}
"""By executor. What the core runs is not Llama's block."""
FAMILIES_OFTEN = [("torch", "gpt_oss", 16), ("cpu", "glm4_moe", 16), ("cpu", "deepseek_v3", 1)]
FAMILIES_OFTEN += [("cpu", "gemma2", 16), ("cpu", "gemma4_text", 1)]


def numbers(executor):
    """Changes of `small` for an executor."""
    return {"executor": executor, "dtype": "file" if executor == "cpu" else "float32"}


@pytest.fixture(scope="module")
def family_of(tmp_path_factory):
    """(family) -> the folder of a small model. A head reads three layers of convolutions."""
    made, deep = {}, {"layer_types": ["conv", "full_attention", "conv"] * 2}

    def build(family):
        if family not in made:
            changes = deep | {"num_hidden_layers": 6} if family == "lfm2" else {}
            folder = tmp_path_factory.mktemp(family)
            made[family] = tiny.save_folder(tiny.model(family, **changes), folder)
        return made[family]

    return build


@pytest.mark.parametrize(
    ("executor", "family", "page"),
    rarely(
        [
            *(cell for name in ("torch", "cpu") for cell in every([name], FAMILIES[name], [1, 16])),
            *every(["rounds"], FAMILIES["rounds"], [16]),
        ],
        FAMILIES_OFTEN,
        lambda cell: {(cell[0], cell[1]), (cell[0], cell[2])},
    ),
)
def test_every_family(family_of, request, executor, family, page):
    """Little room, so that sequences are preempted; two prompts begin alike."""
    if executor == "cpu" and cpu.available() is not None:
        pytest.skip(str(cpu.available()))
    if executor == "rounds":
        request.getfixturevalue("emulated")
    alone = {"speculative_algorithm": "STANDALONE", "disable_cuda_graph": executor == "torch"}
    folder, on = family_of(family), numbers("cpu" if executor == "cpu" else "torch")
    config = small(folder, "torch", folder, page_size=page, kv_tokens=176, **alone)
    proved(replace(config, **on), FEW, shapes=("tree",))


# --- recurrent states ----------------------------------------------------------------------------

STATES = replace(FEW, tokens=20, temperatures=(0.0, 1.0))
DELTAS = {"torch": "qwen3_next", "cpu": "qwen3_5_text"}
"""Executor -> the family that it is tried with."""


def recurrent(folder, page, **changes):
    """Little room, so that sequences are preempted; two prompts begin alike."""
    little = {"speculative_algorithm": "NGRAM", "page_size": page, "kv_tokens": 96}
    return small(folder, **little | changes)


@pytest.fixture
def opened(monkeypatch):
    """(cached, shared) tokens of every sequence that an executor opens."""
    seen = []
    for kind in (TorchExecutor, CpuExecutor):

        def open(executor, slot_init, call=kind.open):
            seen.append((slot_init.cached, slot_init.shared))
            call(executor, slot_init)

        monkeypatch.setattr(kind, "open", open)
    return seen


@pytest.mark.parametrize(
    ("executor", "family", "drafts", "page"),
    rarely(
        [
            *every(["torch", "cpu"], ["delta", "lfm2"], ["another model"], [1, 16]),
            *every(["torch", "cpu"], ["delta"], ["its own layer"], [4]),
            ("cpu", "lfm2", "a head", 4),
        ],
        [*every(["cpu"], ["delta", "lfm2"], ["another model"], [1]), ("cpu", "lfm2", "a head", 4)],
        None,
    ),
)
def test_recurrent_states(family_of, tmp_path, opened, hints, executor, family, drafts, page):
    """Prove that hinted drafts, which are mostly right, change no text; some go on from a
    checkpoint. A prediction layer reads the target's hidden states, so that pages are shared a
    token later.
    """
    if executor == "cpu" and cpu.available() is not None:
        pytest.skip(str(cpu.available()))
    family = DELTAS[executor] if family == "delta" else family
    model, draft, method = family_of(family), None, "NEXTN"
    if drafts == "its own layer":
        model = Kinds(tmp_path)[f"NEXTN of, {family}"].model
    elif drafts == "a head":
        draft = RandomHead(Target(FolderCheckpoint(model)), tmp_path / "head", {}).folder
        method = "EAGLE3"
    else:
        draft, method = family_of("llama"), "STANDALONE"
    chosen = {"speculative_algorithm": method, "speculative_draft_model_path": draft and str(draft)}
    config = recurrent(model, page, **numbers(executor), **chosen)
    runs = proved(config, STATES, hints, ("tree",))
    assert any(cached for cached, _ in opened), "no sequence went on from a checkpoint"
    assert sum(run.accepted for run in runs) > 50
    assert sum(run.preemptions for run in runs) > 0 or drafts != "another model"


@pytest.mark.parametrize(
    "executor", [pytest.param("torch", marks=pytest.mark.slow), pytest.param("cpu", marks=NATIVE)]
)
def test_without_room_for_checkpoints(family_of, opened, monkeypatch, executor):
    """Prompts run from the start. Drafts from the text, of which hardly one is right here."""
    monkeypatch.setattr("forerun.build.memory.CHECKPOINTS", 0)
    config = recurrent(family_of(DELTAS[executor]), 4, **numbers(executor))
    with closing(open_target(config)) as target:
        sampled = replace(STATES, temperatures=(1.0,))
        proof = prove(target, replace(target.config, speculative_num_draft_tokens=8), sampled)
    assert proof.identical and any(run.draft_tokens for run in proof.runs)
    assert not any(cached for cached, _ in opened)
    assert any(shared for _, shared in opened)
