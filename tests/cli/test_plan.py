"""`forerun plan`: what a model would need, without a weight being read."""

import json
import re
from pathlib import Path

import pytest

from forerun.build import device, registry, small_draft
from forerun.build.memory import human
from forerun.build.shapes import SHAPES
from forerun.checkpoints.tensor_parallel import TensorParallel
from forerun.cli.main import main
from forerun.hub.catalog import open_model
from tests.drafters.kinds import Kinds
from tests.models import tiny
from tests.shape.tree import ROOT

DRAFT = ("--speculative-draft-model-path",)


def planned(capsys, *words, code=0):
    assert main(["plan", *words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


CARD = ("--device", "cuda", "--device-memory", "96")


def test_a_shape_on_two_devices(capsys):
    """No device is there, and torch does not look for one."""
    plan = planned(capsys, "llama-3-70b", "--tp-size", "2", *CARD)
    arch = SHAPES["llama-3-70b"]
    assert plan["devices"] == 2 and plan["fits"] and not plan["weights_from_files"]
    half = TensorParallel(0, 2).parameters(arch) * 2
    assert abs(plan["weights_bytes"] - half) < 1e-3 * half
    assert plan["cache_bytes_per_1k_tokens"] == 1000 * 80 * 2 * 4 * 128 * 2
    used = sum(plan[f"{part}_bytes"] for part in ("weights", "scratch", "graph", "cache"))
    assert (
        plan["graph_bytes"] > 0
        and used <= 0.88 * 96 * 2**30 < used + 2 * plan["cache_bytes_per_1k_tokens"]
    )


def test_a_gpu_elsewhere_is_planned_for_without_torch(capsys, monkeypatch):
    for module in (registry, device):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    plan = planned(capsys, "llama-3-70b", "--tp-size", "2", *CARD)
    assert plan["executor"] == "torch"


def test_the_seeds_models_have_the_room_that_the_docs_say(capsys):
    page = (ROOT / "docs" / "use" / "scaling.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\|[^|]*\| (as above|`[^|]*`) \|.* ([\d,]+) tokens \|$", page, re.M)
    assert len(rows) == 4
    assert f"names: {', '.join(list(SHAPES)[2:])}." in " ".join(page.split())
    above = re.search(r"^ +forerun plan (llama-3-70b .*)$", page, re.M).group(1)
    for words, room in rows:
        line = above if words == "as above" else words.strip("`")
        plan = planned(capsys, *line.split())
        assert f"{plan['cache_tokens']:,}" == room, line
        assert plan["device"] == "cuda"


def test_jax_counts_its_devices_together(capsys):
    """A model that one of them has no room for is divided over four."""
    words = ("llama-3.1-8b", "--executor", "jax", "--device", "tpu")
    words += ("--device-memory", "16", "--tp-size", "4")
    plan = planned(capsys, *words)
    assert plan["fits"] and plan["memory_bytes"] == 4 * 16 << 30
    assert main(["plan", *words]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "68.7 GB on 4 devices together" in printed and "on each of" not in printed


def test_memory_of_a_device_is_a_gpus_unless_another_is_named(capsys):
    words = ("tiny", "--device-memory", "8")
    assert planned(capsys, *words)["device"] == "cuda"
    assert planned(capsys, *words, "--device", "cpu")["device"] == "cpu"
    assert planned(capsys, *words, "--executor", "cpu")["device"] == "cpu"


def test_keys_and_values_in_blocks_are_counted(capsys):
    words = ("tiny", "--device-memory", "8")
    plans = [planned(capsys, *words, "--kv-dtype", kind) for kind in ("q8_0", "same")]
    assert [each["device"] for each in plans] == ["cpu", "cuda"]
    arch = SHAPES["tiny"]
    heads = 2 * arch.layers * arch.kv_heads
    row = arch.head_size + 2 * -(-arch.head_size // 32)
    assert plans[0]["cache_bytes_per_1k_tokens"] == 1000 * heads * row
    assert main(["plan", *words, "--kv-dtype", "q8_0"]) == 0
    assert "for 1,000 tokens in q8_0" in capsys.readouterr().out


def test_recurrent_states_are_counted(capsys, tmp_path):
    """Of a configuration alone, with Qwen3-Next's own heads."""
    heads = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    heads |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(tiny.config("qwen3_next", **heads).to_dict()))
    words = ["--model", str(tmp_path), "--max-sequences", "4", "--executor"]
    core = planned(capsys, *words, "cpu")
    words.append("torch")
    plan = planned(capsys, *words, "--device", "cpu", "--dtype", "float32")
    for counted in ("checkpoints", "state_bytes"):
        assert core[counted] == plan[counted]
    state = 4 * 3 * (32 * 128 * 128 + 3 * 8192)
    assert (plan["checkpoints"], plan["state_bytes"]) == (8, 12 * state)
    assert plan["cache_bytes_per_1k_tokens"] == 1000 * 4 * 2 * 2 * 16, "one layer of four attends"
    assert main(["plan", *words, "--device", "cpu", "--dtype", "float32"]) == 0
    assert f"{human(state)} for each of 4 sequences, and 8 checkpoints" in " ".join(
        capsys.readouterr().out.split()
    )


GEMMA = {"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "head_dim": 256}
GEMMA |= {"num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 262144}
GEMMA |= {"sliding_window": 512, "max_position_embeddings": 32768, "layer_types": None}
"""Gemma 3 270M: three layers of 18 see everything."""


def test_windows_take_what_they_see(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny.config("gemma3_text", **GEMMA).to_dict()))
    words = ["--model", str(tmp_path), "--dtype", "q8_0", "--device-memory", "16"]
    whole, near = 3 * 2 * 256 * 2, 15 * 2 * 256 * 2
    each = -(-(513 + 64) // 16) + 3
    for sequences, windows in ((1, 8 * each), (9, 9 * each), (64, 1024)):
        plan = planned(capsys, *words, "--max-sequences", str(sequences))
        stored = "--kv-store", str(tmp_path / "kv"), "--max-sequences", str(sequences)
        assert plan == planned(capsys, *words, *stored)
        assert plan["cache_tokens"] == 32768 and plan["context"] == 32768
        assert plan["window_bytes"] == (windows + 32) * 16 * near
        assert plan["cache_bytes"] == 32768 * whole + plan["window_bytes"]
        assert plan["cache_bytes_per_1k_tokens"] == 1000 * whole
    assert main(["plan", *words, "--max-sequences", "1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "86.5 MB of the cache, for the last 513 tokens of each sequence" in said


def test_windows_leave_a_device_to_many_sequences(capsys, tmp_path):
    """With little memory a device has windows for many sequences, and more tokens than without."""
    sizes = GEMMA | {"vocab_size": 4096, "max_position_embeddings": 131072}
    (tmp_path / "config.json").write_text(json.dumps(tiny.config("gemma3_text", **sizes).to_dict()))
    words = ["--model", str(tmp_path), "--device", "cuda", "--device-memory", "1.2"]
    words += ["--dtype", "float32", "--chunked-prefill-size", "512"]
    each = -(-(513 + 64) // 16) + 3
    for sequences, windows in ((2, 2), (64, 16)):
        plan = planned(capsys, *words, "--max-sequences", str(sequences))
        assert plan["window_bytes"] == (windows * each + 32) * 16 * 15 * 2 * 256 * 4
        kept = plan["cache_bytes"] // (18 * 2 * 256 * 4)  # Tokens, if every page were.
        assert plan["cache_tokens"] > kept > 16 * 513


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_windows_take_as_much_in_torch(capsys, tmp_path, device):
    """On one device and on several, and in JAX."""
    (tmp_path / "config.json").write_text(json.dumps(tiny.config("gemma3_text", **GEMMA).to_dict()))
    words = ["--model", str(tmp_path), "--device-memory", "16", "--executor", "torch"]
    words += ["--device", device, "--dtype", "float32", "--max-sequences", "4"]
    words += ["--kv-tokens", "32768", "--chunked-prefill-size", "512"]
    near, each = 15 * 2 * 256 * 4, -(-(513 + 64) // 16) + 3
    for size in ("1", "2"):  # The only key/value head is on every rank.
        plan = planned(capsys, *words, "--tp-size", size)
        assert plan["window_bytes"] == (8 * each + 32) * 16 * near
    jax = planned(capsys, *words, "--executor", "jax", "--device", "cpu")
    assert jax["window_bytes"] == (8 * each + 32) * 16 * near


def test_windows_leave_memory_for_longer_contexts(capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny.config("gemma3_text", **GEMMA).to_dict()))
    words = ["--model", str(tmp_path), "--dtype", "q8_0", "--device-memory", "1.3"]
    plan = planned(capsys, *words)
    kept = plan["cache_bytes"] // (18 * 2 * 256 * 2)  # Tokens, if every page were.
    assert plan["cache_tokens"] == 32768 > 2 * kept


def test_the_targets_own_layers_are_counted(capsys, tmp_path):
    folder = Kinds(tmp_path)["NEXTN of, qwen3_5_text"].model
    words = ["--model", str(folder), "--executor", "cpu"]
    assert planned(capsys, *words)["draft_bytes"] > 0
    assert planned(capsys, *words, "--speculative-algorithm", "OFF")["draft_bytes"] == 0


def test_why_the_core_is_not_planned_with_is_a_sentence(capsys, tmp_path):
    odd = tiny.config("qwen3", head_dim=12).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(odd))
    assert main(["plan", "--model", str(tmp_path), "--device", "cpu"]) == 0
    assert capsys.readouterr().err.startswith("forerun: The compiled core is not used (")


def test_memory_of_captured_rounds_is_reported(capsys):
    words = ("llama-3.1-8b", *CARD)
    captured, eager = planned(capsys, *words), planned(capsys, *words, "--disable-cuda-graph")
    arch = SHAPES["llama-3.1-8b"]
    assert eager["graph_bytes"] == 0
    assert captured["graph_bytes"] == 512 * 4 * (4 * arch.hidden + 3 * arch.ffn + arch.vocab)
    room = 0.88 * 96 * 2**30
    for plan in (captured, eager):
        parts = ("weights_bytes", "scratch_bytes", "graph_bytes", "cache_bytes")
        assert sum(plan[part] for part in parts) <= room


def test_what_does_not_fit_says_so_behind_its_table(capsys):
    assert main(["plan", "glm-4.5", "--tp-size", "4", *CARD]) == 4
    printed = capsys.readouterr()
    assert "352.80B parameters" in printed.out
    assert "does not fit" in printed.err


@pytest.mark.parametrize(
    "words",
    [["~no-such-user/m"], ["smollm2-135m", "--speculative-draft-model-path", "~no-such-user/m"]],
)
def test_the_home_of_an_unknown_user_is_a_sentence(words, capsys):
    assert main(["plan", *words]) == 2
    assert "home of a user that this machine does not know" in capsys.readouterr().err


def test_float8_takes_one_byte_but_for_embedding_and_head(capsys):
    arch = SHAPES["llama-3.1-8b"]
    plan = planned(capsys, "llama-3.1-8b", "--dtype", "float8", *CARD)
    embedding = 2 * arch.vocab * arch.hidden
    assert plan["weights_bytes"] == arch.parameters + embedding


def test_parameters_are_the_published_ones():
    sizes = {"llama-3-70b": 70.6, "glm-4.5": 353, "deepseek-v3": 671, "qwen3-32b": 32.8}
    for name, billions in sizes.items():
        assert SHAPES[name].parameters == pytest.approx(billions * 1e9, rel=0.01), name


def test_a_folder_of_which_only_the_configuration_is_there(capsys, tmp_path):
    tiny.config("llama").save_pretrained(tmp_path)
    plan = planned(capsys, str(tmp_path), *CARD)
    assert plan["model"] == tmp_path.name
    assert plan["weights_bytes"] == 2 * plan["parameters"]


def test_a_folder_with_its_weights(capsys, tmp_path):
    tiny.save_folder(tiny.model("llama"), tmp_path)
    assert planned(capsys, str(tmp_path), "--executor", "torch")["weights_from_files"]


@pytest.mark.parametrize(
    "words, said",
    [
        (("nope",), "there is no model 'nope'"),
        (("llama-3-70b", "--tp-size", "3", *CARD), "shared by 1 or 2 or 4"),
        (("tiny", "--device-memory", "0"), "--device-memory is 0"),
        (("tiny", "--device-memory", "nan"), "--device-memory is nan"),
        (("tiny", "--device-memory", "1e308"), "--device-memory is 1e+308"),
        (("tiny", "--device-memory", "inf"), "--device-memory is inf"),
        (("tiny", *DRAFT, "/no/such", *CARD), "there is no config.json in it"),
        (("tiny", *DRAFT, "/no/such.gguf", *CARD), "no file or folder /no/such.gguf"),
        (("/no/such/folder",), "no file or folder"),
    ],
)
def test_what_cannot_be_planned_is_said_in_a_sentence(capsys, words, said):
    assert main(["plan", *words]) in (2, 3)
    assert said in capsys.readouterr().err


def test_a_whole_model_that_drafts_is_counted_from_its_configuration(capsys, tmp_path):
    tiny.config("llama").save_pretrained(tmp_path)
    words = ("tiny", "--speculative-algorithm", "STANDALONE", *DRAFT)
    plan = planned(capsys, *words, str(tmp_path), *CARD)
    alone = planned(capsys, "tiny", *CARD)
    small = planned(capsys, str(tmp_path), *CARD)
    assert plan["draft_bytes"] == small["weights_bytes"]
    assert plan["weights_bytes"] == alone["weights_bytes"]
    each = small["cache_bytes_per_1k_tokens"] + alone["cache_bytes_per_1k_tokens"]
    assert plan["cache_bytes_per_1k_tokens"] == each
    tiny.save_folder(tiny.model("llama"), tmp_path)  # Of AUTO the tensors say it.
    auto = planned(capsys, "tiny", *DRAFT, str(tmp_path), *CARD)
    assert auto["draft_bytes"] == plan["draft_bytes"]


@pytest.mark.model
def test_a_draft_in_a_file_or_built_in_is_counted_as_it_runs(capsys, monkeypatch):
    """Named in any way, and where AUTO takes the built-in one unasked."""
    target = "smollm2-135m"
    alone, file = planned(capsys, target), str(Path(open_model(target).checkpoint.path))
    for words in (("--speculative-algorithm", "STANDALONE", *DRAFT, target), (*DRAFT, file)):
        plan = planned(capsys, target, *words)
        bytes_at_most = alone["parameters"] * 34 / 32
        assert plan["draft_bytes"] == pytest.approx(bytes_at_most, rel=0.01)
    assert alone["draft_bytes"] == 0
    monkeypatch.setattr(small_draft, "RATIO", 0.5)
    assert planned(capsys, target)["draft_bytes"] == plan["draft_bytes"]
    assert planned(capsys, target, *DRAFT, "none")["draft_bytes"] == 0
