"""The Pallas kernel against its plain twin, alone and in steps, and that it lowers for TPUs."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from forerun.errors import ConfigError
from forerun.executors.jax import JaxExecutor, JaxOptions, attention_choice
from forerun.executors.jax.attention import Layer, Past, Tree, ancestors, attend
from forerun.executors.jax.attention_choice import attention_of
from forerun.executors.jax.pallas_attention import attend_pallas
from forerun.models.layer_spec import AttentionSpec
from forerun.speculative.sampling import Sampling
from forerun.speculative.verify import intervals
from tests.models import tiny
from tests.parity.driver import Driver, Row, as_draft, limits

PARENTS = np.array([-1, 0, 0, 1, 1, 3], np.int32)


def case(heads=4, groups=2, size=16, page=8, rows=3, dtype=np.float32, lengths=(0, 21, 40)):
    """Queries, fresh keys and values, the past and a tree of rows whose prefixes differ."""
    random = np.random.default_rng(0)
    nodes, width, layers = len(PARENTS), 6, 2

    def normal(*shape):
        return jnp.asarray(random.normal(size=shape), dtype)

    table = random.permutation(rows * width).reshape(rows, width).astype(np.int32)
    lengths = np.array(lengths, np.int32)
    table[np.arange(width) * page >= lengths[:, None]] = -1
    slots = rows * width * page + 13  # Scratch behind the pages.
    spans = jnp.asarray(np.repeat(intervals(PARENTS)[:, None], rows, 1))
    depth = np.array([0, 1, 1, 2, 2, 3], np.int32)
    return (
        normal(rows, nodes, heads, size),
        (normal(rows, nodes, groups, size), normal(rows, nodes, groups, size)),
        Past(
            normal(layers, slots, groups, size),
            normal(layers, slots, groups, size),
            jnp.asarray(table),
            jnp.asarray(lengths),
        ),
        Tree(ancestors(spans), jnp.asarray(lengths[:, None] + depth)),
    )


@pytest.mark.parametrize(
    ("number", "spec"),
    [
        (0, AttentionSpec(0.25)),
        (1, AttentionSpec(0.9, window=11, softcap=3.0)),
    ],
)
def test_the_kernel_is_its_twin(number, spec):
    given, how = case(), Layer(number, spec, 8)
    expected = jax.jit(partial(attend, how=how))(*given)
    found = jax.jit(partial(attend_pallas, how=how, interpret=True))(*given)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def test_what_is_not_seen_does_not_matter():
    """Pages that a row does not have, and positions behind its prefix, are poisoned."""
    queries, fresh, past, tree = case()
    how = Layer(0, AttentionSpec(0.25), 8)
    clean = attend_pallas(queries, fresh, past, tree, how, interpret=True)
    kept = {int(page) for page in past.table.ravel() if page >= 0}
    slots = np.ones(past.keys.shape[1], bool)
    for page in kept:
        slots[page * 8 : page * 8 + 8] = False
    spoiled = past.keys.at[:, np.flatnonzero(slots)].set(1e4)
    dirty = attend_pallas(queries, fresh, past._replace(keys=spoiled), tree, how, interpret=True)
    assert (np.asarray(clean) == np.asarray(dirty)).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_it_lowers_for_tpus(dtype):
    """Cross-lowered here: a kernel that Mosaic cannot express fails."""
    given = case(heads=8, groups=8, size=128, page=64, dtype=dtype, lengths=(0, 100, 300))
    run = jax.jit(partial(attend_pallas, how=Layer(0, AttentionSpec(0.1, window=70), 64)))
    chip = AbstractDevice("TPU v5e", 1, "tpu")
    with use_abstract_mesh(AbstractMesh((1,), ("chip",), abstract_device=chip)):
        exported = jax.export.export(run, platforms=["tpu"])(*given)
    assert exported.platforms == ("tpu",)
    assert "tpu_custom_call" in exported.mlir_module()


@pytest.mark.slow
def test_steps_with_the_kernel_say_what_steps_without_it_say(
    checkpoint, compiled, quickly, monkeypatch, caplog
):
    """Chunks, then trees that are now and then right, two rows at a time."""
    traced, kernel = [], attention_choice.attend_pallas

    def counted(*given, **how):
        traced.append(how["interpret"])
        return kernel(*given, **how)

    monkeypatch.setattr(attention_choice, "attend_pallas", counted)
    small = limits(tiny.VOCAB, context=64, page_size=8, pages=17, slots=2, max_nodes=32)
    said = {}
    for backend in ("jnp", "pallas"):
        options = JaxOptions(draft_nodes=3, stacked=True, cache_dir=compiled, attention=backend)
        made = JaxExecutor(checkpoint("qwen3"), small, options)
        assert made.describe()["attention"] == backend
        with Driver(made) as driver:
            driver.open(0, list(range(20, 41)), Sampling(temperature=0.8, seed=5))
            driver.open(1, list(range(60, 64)), Sampling(temperature=0.0))
            driver.step([Row(0, 17), Row(1, 3)])
            brought = 0
            for _ in range(10):
                known = [driver.sequences[slot].tokens for slot in (0, 1)]
                right = [said["jnp"][slot][len(known[slot]) :] if said else [9] for slot in (0, 1)]
                trees = [as_draft([7, *(line[:1] or [8]), 7], [-1, -1, 1]) for line in right]
                rows = [Row(slot, draft=trees[slot]) for slot in (0, 1)]
                first = len(known[0]) - driver.sequences[0].kv_len > 1
                result = driver.step([Row(0), Row(1)] if first else rows)
                brought += int(result.outcome.n_tokens.sum())
            found = [driver.sequences[slot].tokens for slot in (0, 1)]
        if said:
            assert [a[: len(b)] for a, b in zip(found, said["jnp"], strict=True)] == said["jnp"]
            assert brought > 25
        said[backend] = found
    assert traced and all(traced)
    assert "interpreted" in caplog.text


def test_where_there_is_no_such_kernel():
    def devices(platform):
        return SimpleNamespace(
            mesh=SimpleNamespace(devices=np.array([SimpleNamespace(platform=platform)]))
        )

    with pytest.raises(ConfigError, match="'fa'; on jax it must be one of auto, jnp, pallas"):
        attention_of("fa", devices("cpu"))
    with pytest.raises(ConfigError, match="written for TPUs, but the device is a gpu"):
        attention_of("pallas", devices("gpu"))
    assert attention_of("auto", devices("tpu")) is attend
