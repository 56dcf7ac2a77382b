"""A head that knows its target's answers by heart, served: what it should reach, it reaches."""

import json
import shutil
from dataclasses import replace

import pytest

from forerun.api import open_target
from forerun.bench.acceptance import CHAIN, Question, serve, shaped, summed
from forerun.bench.probe import probe
from forerun.config import EngineConfig
from forerun.executors import cpu
from forerun.models.draft_folder import open_draft
from forerun.models.folder import FolderCheckpoint

pytestmark = pytest.mark.skipif(cpu.available() is not None, reason=str(cpu.available()))

TOKENS = 72


def config_of(small, draft, **changes) -> EngineConfig:
    return EngineConfig(
        model=str(small.model), draft=str(draft), kv_tokens=4096, policy="fixed", **changes
    )


def served(small, draft, **changes) -> tuple[list[int], float]:
    """A chain of 3 on the answers that were learnt: steps by number of accepted guesses, and the
    share of guesses that were accepted.
    """
    target = open_target(config_of(small, draft, **changes))
    try:
        config = replace(shaped(target.config, CHAIN), speculation="head")
        question = Question("known", tuple(small.questions), 0.0, TOKENS, 4)
        stats = [item.stats for item in serve(target, config, question, lambda *_: None)[0]]
    finally:
        target.close()
    accepted = sum(item.accepted for item in stats) / sum(item.guesses for item in stats)
    return summed([item.histogram for item in stats]).tolist(), accepted


def falsified(small, folder, **changes):
    shutil.copytree(small.draft, folder)
    config = json.loads((folder / "config.json").read_text())
    eagle = {"eagle_aux_hidden_state_layer_ids": [2, 3, 3]}
    (folder / "config.json").write_text(json.dumps(config | {"eagle_config": eagle} | changes))
    return folder


@pytest.mark.parametrize("changes", [{}, {"norm_before_residual": True, "norm_output": True}])
def test_a_falsified_configuration_is_read_rightly_again(small, tmp_path, changes):
    """Layer ids in the other sense, off by one; then both switches wrong as well."""
    draft = falsified(small, tmp_path / "draft", **changes)
    found = probe(config_of(small, draft), lambda *_: None, small.questions, TOKENS)
    print(*found, sep="\n")
    assert found[0].reading == "features=2/3/3,residual=raw,feedback=raw,theta=10000"
    assert len(found) == 12 and sum(attempt.configured for attempt in found) == 1
    own = next(attempt for attempt in found if attempt.configured)
    assert own.reading.startswith("features=3/4/4")
    assert own.length < found[0].length - 1
    arch = FolderCheckpoint(small.model).architecture
    assert open_draft(draft, arch).head != open_draft(small.draft, arch).head
    right = open_draft(draft, arch, found[0].reading)
    assert right.head == open_draft(small.draft, arch).head and not right.warnings
    restored = served(small, draft, draft_reading=found[0].reading)
    assert restored == served(small, small.draft)
