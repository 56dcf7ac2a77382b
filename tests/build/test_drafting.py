from dataclasses import replace

import pytest

from forerun.build.drafting import resolved_drafting, with_shipped
from forerun.config import EngineConfig
from forerun.errors import ConfigError


def test_what_train_worked_in_names_its_draft(tmp_path):
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / "config.json").write_text("{}")
    config = EngineConfig(speculative_draft_model_path=str(tmp_path))
    assert with_shipped(config).speculative_draft_model_path == str(tmp_path / "draft")
    (tmp_path / "config.json").write_text("{}")
    assert with_shipped(config) == config


def test_auto_is_decided():
    auto = EngineConfig(speculative_num_steps=3)
    for head, fault, found in (
        (True, None, "EAGLE+NGRAM"), (False, None, "NGRAM"), (True, "broken", "OFF"),
    ):  # fmt: skip
        chosen = resolved_drafting(auto, head, fault)
        assert chosen.speculative_algorithm == found
        assert (chosen.speculative_num_steps, chosen.speculative_num_draft_tokens) == (3, 4)
    wide = replace(auto, speculative_eagle_topk=4)
    assert resolved_drafting(wide, True, None).draft_shape.topk == 4
    with pytest.raises(ConfigError, match="NGRAM branches where the text did"):
        resolved_drafting(wide, False, None)
