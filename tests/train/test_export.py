"""Export -> our loader -> the same head, in every dialect; bad drafts are refused by name."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from forerun.drafts.eagle_config import expected_draft_tensors, head_for
from forerun.drafts.eagle_folder import open_draft
from forerun.errors import ModelError
from forerun.executors.torch.drafts.eagle import EagleHead
from forerun.networks.arch import Architecture, plain_layers
from forerun.networks.rope import Llama3, Rope
from forerun.train.presets import TrainConfig
from forerun.train.student import check_target
from tests.train.exports import export_like
from tests.train.test_unrolled import SWITCHES

TARGET = Architecture(
    family="llama",
    hidden=16,
    heads=4,
    kv_heads=2,
    head_size=8,
    vocab=30,
    context=64,
    norm_eps=1e-5,
    layer_specs=plain_layers(8, 8, 24, Rope(5000.0, Llama3(8.0, 1.0, 4.0, 32))),
    tied_head=True,
)
IDS = np.array([0, 2, 3, 5, 7, 11, 13, 17, 19, 29], np.int32)


def trained(seed=3, **changes) -> EagleHead:
    torch.manual_seed(seed)
    head = EagleHead(replace(head_for(TARGET, len(IDS)), **changes))
    for parameter in head.parameters():
        parameter.data.normal_().copy_(parameter.data.bfloat16())
    return head


@pytest.mark.parametrize("dialect", ["sglang", "speculators"])
@pytest.mark.parametrize("changes", SWITCHES[:-1])
@pytest.mark.parametrize("full", [False, True])
def test_round_trip_to_the_bit(tmp_path, dialect, changes, full):
    head = trained(**changes)
    export_like(head, IDS, tmp_path, dialect, full)
    draft = open_draft(tmp_path, TARGET)
    assert draft.head == replace(head.head, trained_head=full)
    assert draft.target_ids.tolist() == IDS.tolist()
    own = dict(head.named_parameters())
    for name in expected_draft_tensors(draft.head):
        if name != "d2t":
            assert np.array_equal(draft.tensor(name), own[name].detach().numpy()), name


def test_community_head_named_like_a_plain_model_loads(tmp_path):
    """EAGLE's own files: LlamaForCausalLM, no feature ids, an embedding beside the head."""
    head = trained()
    export_like(head, IDS, tmp_path, full=True)
    config = json.loads((tmp_path / "config.json").read_text())
    for key in ("eagle_config", "num_aux_hidden_states", "fc_norm", "norm_output"):
        del config[key]
    config["architectures"] = ["LlamaForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embed_tokens.weight"] = torch.zeros(30, 16)
    save_file({f"model.{n}": t for n, t in tensors.items()}, tmp_path / "model.safetensors")
    draft = open_draft(tmp_path, TARGET)
    assert draft.head.features == (2, 4, 5)
    assert draft.head.algorithm == "eagle3"


@pytest.mark.parametrize("bias", [False, True])
def test_eagle1_is_known_by_its_tensors(tmp_path, bias):
    """They are those of EAGLE's repository; a bias that says nothing is there in any case."""
    head = trained(algorithm="eagle1", features=(8,), vocab=30, fc_bias=bias)
    export_like(head, np.arange(30, dtype=np.int32), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle", "LlamaForCausalLM"]
    assert config["num_hidden_layers"] == 1 and config["bias"] and "eagle_config" not in config
    stored = load_file(tmp_path / "model.safetensors")
    layer = [f"self_attn.{each}_proj" for each in "qkvo"]
    layer += [f"mlp.{each}_proj" for each in ("gate", "up", "down")]
    layer = [f"layers.0.{each}.weight" for each in (*layer, "post_attention_layernorm")]
    assert sorted(stored) == sorted(["fc.weight", "fc.bias", *layer])
    draft, own = open_draft(tmp_path, TARGET), dict(head.named_parameters())
    assert draft.head == replace(head.head, fc_bias=True, trained_head=False)
    for name in stored:
        wanted = own[name].detach().numpy() if name in own else np.zeros(16)
        assert np.array_equal(draft.tensor(name), wanted), name


@pytest.fixture
def good(tmp_path):
    export_like(trained(), IDS, tmp_path / "good", full=True)
    return tmp_path / "good"


def spoil(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def set_offsets(*values):
    def change(tensors):
        for index, value in values:
            tensors["d2t"][index] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("norm.weight"), "missing norm.weight"),
        (lambda t: t.update(extra=torch.zeros(2)), "unexpected extra"),
        (lambda t: t.update({"norm.weight": torch.zeros(17)}), r"norm.weight is \[17\]"),
        (lambda t: t["fc.weight"].fill_(float("nan")), "fc.weight holds NaN"),
        (set_offsets((9, 25)), "leads to target id 34, outside"),
        (set_offsets((0, -1)), "leads to target id -1, outside"),
        (set_offsets((1, 4)), "two draft ids to one target id"),
        (lambda t: t.update(d2t=torch.zeros(4, dtype=torch.int64)), r"d2t is \[4\], not \[10\]"),
        (lambda t: t.update(d2t=torch.zeros(10)), "stored as F32; it must be I64"),
        (set_offsets((0, -(2**62))), "outside 0..29"),
        (lambda t: t.pop("midlayer.self_attn.k_proj.weight"), "k_proj.weight is missing"),
    ],
)
def test_bad_drafts_are_refused_by_name(good, change, message):
    spoil(good, change)
    with pytest.raises(ModelError, match=message):
        open_draft(good, TARGET)


def test_truncated_drafts_and_pickles_of_other_names(good, tmp_path):
    data = (good / "model.safetensors").read_bytes()
    (good / "model.safetensors").write_bytes(data[:-7])
    with pytest.raises(ModelError, match="damaged"):
        open_draft(good, TARGET)
    (good / "model.safetensors").rename(good / "draft.pt")
    with pytest.raises(ModelError, match=r"draft\.pt is a pickle, and only pytorch_model\.bin"):
        open_draft(good, TARGET)


@pytest.mark.parametrize("dialect", ["sglang", "speculators"])
def test_a_pickled_head_is_the_same_head(tmp_path, dialect, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    export_like(trained(), IDS, tmp_path / "head", dialect)
    kept = open_draft(tmp_path / "head", TARGET)
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    (tmp_path / "head" / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "head" / "pytorch_model.bin")
    opened = open_draft(tmp_path / "head", TARGET)
    assert opened.head == kept.head and np.array_equal(opened.target_ids, kept.target_ids)
    for name in expected_draft_tensors(opened.head):
        if name != "d2t":
            assert np.array_equal(opened.tensor(name), kept.tensor(name))


@pytest.mark.parametrize("config", [None, "", '{"hidden_size": 16', "[1]", "\x00"])
def test_a_damaged_configuration_is_named(good, config):
    (good / "config.json").unlink()
    if config is not None:
        (good / "config.json").write_text(config)
    with pytest.raises(ModelError, match=r"config\.json"):
        open_draft(good, TARGET)


def renamed(folder, names):
    tensors = load_file(folder / "model.safetensors")
    save_file({names.get(n, n): t for n, t in tensors.items()}, folder / "model.safetensors")


def reconfigured(folder, *without, **changes):
    config = json.loads((folder / "config.json").read_text()) | changes
    for key in without:
        config.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))


def test_angelslims_words(good):
    reconfigured(good, architectures=["Eagle3LlamaForCausalLM"], target_model_type="llama")
    assert open_draft(good, TARGET).head == replace(trained().head, trained_head=True)


def test_older_words_of_vllm_and_specforge(tmp_path):
    """Norms per feature under their first names, the map under vLLM's."""
    head = trained(feature_norm="each")
    export_like(head, IDS, tmp_path, full=True)
    places = ("low", "mid", "high")
    names = {f"fc_norm.{i}.weight": f"aux_norm_{place}.weight" for i, place in enumerate(places)}
    renamed(tmp_path, names | {"d2t": "draft_id_to_target_id"})
    reconfigured(tmp_path, "fc_norm", use_aux_norm=True)
    draft = open_draft(tmp_path, TARGET)
    assert draft.head == replace(head.head, trained_head=True)
    assert draft.target_ids.tolist() == IDS.tolist()


def test_lenient_acceptance_is_not_followed(tmp_path):
    """What speculators' files may ask of a server would change texts: it is said, never done."""
    export_like(trained(), IDS, tmp_path, "speculators")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    (method,) = config["speculators_config"]["proposal_methods"]
    assert not [each for each in open_draft(tmp_path, TARGET).warnings if "followed" in each]
    method.update(verifier_accept_k=2, accept_tolerance=0.1)
    path.write_text(json.dumps(config))
    warned = [each for each in open_draft(tmp_path, TARGET).warnings if "is not followed" in each]
    assert [each.split()[0] for each in warned] == ["verifier_accept_k", "accept_tolerance"]
    method.update(accept_tolerance="much")
    path.write_text(json.dumps(config))
    with pytest.raises(ModelError, match="accept_tolerance is 'much'; it must be a real number"):
        open_draft(tmp_path, TARGET)


def test_what_speculators_leave_out_means_true(tmp_path):
    export_like(trained(normed_residual=True), IDS, tmp_path, "speculators")
    reconfigured(tmp_path, "norm_before_residual")
    draft = open_draft(tmp_path, TARGET)
    assert draft.head.normed_residual
    assert any("norm_before_residual is not set" in warning for warning in draft.warnings)
    export_like(trained(), IDS, tmp_path, "sglang")
    assert not open_draft(tmp_path, TARGET).head.normed_residual


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab": 31}, "another tokenizer"),
        ({"hidden": 32, "heads": 4}, "width 16, the target's are 32"),
        ({"layer_specs": TARGET.layer_specs[:4]}, "lie beyond"),
    ],
)
def test_draft_for_another_target(good, changes, message):
    with pytest.raises(ModelError, match=message):
        open_draft(good, replace(TARGET, **changes))


def test_the_last_layer_that_only_a_trainer_reads_is_left_out(tmp_path):
    """speculators #1065: of four layers the last is the trainer's own; vLLM cannot load it."""
    export_like(trained(), IDS, tmp_path, "speculators")
    named = list(trained().head.features)
    reconfigured(tmp_path, eagle_aux_hidden_state_layer_ids=[*named, TARGET.layers - 1])
    assert open_draft(tmp_path, TARGET).head.features == tuple(named)
    reconfigured(tmp_path, eagle_aux_hidden_state_layer_ids=[*named, TARGET.layers - 2])
    with pytest.raises(ModelError, match="fc reads 3 features, but the configuration names"):
        open_draft(tmp_path, TARGET)


def test_heads_of_other_kinds_are_named(good):
    """NVIDIA's gpt-oss heads read the last layer alone; no head here has another activation."""
    for changes, message in (
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be 'silu'"),
    ):
        whole = (good / "config.json").read_text()
        reconfigured(good, **changes)
        with pytest.raises(ModelError, match=message):
            open_draft(good, TARGET)
        (good / "config.json").write_text(whole)


@pytest.mark.parametrize(
    ("said", "warned"),
    [
        ({"layer_types": ["sliding_attention"], "sliding_window": 3}, True),
        ({"use_sliding_window": True, "sliding_window": 3}, True),
        ({"layer_types": ["full_attention"], "sliding_window": 3}, False),
        ({"use_sliding_window": False, "sliding_window": 3}, False),
        ({"layer_types": ["sliding_attention"], "sliding_window": 64}, False),
        ({"sliding_window": None}, False),
    ],
)
def test_a_window_of_the_heads_layer_is_warned_of(tmp_path, said, warned):
    export_like(trained(), IDS, tmp_path, "speculators")
    config = json.loads((tmp_path / "config.json").read_text())
    reconfigured(tmp_path, transformer_layer_config=config["transformer_layer_config"] | said)
    warnings = open_draft(tmp_path, TARGET).warnings
    assert any("last 3 tokens" in warning for warning in warnings) is warned


def test_traps_are_warned_of_by_name(good):
    config = json.loads((good / "config.json").read_text())
    config |= {"max_position_embeddings": 32, "norm_output": True, "rope_theta": 10000.0}
    (good / "config.json").write_text(json.dumps(config))
    warnings = " ".join(open_draft(good, TARGET).warnings)
    for key in ("max_position_embeddings", "norm_output", "rope_theta"):
        assert key in warnings


def test_a_target_of_too_few_layers_is_refused_before_answers_are_written():
    small = replace(TARGET, layer_specs=TARGET.layer_specs[:3])
    with pytest.raises(ModelError, match="3 layers, at least 6"):
        head_for(small, 10)
    with pytest.raises(ModelError, match="3 layers, at least 6"):
        check_target(small, TrainConfig(), None)
    check_target(TARGET, TrainConfig(), None)
    for method in ("table", "eagle"):
        check_target(small, TrainConfig(method=method), None)
