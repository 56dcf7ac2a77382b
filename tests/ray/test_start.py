"""What a cluster that does not come up is told as."""

import pytest

pytest.importorskip("ray")

from forerun.errors import EngineError
from forerun.ray import local


def test_a_cluster_that_does_not_start_is_a_sentence(monkeypatch):
    def busy(**_):
        raise Exception("The current node timed out during startup.\nThis could happen because")

    monkeypatch.setattr(local.ray, "init", busy)
    with pytest.raises(EngineError, match=r"\(The current node timed out during startup\); it may"):
        local._start()
