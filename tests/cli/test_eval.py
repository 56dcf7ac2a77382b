"""`forerun eval`, where it is interrupted."""

import json

import pytest

from forerun.cli.main import INTERRUPTED, main
from forerun.measure import acceptance

LINE = ["eval", "toy", "--count", "1", "--tokens", "8", "--temperatures", "0,1", "--json"]


@pytest.mark.parametrize(("served", "known"), [(2, [0.0]), (3, [0.0])])
def test_what_is_known_is_shown(served, known, capsys, monkeypatch):
    """Each temperature is served plain and with drafts: the third pass is plain again."""
    real, passes = acceptance.serve, []

    def serve(*how):
        passes.append(how)
        if len(passes) > served:
            raise KeyboardInterrupt
        return real(*how)

    monkeypatch.setattr(acceptance, "serve", serve)
    assert main(LINE) == INTERRUPTED
    told = capsys.readouterr()
    assert [one["temperature"] for one in json.loads(told.out)["findings"]] == known
    assert "interrupted" in told.err


def test_nothing_known_is_nothing_shown(capsys, monkeypatch):
    def serve(*how):
        raise KeyboardInterrupt

    monkeypatch.setattr(acceptance, "serve", serve)
    assert main(LINE) == INTERRUPTED
    assert capsys.readouterr().out == ""
