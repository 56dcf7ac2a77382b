"""Stored answers: of all models of a server, and each tenant's own."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from starlette.testclient import TestClient

from forerun.build.engine import load
from forerun.options.config import EngineConfig, ServeSettings
from forerun.serve.app import create_app, create_models_app
from forerun.serve.http.workers import LARGE, Workers
from forerun.serve.models import Source
from forerun.text.chat import ChatTemplate
from tests.worlds.servers import wait_for

PATH = "/v1/responses"


@contextmanager
def two_toys(**settings):
    """A client of two toys."""
    toy = EngineConfig(model="toy")
    made = [Source(name, (), 1000, lambda: load(toy)) for name in ("a", "b")]
    app = create_models_app(made, ServeSettings(**settings))
    with TestClient(app, base_url="http://localhost") as client:
        yield client


@pytest.fixture(scope="module")
def several():
    """A client of two toys, of which one is loaded at a time."""
    with two_toys(max_loaded_models=1) as client:
        yield client


@pytest.fixture(scope="module")
def guarded():
    app = create_app(load(EngineConfig(model="toy")), ServeSettings(api_keys=("one", "two")))
    with TestClient(app, base_url="http://localhost") as client:
        yield client


def ask(client, headers=None, **more):
    return client.post(PATH, json={"max_output_tokens": 4, **more}, headers=headers)


def test_another_model_goes_on_with_a_conversation(several):
    """Each model had its own answers, which are listed last used first."""
    first = ask(several, model="a", input="Hi").json()
    second = ask(several, model="b", input="Go on.", previous_response_id=first["id"])
    assert second.status_code == 200, second.text
    states = {one["id"]: one["state"] for one in several.get("/v1/models").json()["data"]}
    assert states == {"a": "unloaded", "b": "loaded"}
    assert several.get(f"{PATH}/{first['id']}").json() == first
    (item,) = several.get(f"{PATH}/{first['id']}/input_items").json()["data"]
    refers = {"type": "item_reference", "id": item["id"]}
    assert ask(several, model="b", input=[refers]).status_code == 200
    assert several.delete(f"{PATH}/{first['id']}").json()["deleted"]
    assert several.get(f"{PATH}/{first['id']}").status_code == 404
    assert ask(several, model="b", input="c", previous_response_id=first["id"]).status_code == 400


def test_no_tenant_sees_anothers_answers(guarded):
    """Ids of items are a client's own words: others may use the same, or guess them."""
    one, two = ({"authorization": f"Bearer {key}"} for key in ("one", "two"))
    item = {"type": "message", "role": "user", "id": "msg_1"}
    first = ask(guarded, one, input=[{**item, "content": "mine"}]).json()
    refers = {"type": "item_reference", "id": "msg_1"}
    assert ask(guarded, two, input=[refers]).json()["error"]["code"] == "item_not_found"
    for path in (f"{PATH}/{first['id']}", f"{PATH}/{first['id']}/input_items"):
        assert guarded.get(path, headers=two).status_code == 404
        assert guarded.get(path, headers=one).status_code == 200
    assert guarded.delete(f"{PATH}/{first['id']}", headers=two).status_code == 404
    stolen = ask(guarded, two, input="Hi", previous_response_id=first["id"])
    assert stolen.json()["error"]["code"] == "previous_response_not_found"
    assert ask(guarded, two, input=[{**item, "content": "theirs"}]).status_code == 200
    again = ask(guarded, one, input=[refers]).json()
    (stored,) = guarded.get(f"{PATH}/{again['id']}/input_items", headers=one).json()["data"]
    assert stored["content"][0]["text"] == "mine"


def test_requests_are_aborted_by_name_whatever_model_runs_them():
    """An order to abort went to the model used last, and had no field for another."""
    long = {"max_new_tokens": 900, "ignore_eos": True, "n": 16}
    body = {"model": "a", "text": "Hi", "rid": "mine", "sampling_params": long}
    with two_toys() as client, ThreadPoolExecutor(1) as beside:
        for name in ("a", "b"):
            assert ask(client, model=name, input="Hi").status_code == 200
        answer = beside.submit(client.post, "/generate", json=body)
        assert wait_for(lambda: client.app.state.running)
        assert ask(client, model="b", input="Hi").status_code == 200
        loads = [client.get("/load", params={"model": name}).json() for name in ("a", "b")]
        assert [one["server_load"] for one in loads] == [1, 0]
        assert client.post("/abort_request", json={"rid": "mine"}).json() == {"aborted": 1}
        assert answer.result().json()["error"]["code"] == "aborted"


def test_a_small_body_that_goes_on_with_much_is_read_beside_the_loop(guarded, monkeypatch):
    """What was stored counted for nothing: others waited while it was rendered."""
    sizes, apart = [], Workers.apart

    def spied(self, size, *args):
        sizes.append(size)
        return apart(self, size, *args)

    monkeypatch.setattr(Workers, "apart", spied)
    monkeypatch.setattr(ChatTemplate, "waits", True)
    key = {"authorization": "Bearer one"}
    long = [{"role": "user", "content": "x" * 400, "id": f"m{at}"} for at in range(100)]
    first = ask(guarded, key, input=long, truncation="auto").json()
    for more in (
        {"input": "Go on.", "previous_response_id": first["id"]},
        {"input": [{"type": "item_reference", "id": "m7"}]},
        {"input": [{"type": "item_reference", "id": []}], "previous_response_id": {}},
    ):
        ask(guarded, key, truncation="auto", **more)
        body = {**more, "truncation": "auto"}
        guarded.post(f"{PATH}/input_tokens", json=body, headers=key)
    whole, *small = sizes
    assert whole > LARGE and min(small[:3]) > whole and max(small[4:]) < LARGE


def test_pages_of_items_as_openais_clients_turn_them(guarded):
    """All came in the order of the request, whatever the query."""
    key = {"authorization": "Bearer one"}
    ids = [f"i{at}" for at in range(5)]
    items = [{"role": "user", "content": "x", "id": id} for id in ids]
    path = f"{PATH}/{ask(guarded, key, input=items).json()['id']}/input_items"

    def page(**query):
        return guarded.get(path, params=query, headers=key)

    def listed(**query):
        reply = page(**query).json()
        assert [reply["first_id"], reply["last_id"]] == [reply["data"][at]["id"] for at in (0, -1)]
        return [one["id"] for one in reply["data"]], reply["has_more"]

    assert listed() == (ids[::-1], False) and listed(order="asc") == (ids, False)
    assert listed(limit=2) == (["i4", "i3"], True)
    assert listed(limit=2, after="i3") == (["i2", "i1"], True)
    assert listed(limit=2, after="i1") == (["i0"], False)
    assert listed(order="asc", after="i2", limit=100) == (["i3", "i4"], False)
    assert page(after="i0").json()["data"] == []
    wrong = ({"order": "up"}, {"limit": 0}, {"limit": 101}, {"limit": "9" * 5000}, {"after": "i9"})
    for query in wrong:
        assert page(**query).json()["error"]["param"] == next(iter(query))
