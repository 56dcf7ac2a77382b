"""NEXTN on both executors, under every naming, against the published description."""

import json
from itertools import takewhile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from forerun.build.engine import open_target
from forerun.cli.eval import collapsed
from forerun.errors import ConfigError, ModelError
from forerun.executors import cpu
from forerun.executors.cpu import CpuPredictionModel
from forerun.executors.torch import TorchPredictionModel
from forerun.measure.acceptance import Finding
from forerun.measure.probe import FEEDBACKS, probe_layers
from forerun.measure.workload import Prompt
from forerun.models.folder import FolderCheckpoint
from forerun.options.config import EngineConfig
from tests.drafters.draft_models import Told
from tests.drafters.served import SMALL
from tests.drafters.test_standalone import PROMPTS, STEPS, TOKENS, counts, served
from tests.models import tiny

NATIVE = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))
EXECUTORS = [pytest.param("cpu", marks=NATIVE), "torch"]
NAMINGS = {
    "deepseek": ("model.layers.2.", "enorm", "hnorm", "eh_proj", "shared_head.norm"),
    "mimo": (
        "model.mtp_layers.0.", "token_layernorm", "hidden_layernorm", "input_proj",
        "final_layernorm",
    ),
    "qwen3-next": (
        "mtp.layers.0.", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc",
        "mtp.norm",
    ),
}  # fmt: skip
"""The layer's prefix, and what stands before it: norms of embedding and hidden state, the fuse, and
the norm after it."""


@pytest.fixture(scope="module")
def hf():
    return tiny.model("llama")


@pytest.fixture(scope="module")
def layer(hf):
    return random_layer(hf, 5)


def random_layer(hf, seed):
    """A random prediction layer: its decoder layer, its three norms, its fuse."""
    torch.manual_seed(seed)
    made = LlamaDecoderLayer(hf.config, 0)
    width = hf.config.hidden_size
    with torch.no_grad():
        for weight in made.parameters():
            spread = 0.2 if weight.dim() == 1 else 1.5 / weight.shape[-1] ** 0.5
            weight.normal_(1.0 if weight.dim() == 1 else 0.0, spread)
    norms = [1 + 0.2 * torch.randn(width) for _ in range(3)]
    return made, *norms, torch.randn(width, 2 * width) / width**0.5


def as_stored(made):
    """A layer's tensors as files have them: experts one by one."""
    found = {}
    for name, weight in made.state_dict().items():
        prefix, _, kind = name.rpartition(".")
        if not prefix.endswith("experts") or "proj" not in kind:
            found[name] = weight.detach().clone()
            continue
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for expert, whole in enumerate(weight.detach()):
            for part, matrix in zip(parts, whole.chunk(len(parts)), strict=True):
                found[f"{prefix}.{expert}.{part}.weight"] = matrix.clone()
    return found


def with_layers(hf, layers, folder, naming, extra=None):
    """The model's folder with the layers under one of the namings."""
    tiny.save_folder(hf, folder)
    first, *names = NAMINGS[naming]
    before, number, _ = first.rsplit(".", 2)
    tensors = load_file(folder / "model.safetensors")
    for depth, (made, *own) in enumerate(layers):
        prefix = f"{before}.{int(number) + depth}."
        tensors |= {prefix + name: weight for name, weight in as_stored(made).items()}
        order = dict(zip(("embedding", "hidden", "final", "fuse"), own, strict=True))
        for kind, name in zip(("embedding", "hidden", "fuse", "final"), names, strict=True):
            stored = name if name.startswith("mtp.") else prefix + name
            tensors[f"{stored}.weight"] = order[kind].clone()
        if naming == "deepseek":  # Copies of what is shared, as its files have them.
            tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    tensors |= extra or {}
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    said = {"num_nextn_predict_layers": len(layers)}
    (folder / "config.json").write_text(json.dumps(config | said))
    return folder


@pytest.fixture(scope="module")
def folders(hf, layer, tmp_path_factory):
    root = tmp_path_factory.mktemp("nextn")
    return {name: with_layers(hf, [layer], root / name, name) for name in NAMINGS}


def settings(folder, executor, algorithm="NEXTN", **changes):
    chosen = {
        "model": str(folder),
        "executor": executor,
        "dtype": "float32" if executor == "torch" else "auto",
        "speculative_algorithm": algorithm,
        "speculative_num_steps": None if algorithm == "OFF" else 3,
        **SMALL,
        "threads": 1,
        "draft_on_error": "stop",
    }
    return EngineConfig(**chosen | changes)


def rms(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@torch.no_grad()
def dense(hf, layers, hidden_first, text, drafted, zeroed=False, raw=False):
    """Logits of what follows `text` and then each of `drafted`, which hangs below it, as the paper
    has them: row i of layer k reads row i of layer k - 1, the normed hidden state of the target for
    k = 1, and the token at i + k; the last row predicts. The last layer goes on with further rows,
    which read its own row before. Causal passes over all rows, from transformers' own layer.
    """
    whole, rows = [*text, *drafted], len(text) - 1
    states = hf.model(torch.tensor(text)[None]).last_hidden_state[0, :-1]
    found = []
    for k, layer in enumerate(layers[: len(drafted) + 1], 1):
        read, tokens = states, whole[k : k + rows]
        states, carried = layer_rows(hf, layer, hidden_first, read, tokens, zeroed)
        found.append(hf.lm_head(states[-1]))
        states = carried if raw else states
    for token in whole[rows + len(layers) :]:
        read, tokens = torch.cat([read, states[-1:]]), [*tokens, token]
        states, carried = layer_rows(hf, layers[-1], hidden_first, read, tokens, zeroed)
        found.append(hf.lm_head(states[-1]))
        states = carried if raw else states
    return found


def layer_rows(hf, layer, hidden_first, states, tokens, zeroed):
    """Outputs of one layer's rows, which read a hidden state and a token each, and what they were
    before the final norm. zeroed: the first row reads no token.
    """
    made, embedding_norm, hidden_norm, final_norm, fuse = layer
    eps = hf.config.rms_norm_eps
    parts = [
        rms(embedded(hf, tokens, zeroed), embedding_norm, eps),
        rms(states, hidden_norm, eps),
    ]
    x = (torch.cat(parts[::-1] if hidden_first else parts, -1) @ fuse.T)[None]
    position = torch.arange(len(tokens))[None]
    mask = torch.full((len(tokens), len(tokens)), -torch.inf).triu(1)[None, None]
    rotary = hf.model.rotary_emb(x, position)
    y = made(x, attention_mask=mask, position_ids=position, position_embeddings=rotary)
    y = (y[0] if isinstance(y, tuple) else y).view(len(tokens), -1)
    return rms(y, final_norm, eps), y


def embedded(hf, tokens, zeroed):
    """Embeddings [n,H], the first one zeros where `zeroed`."""
    found = hf.model.embed_tokens(torch.tensor(tokens)).clone()
    if zeroed:
        found[0] = 0
    return found


@pytest.mark.parametrize(
    ("executor", "naming"),
    [*(pytest.param("cpu", naming, marks=NATIVE) for naming in NAMINGS), ("torch", "mimo")],
)
def test_drafts_are_what_the_description_says(hf, layer, folders, executor, naming, monkeypatch):
    """Every chain that was proposed, in steps after prompts in chunks and behind reused pages."""
    kind = CpuPredictionModel if executor == "cpu" else TorchPredictionModel
    target, asked = open_target(settings(folders[naming], executor)), []

    def noted(verb):
        made = getattr(kind, verb)

        def call(self, work, *rest):
            found = made(self, work, *rest)
            asked.append((work, found))
            return found

        return call

    try:
        plain = [item.tokens for item in served(open_plain(folders[naming], executor), 0.0)]
        for verb in ("extend", "expand"):
            monkeypatch.setattr(kind, verb, noted(verb))
        done = served(target, 0.0, at_once=1)
        accepted, drafted = counts(done, plain)
        assert 0 <= accepted < drafted
    finally:
        target.close()
    compared, worst = compare(
        asked, done, lambda text, chain: dense(hf, [layer], naming == "mimo", text, chain)
    )
    assert compared > 30
    # Float32, and 8 bits, where what reads or sees something else is wrong by several nats.
    most, usual = (1e-3, 1e-3) if executor == "torch" else (1.0, 0.3)
    assert max(worst) < most and np.mean(worst) < usual


@pytest.mark.parametrize(
    ("executor", "family", "reading"),
    [
        pytest.param("cpu", "glm4_moe", None, marks=NATIVE),
        ("torch", "glm4_moe", None),
        pytest.param("torch", "deepseek_v3", None, marks=pytest.mark.slow),
        ("torch", "deepseek_v3", "feedback=raw"),
    ],
)
def test_layers_of_experts_and_latents(tmp_path, executor, family, reading, monkeypatch):
    """GLM-4.5's, whose first row reads no token, and DeepSeek's, carrying either hidden state. On
    the CPU core the layer is in 8 bits.
    """
    hf = tiny.model(family, max_position_embeddings=512)
    kind = type(hf.model.layers[-1])
    torch.manual_seed(3)
    made = kind(hf.config, hf.config.num_hidden_layers - 1)
    with torch.no_grad():
        for name, weight in [*made.named_parameters(), *made.named_buffers()]:
            weight.normal_(1.0 if "norm" in name else 0.0, 0.2 if weight.dim() == 1 else 0.15)
    width = hf.config.hidden_size
    layer = (
        made,
        *(1 + 0.2 * torch.randn(width) for _ in range(3)),
        torch.randn(width, 2 * width) / 8,
    )
    folder = as_deepseek(hf, layer, tmp_path / family)
    target = open_target(settings(folder, executor, draft_reading=reading))
    asked = []
    model = CpuPredictionModel if executor == "cpu" else TorchPredictionModel
    for verb in ("extend", "expand"):
        monkeypatch.setattr(model, verb, noted_by(asked, getattr(model, verb)))
    try:
        done = served(target, 0.0, at_once=1)
    finally:
        target.close()
    zeroed, raw = family == "glm4_moe", reading == "feedback=raw"
    compared, worst = compare(
        asked, done, lambda text, chain: dense(hf, [layer], False, text, chain, zeroed, raw)
    )
    if executor == "cpu":
        _, other = compare(
            asked, done, lambda text, chain: dense(hf, [layer], False, text, chain, not zeroed, raw)
        )
        assert compared > 30 and max(worst) < 0.2 < max(other)
        return
    assert compared > 30 and max(worst) < 1e-3
    _, other = compare(
        asked, done, lambda text, chain: dense(hf, [layer], False, text, chain, zeroed, not raw)
    )
    assert max(other) > 1e-2


def as_deepseek(hf, layer, folder):
    """`with_layers` under DeepSeek's names, behind so many layers as the model has."""
    with pytest.MonkeyPatch.context() as patch:
        first, *names = NAMINGS["deepseek"]
        first = first.replace("2", str(hf.config.num_hidden_layers))
        patch.setitem(NAMINGS, "deepseek", (first, *names))
        return with_layers(hf, [layer], folder, "deepseek")


def noted_by(asked, made):
    def call(self, work, *rest):
        found = made(self, work, *rest)
        asked.append((work, found))
        return found

    return call


def compare(asked, done, reference):
    """How many proposals were compared, and the greatest error of each chain.

    reference  (text, chain) -> the logits
    """
    texts = [[*p.tolist(), *item.tokens] for p, item in zip(PROMPTS, done, strict=True)]
    compared, worst = 0, []
    for at, (work, found) in enumerate(asked):
        if not (hasattr(work, "next_tokens") and len(work.scored)) or at % 5:
            continue
        length = int(work.kv_len[0]) + len(work.tokens) + 1
        able = [t[:length] for t in texts if t[length - len(work.tokens) - 1 : length]
                == [*work.tokens.tolist(), int(work.next_tokens[-1])]]  # fmt: skip
        below = list(takewhile(lambda item: hasattr(item[0], "parents"), asked[at + 1 :]))
        chain = [int(level.tokens[0]) for level, _ in below]
        mine = [found, *(after for _, after in below)]
        worst.append(min(max(map(_error, mine, reference(text, chain))) for text in able))
        compared += len(mine)
    return compared, worst


def _error(found, logits):
    wanted = logits.log_softmax(-1).numpy()
    return float(np.abs(found.log_probs[0] - wanted[found.ids[0]]).max())


def open_plain(folder, executor):
    """The target without speculation; it lives as long as the process, which is short."""
    return open_target(settings(folder, executor, "OFF"))


@pytest.fixture(scope="module")
def certain(tmp_path_factory):
    """A target that looks at the last token alone, and a prediction layer that does the same: what
    it proposes is what the target says.
    """
    hf = tiny.model("llama")
    width = hf.config.hidden_size
    with torch.no_grad():
        for block in hf.model.layers:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
    made = LlamaDecoderLayer(hf.config, 0)
    with torch.no_grad():
        made.self_attn.o_proj.weight.zero_()
        made.mlp.down_proj.weight.zero_()
    fuse = torch.cat([torch.eye(width), torch.zeros(width, width)], 1)
    layer = made, torch.ones(width), torch.ones(width), hf.model.norm.weight.detach().clone(), fuse
    return with_layers(hf, [layer], tmp_path_factory.mktemp("certain"), "deepseek")


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("algorithm", ["NEXTN", "EAGLE"])
def test_a_layer_that_is_right_is_accepted_and_one_that_is_wrong_never(
    certain, executor, algorithm
):
    """EAGLE means these layers, where a checkpoint has them and no draft is named."""
    plain = open_plain(certain, executor)
    texts = [item.tokens for item in served(plain, 0.0)]
    target = open_target(settings(certain, executor, algorithm))
    try:
        assert target.config.speculative_algorithm == "NEXTN"
        accepted, drafted = counts(served(target, 0.0), texts)
        assert accepted == drafted == (TOKENS - STEPS) * len(PROMPTS)
        if (executor, algorithm) == ("cpu", "NEXTN"):
            whole = [[*p, *t] for p, t in zip(PROMPTS, texts, strict=True)]
            object.__setattr__(target, "draft_model", Told(target.draft_model, whole, 1))
            assert counts(served(target, 0.0), texts)[0] == 0
    finally:
        plain.close()
        target.close()


@NATIVE
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trees_change_nothing(folders, page_size, temperature):
    shape = {"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 24}
    plain = open_plain(folders["mimo"], "cpu")
    target = open_target(settings(folders["mimo"], "cpu", page_size=page_size, **shape))
    try:
        expected = [item.tokens for item in served(plain, temperature)]
        accepted, drafted = counts(served(target, temperature), expected)
        assert 0 < accepted < drafted
    finally:
        plain.close()
        target.close()


def test_mimo_is_qwen2_with_prediction_layers(layer, tmp_path):
    """MiMo-7B's configuration, and the command line its documentation gives."""
    hf = tiny.model("qwen2")
    folder = with_layers(hf, [layer], tmp_path, "mimo", _biases(hf))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "attention_bias": True,
               "use_mrope": False, "auto_map": {"AutoModel": "modeling.MiMoModel"}}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    assert FolderCheckpoint(folder).architecture.family == "qwen2"
    shape = {"speculative_num_steps": 1, "speculative_eagle_topk": 1}
    found = settings(folder, "torch", "EAGLE", speculative_num_draft_tokens=2, **shape)
    target = open_target(found)
    assert target.config.speculative_algorithm == "NEXTN"
    assert target.draft_model.describe()["layers"] == 1
    target.close()
    (folder / "config.json").write_text(json.dumps(config | {"use_mrope": True}))
    with pytest.raises(ModelError, match="use_mrope"):
        FolderCheckpoint(folder)


def _biases(hf):
    sizes = {"q": 64, "k": 32, "v": 32}
    return {f"model.mtp_layers.0.self_attn.{part}_proj.bias": torch.zeros(size)
            for part, size in sizes.items()}  # fmt: skip


@pytest.mark.parametrize("naming", NAMINGS)
def test_what_is_missing_or_unknown_is_named(hf, layer, tmp_path, naming):
    prefix, *names = NAMINGS[naming]
    stray = {f"{prefix}self_attn.k_norm.weight": torch.ones(16)}
    folder = with_layers(hf, [layer], tmp_path, naming, stray)
    tensors = load_file(folder / "model.safetensors")
    lost = names[-1] if naming == "qwen3-next" else prefix + names[-1]
    del tensors[f"{lost}.weight"]
    tensors[f"{prefix}mlp.up_proj.weight"] = torch.ones(3, 64)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        open_target(settings(folder, "torch"))
    said = str(caught.value)
    assert f"missing {lost}.weight" in said and f"unexpected {next(iter(stray))}" in said
    assert f"{prefix}mlp.up_proj.weight is [3, 64], not [96, 64]" in said
    open_plain(folder, "torch").close()  # The target itself is whole.


def test_without_layers_and_with_a_draft_besides(hf, folders, tmp_path):
    bare = tiny.save_folder(hf, tmp_path)
    with pytest.raises(ModelError, match="has no prediction layers"):
        open_target(settings(bare, "torch"))
    with pytest.raises(ConfigError, match="leave speculative-draft-model-path out"):
        open_target(settings(folders["mimo"], "torch", speculative_draft_model_path=str(bare)))
    stray = {"model.layers.2.input_layernorm.weight": torch.ones(64)}
    tensors = load_file(bare / "model.safetensors") | stray
    save_file(tensors, bare / "model.safetensors")
    with pytest.raises(ModelError, match=r"unexpected model\.layers\.2\.input_layernorm"):
        FolderCheckpoint(bare)


def test_layers_that_are_announced_and_absent_leave_a_plain_model(hf, tmp_path):
    """Said once; asked to stop, it does."""
    folder = tiny.save_folder(hf, tmp_path / "bare")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    asked = settings(folder, "torch", draft_on_error="disable")
    with pytest.warns(match="announces 1 prediction layers, but has no") as told:
        target = open_target(asked)
    target.close()
    assert len([each for each in told if "announces" in str(each.message)]) == 1
    assert not target.config.speculates
    with pytest.raises(ModelError, match="announces 1"):
        open_target(settings(folder, "torch"))


def test_a_probe_finds_which_hidden_state_layers_carry(certain):
    """Both readings are served; of equals the configured one is believed."""
    prompts = [Prompt("p", "e2e", ({"role": "user", "content": "the quick brown fox"},))]
    found = probe_layers(settings(certain, "torch"), lambda *_: None, prompts, tokens=12)
    assert {attempt.variant for attempt in found} == set(FEEDBACKS)
    assert found[0].configured and found[0].length > 2


def test_a_second_position_that_collapses_is_said():
    facts = dict.fromkeys(Finding.__dataclass_fields__, 0) | {"question": "q", "shape": "chain"}
    fine, bad = (Finding(**facts | {"agreement": pair}) for pair in ((0.8, 0.6), (0.8, 0.05)))
    assert collapsed([fine]) == []
    assert "0.80, then 0.05" in collapsed([fine, bad])[0]
