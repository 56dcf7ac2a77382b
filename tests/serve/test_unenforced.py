"""What is not enforced is shown, in a header and in the body; what is strict is refused."""

import json

import pytest

HEADER = "x-forerun-unenforced"
SCHEMA = {
    "type": "array",
    "maxItems": 2,
    "uniqueItems": True,
    "items": {"type": "boolean", "not": {"minimum": 3}},
}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}
PATHS = ("items.not",)


def wrapped(strict):
    return {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": strict}}


REQUESTS = [
    ("response_format.json_schema.schema", {"response_format": wrapped(False)}),
    ("structured_outputs.json", {"structured_outputs": {"json": SCHEMA}}),
    ("guided_json", {"guided_json": SCHEMA}),
]


@pytest.mark.parametrize(("field", "body"), REQUESTS, ids=[field for field, _ in REQUESTS])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_it_is_named(client, field, body, path):
    request = (CHAT if "chat" in path else {"prompt": "Hi", "max_tokens": 20}) | body
    names = [f"{field}.{path}" for path in PATHS]
    answer = client.post(path, json=request)
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER].split(", ") == names
    assert answer.json()["metadata"] == {"unenforced": names}
    answer = client.post(path, json=request | {"stream": True})
    assert answer.headers[HEADER].split(", ") == names
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    metadata = [json.loads(event).get("metadata") for event in events]
    assert metadata == [{"unenforced": names}, *[None] * (len(metadata) - 1)]


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("response_format.json_schema.schema", {"response_format": wrapped(True)}),
        ("structured_outputs.json", {"structured_outputs": {"json": SCHEMA, "strict": True}}),
    ],
)
def test_what_is_strict_is_refused(client, field, body):
    answer = client.post("/v1/chat/completions", json=CHAT | body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == field
    assert error["message"].startswith(f"{field}: items.not cannot be honoured")


def test_nothing_is_named_where_all_is_enforced(client):
    body = {"guided_json": {"type": "boolean", "title": "x"}}
    answer = client.post("/v1/chat/completions", json=CHAT | body)
    assert HEADER not in answer.headers and "metadata" not in answer.json()


def test_a_long_list_is_cut_in_the_header_and_whole_in_the_body(client):
    names = [f"property_{index}" for index in range(200)]
    inside = {name: {"type": "boolean", "not": {"minimum": 3}} for name in names}
    answer = client.post(
        "/v1/chat/completions",
        json=CHAT | {"guided_json": {"type": "object", "properties": inside}},
    )
    header = answer.headers[HEADER]
    *first, more = header.split(", ")
    whole = answer.json()["metadata"]["unenforced"]
    assert len(header) < 1100
    assert whole[: len(first)] == first and more == f"{200 - len(first)} more" and len(whole) == 200


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"foo": "bar"}}, "properties.foo must be a schema"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum cannot be honoured: Unsat"),
        ({"properties": {"a": False}, "required": ["a"], "type": "object"}, "Unsatisfiable"),
    ],
)
def test_no_schema_and_one_that_no_text_satisfies_are_refused_though_not_strict(
    client, schema, message
):
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for field in ({"guided_json": schema}, {"response_format": wrapped}):
        answer = client.post("/v1/chat/completions", json=CHAT | field)
        assert answer.status_code == 400, field
        assert message in answer.json()["error"]["message"]


def of_pattern(pattern):
    return {"type": "object", "properties": {"code": {"type": "string", "pattern": pattern}}}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("pattern", ["([", "a)", "*.txt", "[a-Z]", r"\d{5,3}"])
def test_a_pattern_that_is_no_regex_is_refused_and_pointed_at(client, pattern, strict):
    schema = of_pattern(pattern)
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    wrapped["json_schema"]["strict"] = strict
    requests = [
        ("response_format.json_schema.schema", {"response_format": wrapped}),
        ("structured_outputs.json", {"structured_outputs": {"json": schema, "strict": strict}}),
        ("guided_json", {"guided_json": json.dumps(schema)}),
    ]
    for field, body in requests:
        answer = client.post("/v1/chat/completions", json=CHAT | body)
        assert answer.status_code == 400, field
        error = answer.json()["error"]
        assert error["param"] == field
        path = "properties.code.pattern"
        assert error["message"].startswith(f"{field}: {path} is not a valid regular expression: ")
        assert error["message"].splitlines()[1].strip() == pattern


@pytest.mark.parametrize("pattern", [r"\bx\b", r"(a)\1", "a(?!b)", "(?>a)b", "(?P<n>a)(?P=n)"])
def test_a_regex_that_is_not_supported_is_named(client, pattern):
    answer = client.post("/v1/chat/completions", json=CHAT | {"guided_json": of_pattern(pattern)})
    assert answer.status_code == 200, answer.text
    assert answer.headers.get(HEADER) == "guided_json.properties.code.pattern"
