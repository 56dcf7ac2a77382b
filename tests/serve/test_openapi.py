"""/openapi.json says what the routes are and what their bodies take."""

import json

import pytest

from forerun.errors import RequestError
from forerun.serve.app import HONOURED
from forerun.serve.bodies.fields import body_schema, integer, items, mapping, number, read, text
from forerun.serve.dialects.llama.embeddings import LlamaEmbeddingBody
from forerun.serve.openapi import BODIES, document
from tests.worlds.toy_app import toy_client


def test_every_route_is_documented():
    with toy_client() as client:
        schema = client.get("/openapi.json").json()
    assert schema == document(HONOURED)
    paths = {route.path.replace(":path}", "}") for route in HONOURED}
    assert set(schema["paths"]) == paths
    ids = [one["operationId"] for path in schema["paths"].values() for one in path.values()]
    assert len(set(ids)) == len(ids)
    posts = {path for path, one in schema["paths"].items() if "requestBody" in one.get("post", {})}
    assert posts == BODIES.keys()


def test_routes_without_a_body_answer_in_their_documented_type():
    """Every route that takes neither a body nor a name: its 200 has a type of the document's, and
    an answer without one is empty.
    """
    count = 0
    with toy_client() as client:
        for path, methods in document(HONOURED)["paths"].items():
            for method, operation in methods.items():
                if "{" in path or "requestBody" in operation:
                    continue
                answer = client.request(method, path)
                kinds = operation["responses"]["200"].get("content", {})
                kind = answer.headers.get("content-type", "").split(";")[0]
                assert answer.status_code == 200, (method, path)
                assert kind in kinds if kinds else not answer.content, (method, path)
                count += 1
    assert count > 15


NOT_NULL = {"not": {"type": "null"}}


@pytest.mark.parametrize("kind", BODIES.values(), ids=BODIES)
def test_a_body_forbids_undeclared_fields_and_needs_required_ones(kind):
    schema = body_schema(kind)
    assert schema["additionalProperties"] == {"type": "null"}
    for name in schema.get("required", ()):
        with pytest.raises(RequestError) as caught:
            read(kind, {other: None for other in schema["required"] if other != name})
        assert caught.value.field in schema["required"]
    for name, field in schema["properties"].items():
        if field.get("description", "").startswith("Not supported"):
            with pytest.raises(RequestError) as caught:
                read(kind, {name: 1})
            assert caught.value.field == name


def test_a_needed_field_with_two_names_is_needed_by_either():
    schema = body_schema(LlamaEmbeddingBody)
    assert "required" not in schema
    ((either,),) = (rule.values() for rule in schema["allOf"])
    assert [one["required"] for one in either] == [["content"], ["input"]]
    assert all(one["properties"] == {one["required"][0]: NOT_NULL} for one in either)
    for name in ("content", "input"):
        assert {"type": "null"} in schema["properties"][name]["anyOf"]
        read(LlamaEmbeddingBody, {"content": None, "input": None, name: "x"})
    with pytest.raises(RequestError, match="content is missing"):
        read(LlamaEmbeddingBody, {"input": None})


def test_readers_say_their_bounds():
    assert integer(1, 9).schema == {"type": "integer", "minimum": 1, "maximum": 9}
    assert number(0.0, 2.0).schema == {"type": "number", "minimum": 0.0, "maximum": 2.0}
    several = items(text(5, 1), 3)
    assert several.schema["items"] == {"type": "string", "minLength": 1, "maxLength": 5}
    assert (several.schema["minItems"], several.schema["maxItems"]) == (0, 3)
    assert mapping.schema == {"type": "object"}


def test_no_description_is_a_signature():
    schema = json.dumps(document(HONOURED))
    assert "description" in schema and "(*, " not in schema
