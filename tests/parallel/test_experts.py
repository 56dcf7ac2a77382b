"""Expert parallel: ranks that have whole experts write what one process writes, with the shared
expert cut or on every rank; each reads its own experts alone.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from forerun.build.shapes import SHAPES
from forerun.checkpoints.folder import FolderCheckpoint
from forerun.checkpoints.tensor_parallel import RankCheckpoint, TensorParallel, check_divides
from forerun.errors import ConfigError
from forerun.executors.torch.decoder.elementwise import PLAIN
from forerun.executors.torch.decoder.experts import Mixture
from forerun.executors.torch.decoder.layers import Linear
from forerun.executors.torch.decoder.weights import Weights
from tests.covering import every, rarely, values
from tests.models import tiny
from tests.parallel.test_methods import on_ranks, same_texts
from tests.parallel.test_parts import bytes_read
from tests.parity.interpreted import load
from tests.references.kernels import grouped_loop

MODELS = {
    "qwen2_moe": {"num_experts": 4},
    "qwen3_moe": {"num_experts": 8},
    "mixtral": {"num_local_experts": 4},
    "glm4_moe": {},
    "deepseek_v3": {},
    "gpt_oss": {"num_local_experts": 4},
}
"""By family: a shared expert with a gate of its own, none, groups of experts, biases."""

WAYS = {
    "2 by 2": TensorParallel(0, 2, 2),
    "2 by 2, shared whole": TensorParallel(0, 2, 2, True),
    "2 by 1, shared whole": TensorParallel(0, 2, 1, True),
    "4 by 4": TensorParallel(0, 4, 4),
    "4 by 2": TensorParallel(0, 4, 2),
    "4 by 2, shared whole": TensorParallel(0, 4, 2, True),
}
FAST = ("deepseek_v3", "2 by 2, shared whole"), ("gpt_oss", "2 by 2")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    made = {}

    def of(family):
        if family not in made:
            hf = tiny.model(family, **MODELS[family])
            made[family] = FolderCheckpoint(
                tiny.save_folder(hf, tmp_path_factory.mktemp("made") / family)
            )
        return made[family]

    return of


@pytest.mark.parametrize(("family", "way"), rarely(every(MODELS, WAYS), FAST, values))
def test_ranks_with_whole_experts_write_the_same(checkpoint, family, way):
    assert same_texts(checkpoint(family), WAYS[way])["ep_size"] == WAYS[way].experts


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A folder that has one, as the equality matrix makes them."""
    root = tmp_path_factory.mktemp("target")
    tiny.save_folder(tiny.model("glm4_moe", num_hidden_layers=3), root / "target")
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "size", "experts", "whole"),
    [
        ("NGRAM", 2, 2, True),
        ("NGRAM", 4, 4, False),
        ("STANDALONE, itself", 4, 2, True),
        ("STANDALONE, itself", 2, 2, False),
    ],
)
def test_chains_and_trees_of_every_size(target, monkeypatch, method, size, experts, whole):
    shares = {"ep_size": experts, "replicate_shared_expert": whole}
    on_ranks(target, method, monkeypatch, tp_size=size, **shares)


# --- parts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("product", ["each its own", "loop", "kernel"])
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_parts_of_a_mixture_add_up(checkpoint, product, family, groups):
    """Each of four ranks runs its experts, and what it says of the others' is nothing."""
    made = {"loop": grouped_loop, "kernel": load("triton.triton_experts").grouped}
    parts = replace(PLAIN, grouped=made.get(product))
    source = checkpoint(family)

    def mixture(of):
        weights = Weights(of, torch.device("cpu"), torch.float32, Linear)
        about = of.architecture.layer_specs[0]
        prefix = "model.layers.0.mlp"
        return Mixture(weights, prefix, about.feed_forward, parts, about.activation)

    torch.manual_seed(1)
    x = torch.randn(9, source.architecture.hidden)
    ranks = [RankCheckpoint(source, TensorParallel(rank, 4, groups)) for rank in range(4)]
    whole, outputs = mixture(source)(x, ()), [mixture(rank)(x, ()) for rank in ranks]
    torch.testing.assert_close(sum(outputs), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_every_expert_is_somewhere_and_read_there_alone(checkpoint, family, way, monkeypatch):
    whole, first = checkpoint(family), WAYS[way]
    ranks = [RankCheckpoint(whole, replace(first, rank=rank)) for rank in range(first.size)]
    names = [name for name in whole.names() if ".mlp.experts." in name and "weight" in name]
    owners = {name: [rank for rank in ranks if name in rank.names()] for name in names}
    assert {len(mine) for mine in owners.values()} == {first.size // first.experts}
    for name, mine in owners.items():
        axis = 1 if "down_proj" in name else 0
        rows = np.concatenate([rank.tensor(name) for rank in mine], axis)
        np.testing.assert_array_equal(rows, whole.tensor(name))
    seen = bytes_read(monkeypatch)
    bytes_of = {name: whole.packed(name).rows.nbytes for name in names}
    seen.clear()
    for rank in ranks:
        for name in rank.names():
            packed = rank.packed(name) if name in bytes_of else None
            assert packed is None or packed.rows.nbytes == packed.rows.size
    # Gpt-oss stores all experts as one, turned over: views of views.
    assert family == "gpt_oss" or sum(seen) == sum(bytes_of.values())


def test_what_a_rank_has_is_counted_without_a_file():
    """Of GLM-4.5's routed experts each of four ranks has a quarter, however they are divided."""
    arch = SHAPES["glm-4.5"]
    cut = [TensorParallel(rank, 4).parameters(arch) for rank in range(4)]
    divided = [TensorParallel(rank, 4, 4).parameters(arch) for rank in range(4)]
    assert cut == divided
    shared = (
        3
        * arch.hidden
        * 1536
        * sum(hasattr(spec.feed_forward, "shared") for spec in arch.layer_specs)
    )
    whole = TensorParallel(1, 4, 4, True).parameters(arch)
    assert whole - divided[1] == shared - shared // 4


@pytest.mark.parametrize(
    ("tp", "says"),
    [
        (TensorParallel(0, 4, 3), "ep-size is 3, which does not divide tp-size, which is 4; with 4"
         " ranks it can be 1 or 2 or 4."),
        (TensorParallel(0, 12, 6), "ep-size is 6, which does not divide the model's 160 experts; "
         "with 12 ranks it can be 1 or 2 or 4."),
        (TensorParallel(0, 5, 5), "tp-size is 5, but its 96 attention heads do not divide by that;"
         " this model can be shared by 1 or 2 or 4 or 8 or 16 or 32."),
    ],
)  # fmt: skip
def test_what_does_not_divide_says_what_would(tp, says):
    with pytest.raises(ConfigError, match=says):
        check_divides(SHAPES["glm-4.5"], tp)


def test_a_shared_expert_that_cannot_be_cut_may_be_whole(checkpoint, tmp_path):
    odd = tiny.model("qwen2_moe", num_experts=4, shared_expert_intermediate_size=33)
    arch = FolderCheckpoint(tiny.save_folder(odd, tmp_path)).architecture
    with pytest.raises(
        ConfigError, match=r"its 33 columns .* with --replicate-shared-expert every"
    ):
        check_divides(arch, TensorParallel(0, 2, 2))
    check_divides(arch, TensorParallel(0, 2, 2, True))


def test_expert_options_without_experts_are_refused():
    with pytest.raises(ConfigError, match="ep-size is 2, but this model has no experts; leave it"):
        check_divides(SHAPES["llama-3.1-8b"], TensorParallel(0, 2, 2))
