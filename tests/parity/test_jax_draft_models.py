"""NEXTN and STANDALONE on XLA, inside of rounds: exact counts where the outcome is known, torch's
texts, draft tokens and acceptance everywhere else.
"""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import forerun.executors.jax as on_jax
from forerun.build import with_jax
from forerun.build.engine import open_target
from forerun.drafters import model_drafter
from forerun.errors import ModelError
from forerun.executors.jax import JaxExecutor, JaxOptions, drafting, level_model
from forerun.options.config import EngineConfig
from tests.drafters.served import answered, asked
from tests.drafters.test_nextn import certain, hf, layer, with_layers  # noqa: F401 - fixtures
from tests.models import tiny
from tests.parity.driver import first_is_fast
from tests.parity.test_jax_eagle_model import stepped
from tests.parity.test_torch_drafting import same, seen  # noqa: F401 - a fixture

TOKENS, DEPTH = 21, 3
PROMPTS = [np.random.default_rng(n).integers(3, 300, 9 + 21 * n).astype(np.int32) for n in range(2)]
SHAPES = {"chain": (4, 1, DEPTH), "tree": (11, 2, DEPTH), "two levels": (7, 2, 2)}
"""Draft tokens and one, width, depth. Nothing that was grown is cut off. A third level grows below
the best two of four nodes, which need not be below the best child of the best one; where there are
two levels, every node of the first is expanded.
"""


@pytest.fixture(scope="module")
def folders(hf, layer, certain, tmp_path_factory):  # noqa: F811
    """Targets of NEXTN and STANDALONE, their drafts, and what is always wrong."""
    root = tmp_path_factory.mktemp("models")
    small = tiny.model("llama", num_hidden_layers=1)
    small.load_state_dict(hf.state_dict(), strict=False)
    random = with_layers(hf, [layer], root / "random", "mimo")
    target = tiny.save_folder(hf, root / "target")
    return {
        "right layer": (certain, None),
        "wrong layer": (_negated(certain, root, "shared_head.norm.weight"), None),
        "random layer": (random, None),
        "two layers": (with_layers(hf, [layer] * 2, root / "two", "mimo"), None),
        "itself": (target, target),
        "its opposite": (target, _negated(target, root, "model.norm.weight")),
        "first layer": (target, tiny.save_folder(small, root / "small")),
    }


def _negated(folder, root, name):
    """A copy whose final norm has the other sign: the likeliest is the least likely."""
    made = root / f"not {folder.name}"
    made.mkdir()
    for file in folder.iterdir():
        (made / file.name).write_bytes(file.read_bytes())
    tensors = load_file(made / "model.safetensors")
    (key,) = (key for key in tensors if key.endswith(name))
    tensors[key] = -tensors[key]
    save_file(tensors, made / "model.safetensors")
    return made


def settings(folders, which, executor, **changes):
    target, draft = folders[which]
    chosen = {
        "model": str(target),
        "executor": executor,
        "dtype": "float32",
        "policy": "fixed",
        "speculative_algorithm": "NEXTN" if draft is None else "STANDALONE",
        "speculative_draft_model_path": str(draft) if draft is not None else None,
        "speculative_num_steps": DEPTH,
        "speculative_num_draft_tokens": SHAPES["tree"][0],
        "speculative_eagle_topk": SHAPES["tree"][1],
        "max_sequences": 2,
        "chunked_prefill_size": 40,
        "context": 96,
        "kv_tokens": 256,
        "page_size": 8,
        "draft_on_error": "stop",
    }
    return EngineConfig(**chosen | changes)


@pytest.fixture(scope="module")
def opened(folders, compiled, quickly):
    """A target of a kind on an executor; its layers in a scan, which compiles sooner."""
    kept = {}

    def build(which, executor="jax", warm=False, **changes):
        key = which, executor, warm, *changes.items()
        if key not in kept:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(with_jax, "cache_dir", lambda: Path(compiled))
                patch.setattr(on_jax, "JaxOptions", partial(JaxOptions, stacked=True))
                if not warm:
                    patch.setattr(JaxExecutor, "warm_up", lambda *_: None)
                kept[key] = open_target(settings(folders, which, executor, **changes))
        return kept[key]

    yield build
    for target in kept.values():
        target.close()


def served(target, temperature=0.0, shape="chain", plain=False):
    nodes, width, depth = SHAPES[shape]
    config = replace(
        target.config,
        speculative_algorithm="OFF" if plain else target.config.speculative_algorithm,
        speculative_num_draft_tokens=nodes,
        speculative_num_steps=depth,
        speculative_eagle_topk=width,
    )
    return answered(target, config, asked(PROMPTS, TOKENS, temperature, 5))[0]


def texts(done):
    return [item.tokens for item in done]


def acceptance(done):
    """Steps by accepted draft tokens, of every request."""
    return [item.stats.histogram for item in done]


@pytest.fixture
def all_candidates(monkeypatch):
    """Noise is looked at for every token: tiny models' distributions are flat."""
    for module in (model_drafter, drafting, level_model):
        monkeypatch.setattr(module, "CANDIDATES", tiny.VOCAB)


@pytest.mark.parametrize("temperature", first_is_fast([0.0, 0.8, 1.0]))
@pytest.mark.parametrize("shape", first_is_fast(["chain", "two levels"]))
@pytest.mark.parametrize("which", first_is_fast(["itself", "right layer"]))
def test_a_draft_that_says_what_the_target_says_is_accepted_whole(
    opened, all_candidates, which, shape, temperature
):
    target = opened(which)
    plain = served(target, temperature, plain=True)
    done = served(target, temperature, shape)
    assert texts(done) == texts(plain)
    _, width, depth = SHAPES[shape]
    # The prompt's, then all of the path accepted and one more each.
    steps = 1 + -(-(TOKENS - 1) // (depth + 1))
    for item in done:
        assert (item.stats.steps, item.stats.accepted) == (steps, TOKENS - steps)
        assert width > 1 or item.stats.draft_tokens == item.stats.accepted


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("which", ["its opposite", "wrong layer"])
def test_an_adversary_is_never_accepted_and_changes_nothing(opened, which, shape):
    target = opened(which)
    done = served(target, 0.0, shape)
    assert texts(done) == texts(served(target, 0.0, plain=True))
    for item in done:
        assert (item.stats.accepted, item.stats.steps) == (0, TOKENS)
        assert item.stats.draft_tokens > TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("which", ["random layer", "first layer"])
def test_texts_draft_tokens_and_acceptance_are_torchs(opened, seen, which, shape, temperature):  # noqa: F811
    found = []
    for executor in ("jax", "torch"):
        seen["drafts"] = []
        found.append((served(opened(which, executor), temperature, shape), seen["drafts"]))
    (mine, drafts), (others, expected) = found
    assert texts(mine) == texts(others)
    assert acceptance(mine) == acceptance(others)
    # Without the noise that it shares with its target a random layer is never right.
    by_chance = which == "random layer" and temperature == 0
    assert by_chance or sum(item.stats.accepted for item in mine) > 0
    same(drafts, expected)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["right layer", "itself"])
def test_a_drafting_step_is_one_dispatch_and_one_copy(opened, which, monkeypatch):
    target = opened(which)
    steps = stepped(target, monkeypatch, [{"temperature": 0.0}, {"temperature": 0.0}])
    drafting = steps[3:-1]  # The last may have room for no draft token.
    assert all((count, len(sizes)) == (1, 1) for count, sizes in drafting), steps
    assert 5 < len(steps) < 16


@pytest.mark.slow
def test_all_programs_are_made_at_start_up(opened):
    """Trees of a whole model, at two temperatures; a token map is read in another test."""
    target = opened("first layer", warm=True)
    for temperature in (0.0, 0.8):
        served(target, temperature, "tree")
    assert target.executor.describe()["compiled_late"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("which", ["right layer", "itself"])
def test_a_token_map_limits_what_is_proposed(opened, tmp_path, which):
    plain = served(opened(which), plain=True)
    said = sorted({token for item in plain for token in item.tokens})[::2]
    (tmp_path / "map.json").write_text(str(said))
    target = opened(which, speculative_token_map=str(tmp_path / "map.json"))
    assert target.draft_model.traits.target_ids.tolist() == said
    done = served(target)
    assert texts(done) == texts(plain)
    accepted, drafted = (
        sum(getattr(item.stats, name) for item in done) for name in ("accepted", "draft_tokens")
    )
    assert 0 < accepted < drafted


def test_layers_for_several_depths_are_refused_in_words(opened):
    """The first alone is read where drafts are one token deep."""
    with pytest.raises(ModelError, match=r"2 prediction layers.*drafts with one: use --spec"):
        opened("two layers")
    shape = {"speculative_num_steps": 1, "speculative_num_draft_tokens": 2}
    shape["speculative_eagle_topk"] = 1
    assert opened("two layers", **shape).draft_model.describe()["layers"] == 1
