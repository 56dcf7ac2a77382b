"""A draft head in JAX, pass by pass and inside of rounds, against torch's."""

import re
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

import forerun.executors.jax as on_jax
from forerun.build import drafting, engine, with_jax
from forerun.build.engine import make_engine
from forerun.client.completion import make_request
from forerun.constrain.matcher.tree_mask import TreeGrammars
from forerun.control.policy import FixedPolicy
from forerun.executors.jax import JaxEagleModel, JaxExecutor, JaxOptions
from forerun.executors.jax import executor as jax_executor
from forerun.executors.jax.reports import line_size
from forerun.interface.grammars import Committed
from forerun.models.folder import FolderCheckpoint
from forerun.speculative.draft_tree import full_size
from forerun.speculative.tree import NodeMasks
from tests.models import tiny
from tests.parity.driver import limits
from tests.parity.heads import SWITCHES, Target, Twin, compare, within
from tests.parity.test_jax_executor import compilations  # noqa: F401 - a fixture
from tests.parity.test_torch_drafting import answered, mixed, same, seen  # noqa: F401 - a fixture
from tests.parity.test_torch_eagle_model import counted, opened, serve, simulated

SMALL = {"max_sequences": 2, "chunked_prefill_size": 64, "context": 128, "kv_tokens": 1024}


def on_xla(folder, twin, compiled, warm=False, **changes):
    """The target and head on the JAX executor, its layers in a scan, which compiles sooner."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(with_jax, "cache_dir", lambda: Path(compiled))
        patch.setattr(on_jax, "JaxOptions", partial(JaxOptions, stacked=True))
        if not warm:
            patch.setattr(JaxExecutor, "warm_up", lambda *_: None)
        return opened(folder, twin, executor="jax", **SMALL | changes)


@pytest.fixture(scope="module")
def target(folder, learned, compiled, quickly):
    made = on_xla(folder, learned[0], compiled)
    yield made
    made.close()


@pytest.fixture(scope="module")
def judge(folder, learned):
    """The same on the torch executor, pass by pass."""
    made = opened(folder, learned[0], **SMALL)
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("changes", SWITCHES)
def test_extensions_and_trees_are_the_unrolled_forward(dense, tmp_path, compiled, quickly, changes):
    small = limits(tiny.VOCAB, context=192, pages=24)
    options = JaxOptions(draft_nodes=3, stacked=True, cache_dir=compiled)
    made = JaxExecutor(dense.checkpoint, small, options)
    compare(Twin(dense, tmp_path, changes), made, within(2e-5), JaxEagleModel)


@pytest.mark.slow
def test_served_is_what_the_unrolled_forward_says(target, judge, learned):
    """Text and every step's acceptance, so both are those of the other executors."""
    twin, texts = learned
    prompts = list(texts[:6, :12])
    plain = serve(judge, prompts, "OFF")
    served = serve(target, prompts)
    assert [item.tokens for item in served] == [item.tokens for item in plain]
    expected = np.zeros(4, int)
    for prompt, item in zip(prompts, served, strict=True):
        expected += simulated(twin, np.concatenate([prompt, item.tokens]), len(prompt))
    assert counted(served) == expected.tolist()
    assert expected.min() > 0, expected


SHAPES = [(0.8, 7, 3, 2)] + [(t, n, 3, w) for t in (0.0, 0.8, 1.0) for n, w in ((3, 1), (7, 2))]
"""Temperature, draft tokens, depth, width."""


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_drafts_and_texts_are_those_of_torch(target, judge, seen, learned, shape):  # noqa: F811
    temperature, nodes, depth, width = shape
    prompts = list(learned[1][:3, :12])
    found = []
    for which in (target, judge):
        seen["drafts"] = []
        done = serve(
            which, prompts, "EAGLE", 30, temperature,
            speculative_num_draft_tokens=nodes + 1, speculative_num_steps=depth,
            speculative_eagle_topk=width,
        )  # fmt: skip
        found.append((done, seen["drafts"]))
    (mine, drafts), (others, expected) = found
    assert [item.tokens for item in mine] == [item.tokens for item in others]
    assert sum(item.stats.accepted for item in mine) > 0
    assert counted(mine, depth) == counted(others, depth)
    same(drafts, expected)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 2])
def test_rows_come_go_and_rest(target, judge, learned, monkeypatch, width):
    """Prompts between rounds, rows that the host decides, steps without draft tokens."""
    monkeypatch.setattr(drafting, "FixedPolicy", lambda *_: FixedPolicy(5, 5))
    requests = mixed(learned[1])
    found = answered(target, requests, speculative_eagle_topk=width)
    monkeypatch.undo()
    assert found == answered(judge, requests, speculative_algorithm="OFF")


# --- a target that the last token alone moves ------------------------------------------------


@pytest.fixture(scope="module")
def markov(tmp_path_factory):
    """Its folder, and how to make an EAGLE-1 head that says what it says, times a sign."""
    hf = tiny.model("llama", max_position_embeddings=512, num_hidden_layers=6)
    with torch.no_grad():
        for layer in hf.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        hf.model.norm.weight.fill_(1.0)
    folder = tiny.save_folder(hf, tmp_path_factory.mktemp("markov"))
    dense = Target(FolderCheckpoint(folder))

    def head(sign):
        twin = Twin(dense, tmp_path_factory.mktemp("head"), {"algorithm": "eagle1"})
        with torch.no_grad():
            twin.head.layer.self_attn.o_proj.weight.zero_()
            twin.head.layer.mlp.down_proj.weight.zero_()
            eye = sign * torch.eye(dense.arch.hidden)
            twin.head.fc.weight.copy_(torch.cat([eye, torch.zeros_like(eye)], 1))
        twin.export()
        return twin

    return folder, head


PROMPTS = [np.arange(9, 30, dtype=np.int32), np.arange(60, 65, dtype=np.int32)]
TOKENS, DEPTH = 33, 3


@pytest.mark.parametrize(
    ("sign", "backend"),
    [
        (1, "auto"),
        pytest.param(-1, "auto", marks=pytest.mark.slow),
        pytest.param(1, "pallas", marks=pytest.mark.slow),
    ],
)
def test_a_head_that_is_always_right_or_always_wrong(markov, compiled, quickly, sign, backend):
    """Every draft token accepted, or none; the text is the same. With the Pallas kernel, too."""
    folder, head = markov
    target = on_xla(folder, head(sign), compiled, attention_backend=backend)
    try:
        plain = serve(target, PROMPTS, "OFF", TOKENS)
        served = serve(target, PROMPTS, "EAGLE", TOKENS)
    finally:
        target.close()
    assert [item.tokens for item in served] == [item.tokens for item in plain]
    assert len(set(plain[0].tokens)) > 3
    whole = 1 + -(-(TOKENS - 1) // (DEPTH + 1))
    for item in served:
        assert item.stats.steps == (whole if sign > 0 else TOKENS)
        assert item.stats.accepted == TOKENS - item.stats.steps


def stepped(target, monkeypatch, kinds):
    """Of every step: how many dispatches, and the bytes of each copy to the host."""
    copied, get, programs = [], jax.device_get, target.executor.programs
    monkeypatch.setattr(jax, "device_get", lambda x: copied.append(x.nbytes) or get(x))
    running, found = make_engine(target, target.config), []
    for prompt, kind in zip(PROMPTS, kinds, strict=False):
        request = make_request(prompt, max_tokens=TOKENS, ignore_eos=True, seed=4, **kind)
        running.submit(request, lambda _: None)
    while True:
        before = programs.dispatches, len(copied)
        if not running.step_once():
            running.check()
            return found
        found.append((programs.dispatches - before[0], copied[before[1] :]))


class Excluding(TreeGrammars):
    """Rows that are held exclude one token or another, in turn by depth; none that the target
    says.
    """

    def __init__(self, *given):
        super().__init__(*given)
        self.held = set()

    def open(self, slot, grammar, output):
        self.held.add(slot)

    def close(self, slot):
        self.held.discard(slot)

    def ready(self, slot, grammar):
        return True

    def mask(self, slot):
        return None

    def guide(self, slots, drafts, nodes, depth):
        return drafts

    def masks(self, slots, trees):
        row = np.full(len(trees.tokens), -1, np.int32)
        for b, slot in enumerate(slots.tolist()):
            if slot in self.held:
                row[trees.nodes(b)] = trees.depth[trees.nodes(b)] % 2
        allowed = np.ones((2, tiny.VOCAB), np.uint8)
        allowed[[0, 1], [3, 4]] = 0
        return NodeMasks(row, np.packbits(allowed, axis=1, bitorder="little").view(np.uint32))

    def commit(self, slot, tokens):
        assert not set(tokens) & {3, 4}
        return Committed(len(tokens))


KINDS = {
    "greedy": [{}, {}],
    "plain": [{"temperature": 0.0}, {"temperature": 0.8}],
    "shaped": [{"logit_bias": ((5, -1e-4),), "logprobs": 3}, {"temperature": 0.8, "top_k": 300}],
    "held": [{"grammar": "any"}, {"grammar": "any", "repetition_penalty": 1.0001}],
}
"""Requests; where they are greedy, parameters and masks change no token."""


@pytest.mark.slow
def test_a_drafting_step_is_one_dispatch_and_one_copy(
    markov,
    compiled,
    quickly,
    compilations,  # noqa: F811
    monkeypatch,
):
    """Trees; rows of all kinds, grammars and log-probabilities among them. After start-up nothing
    compiles, and nothing is transferred in secret.
    """
    monkeypatch.setattr(jax_executor, "TIMED_NODES", 0)
    monkeypatch.setattr(engine, "TreeGrammars", Excluding)
    folder, head = markov
    shape = {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 5}
    target = on_xla(
        folder, head(1), compiled, warm=True, speculative_algorithm="EAGLE",
        speculative_num_steps=DEPTH, **shape,
    )  # fmt: skip
    compilations.clear()
    steps = {}
    for name, kinds in KINDS.items():
        with jax.transfer_guard("disallow"):
            dispatches = stepped(target, monkeypatch, kinds)
        monkeypatch.undo()
        monkeypatch.setattr(engine, "TreeGrammars", Excluding)
        steps[name] = len(dispatches)
        line = 1 if name in ("greedy", "plain") else 1 + line_size(tiny.VOCAB)
        # The prompts are extended, and the first trees grown, by passes that the host asks for.
        for count, sizes in dispatches[2:]:
            assert (count, len(sizes)) == (1, 1)
            assert sizes[0] <= 4 * 2 * (5 * line + 3 * full_size(2, DEPTH))
    # The head is always right, under a grammar no less.
    assert steps["held"] == steps["greedy"] < TOKENS / 2
    assert compilations == [] and target.executor.describe()["compiled_late"] == 0
    held = target.executor.programs.state.draft.keys
    moved = re.compile(rf"= f32\[{','.join(map(str, held.shape))}\]\S* copy\(")
    for key in target.executor.programs.compiled:
        assert not moved.search(target.executor.programs.text(key)), key
    target.close()
