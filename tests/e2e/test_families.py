"""Of every family: texts with speculation are those without, in pages of 1 or 16, with preempted
requests and shared prefixes. Each model drafts for itself, so that its cache, its experts and its
attention are a drafter's too.
"""

from dataclasses import replace

import pytest

from forerun.executors import cpu
from forerun.measure.prove import Trial
from tests.covering import every, rarely, values
from tests.e2e.test_equality_matrix import PROMPTS, emulated, proved  # noqa: F401 - a fixture
from tests.models import tiny
from tests.worlds.configs import small

TRIAL = Trial(PROMPTS[-4:], tokens=10, temperatures=(1.0,), group=4, mixed=True)
FAMILIES = (
    *("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v3", "gpt_oss"),
    *("phi3", "smollm3", "granite", "olmo2", "gemma3_text", "deepseek_v2"),
    *("seed_oss", "olmo3", "exaone4", "glm4_moe_lite", "minimax_m2", "ministral3"),
    *("gemma4_text", "hunyuan_v1_dense"),
)
OFTEN = [("gpt_oss", 16)]

NATIVE = (
    *("qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "olmo2", "gemma3_text", "deepseek_v2"),
    *("seed_oss", "olmo3", "exaone4", "glm4_moe_lite", "minimax_m2", "ministral3"),
    *("glm4_moe", "deepseek_v3", "gemma2", "gemma4_text", "hunyuan_v1_dense"),
)
"""What the compiled core runs that is not Llama's block."""
NATIVE_OFTEN = ("glm4_moe", 16), ("deepseek_v3", 1), ("gemma2", 16), ("gemma4_text", 1)


def itself(folder, page):
    """Little room, so that sequences are preempted; two prompts begin alike."""
    alone = {"speculative_algorithm": "STANDALONE", "disable_cuda_graph": True}
    return small(folder, "torch", folder, page_size=page, kv_tokens=176, **alone)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made = {}

    def build(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = tiny.save_folder(tiny.model(family), folder)
        return made[family]

    return build


@pytest.mark.parametrize(("family", "page"), rarely(every(FAMILIES, [1, 16]), OFTEN, values))
def test_texts_do_not_depend_on_drafting(folder_of, family, page):
    proved(itself(folder_of(family), page), TRIAL, None, shapes=("tree",))


@pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))
@pytest.mark.parametrize(("family", "page"), rarely(every(NATIVE, [1, 16]), NATIVE_OFTEN, values))
def test_nor_on_the_compiled_core(folder_of, family, page):
    config = replace(itself(folder_of(family), page), executor="cpu", dtype="file")
    proved(config, TRIAL, None, shapes=("tree",))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3", "gpt_oss", "gemma4_text"])
def test_nor_in_captured_rounds(folder_of, emulated, family):  # noqa: F811
    config = replace(itself(folder_of(family), 16), disable_cuda_graph=False)
    proved(config, TRIAL, None, shapes=("tree",))
