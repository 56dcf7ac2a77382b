"""The bench beside peers' servers: a dropped connection is said, counted and asked again."""

import sys
from pathlib import Path

import pytest

PEERS = Path(__file__).parents[2] / "bench" / "peers"


@pytest.fixture
def over_http(monkeypatch):
    monkeypatch.syspath_prepend(str(PEERS))
    for name in ("over_http", "servers", "environments", "dequantise"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import over_http

    yield over_http
    for name in ("over_http", "servers", "environments", "dequantise"):
        sys.modules.pop(name, None)


def failing(monkeypatch, over_http, *errors):
    """`asked` raises these, one after the other, and then answers."""
    left = list(errors)

    def asked(*_):
        if left:
            raise RuntimeError(left.pop(0))
        return {"whole": 1.0}

    monkeypatch.setattr(over_http, "asked", asked)


def test_a_dropped_connection_is_never_passed_over(over_http, monkeypatch, capsys):
    failing(monkeypatch, over_http, "ReadError: gone", "RemoteProtocolError: cut")
    found = over_http.patiently("peer", "http://x", [], 64, 8)
    assert found == {"whole": 1.0, "dropped": 2}
    said = capsys.readouterr().err
    assert said.count("dropped a connection") == 2 and "cut" in said


@pytest.mark.parametrize("errors", [["ReadError: gone"] * 3, ["HTTP 500: no"]])
def test_what_goes_on_or_is_no_connection_ends_the_visit(over_http, monkeypatch, errors):
    failing(monkeypatch, over_http, *errors)
    with pytest.raises(RuntimeError, match=errors[0][:5]):
        over_http.patiently("peer", "http://x", [], 64, 8)


def test_what_the_steps_are_measured_with_can_be_made(over_http):
    from environments import ENVIRONMENTS

    for name in ("llamacpp", "onnx"):
        assert name in ENVIRONMENTS and (PEERS / f"steps_{name}.py").exists()
    kinds = {server.kind for server in over_http.SERVERS}
    assert {"openvino", "vllm"} <= kinds & ENVIRONMENTS.keys()
