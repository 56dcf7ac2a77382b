"""docs/reference/families.md: every cell of its tables is what the code does, and tested."""

import re
from itertools import chain

import pytest

from forerun.build.registry import EXECUTORS
from forerun.checkpoints import prediction_naming
from forerun.checkpoints.gguf import config as gguf_config
from forerun.drafts.assistant import Assistant
from forerun.drafts.block_folder import BlockFile
from forerun.drafts.eagle_folder import DraftFile
from forerun.drafts.prediction_layers import PredictionLayers
from forerun.drafts.standalone_draft import StandaloneDraft
from forerun.executors.cpu import limits as cpu
from forerun.networks.arch import FAMILIES
from forerun.networks.config_json import INDEXED, architecture_from
from tests.cpu.test_layer_kinds import FAMILIES as ON_THE_CORE
from tests.e2e.test_equality_matrix import FAMILIES as WITH_DRAFTS
from tests.models import test_gguf, tiny
from tests.parity.test_jax_logits import CASES as ON_JAX
from tests.parity.test_torch_logits import FURTHER
from tests.shape.tree import ROOT

SAME_AS = {"mimo": "qwen2", "gemma3": "gemma3_text", "kimi_k2": "deepseek_v3"}
SAME_AS |= {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
SAME_AS |= {"mistral3": "ministral3", "gemma4": "gemma4_text", "gemma4_unified": "gemma4_text"}
SAME_AS |= {"qwen2_vl": "qwen2", "qwen2_5_vl": "qwen2", "qwen3_vl_moe": "qwen3_moe"}
SAME_AS |= {"lfm2_vl": "lfm2", "qwen3_vl": "qwen3", **dict.fromkeys(INDEXED, "deepseek_v3")}
IN_FOLDERS = ("mimo", "gemma3", *INDEXED)
"""Names in config.json that stand for another family's layers."""
KINDS = {
    "a head": DraftFile.kind,
    "a block drafter": BlockFile.kind,
    "a whole model, itself included": StandaloneDraft.kind,
    "its own layers": PredictionLayers.kind,
    "its assistant (Gemma 4)": Assistant.kind,
}


def tables():
    """The tables of the page, each a list of rows, these lists of cells."""
    result = [[]]
    page = ROOT / "docs" / "reference" / "families.md"
    for line in page.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            result.append([])
        elif not line.startswith("| ---"):
            result[-1].append([cell.strip() for cell in line.strip("|").split("|")])
    return [table for table in result if table]


def rows():
    """Family -> its row, of the first table; a name in brackets has the row of the one before."""
    made = {}
    for row in tables()[0][1:]:
        for name in re.findall(r"`(\w+)`", row[0]):
            made[name] = dict(zip(("formats", "drafts"), row[2:], strict=True))
    return made


ROWS = rows()


def test_every_family_has_a_row():
    assert set(ROWS) == {*FAMILIES, *SAME_AS}


@pytest.mark.parametrize("name", ROWS)
def test_formats_are_those_that_are_read(name):
    """llama.cpp calls Mistral and Mixtral llama, OLMo 3 olmo2, Granite 4 granite, and all of
    DeepSeek's shape what it calls that.
    """
    also = {"mistral", "mixtral", "deepseek_v2", "olmo3", "glm4_moe_lite", "granitemoehybrid"}
    read = {*gguf_config._FAMILIES.values(), *also} - set(SAME_AS)
    shown = {
        *tiny.LLAMAS,
        *test_gguf.BLOCKS,
        "gemma2",
        "gemma3_text",
        "glm4_moe_lite",
        *tiny.DELTAS,
    }
    assert read == shown
    formats = ["folder"] if name in IN_FOLDERS else ["folder", "GGUF"]
    assert re.sub(r" \(.*?\)", "", ROWS[name]["formats"]).split(", ") == formats


@pytest.mark.parametrize("name", ROWS)
def test_every_executor_runs_it(name, tmp_path):
    family = SAME_AS.get(name, name)
    arch = architecture_from(tiny.config(family).to_dict(), tmp_path)
    assert cpu.refusal(arch) is None
    shown = {
        "cpu": {*tiny.LLAMAS, *ON_THE_CORE, "phi3"},  # The last in test_longrope.
        "torch": {*tiny.LLAMAS, *FURTHER, "gemma2", "gemma3_text", "qwen2_moe", "qwen3_moe"},
        "jax": {case[0] for case in ON_JAX},
    }
    for families in shown.values():
        assert family in families


OWN_LAYERS = {
    "DeepSeek-V3 and GLM-4.5": ("glm4_moe", "glm4_moe_lite", "deepseek_v3", "kimi_k2", *INDEXED),
    "MiMo": ("mimo",),
    "Qwen3-Next": (*tiny.DELTAS, "qwen3_5", "qwen3_5_moe"),
}
"""By whose way of storing prediction layers (prediction_naming.Naming.title); what these propose is
in tests/drafters/test_contract.py.
"""


@pytest.mark.parametrize("name", ROWS)
def test_own_layers_are_those_that_are_read(name):
    named = {title for title, names in OWN_LAYERS.items() if name in names}
    assert ROWS[name]["drafts"] == ("NEXTN" if named else "")
    namings = prediction_naming.DEEPSEEK, prediction_naming.MIMO, prediction_naming.QWEN
    assert set(OWN_LAYERS) == {naming.title for naming in namings}


def test_every_family_is_run_with_drafts_somewhere():
    """In the equality matrix. LFM2 with experts and Granite 4 differ from one that is there in what
    no draft sees.
    """
    seen = {*chain.from_iterable(WITH_DRAFTS.values()), *tiny.LLAMAS, *tiny.DELTAS, "lfm2"}
    assert set(FAMILIES) - seen == {"lfm2_moe", "granitemoehybrid"}


def test_drafts_are_those_that_executors_offer():
    head, *table = tables()[1]
    assert [row[0] for row in table] == ["n-grams", *KINDS]
    for row in table[1:]:
        for executor, cell in zip(head[1:], row[1:], strict=True):
            assert cell == "yes" and executor in EXECUTORS, (row[0], executor)
    assert table[0][1:] == ["yes"] * 3
