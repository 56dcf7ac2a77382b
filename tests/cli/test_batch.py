"""`forerun run --batch`: OpenAI's batch format in and out."""

import json

import pytest

from forerun.cli.main import main

TOY = ["toy", "--kv-tokens", "8192"]
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"


def line(name, url=CHAT, **body):
    if url == CHAT:
        body = {"messages": [{"role": "user", "content": name}], "max_tokens": 6} | body
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


@pytest.fixture
def files(tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def write(*lines):
        source.write_text("\n".join(json.dumps(one) for one in lines) + "\n\n")

    def run(*flags):
        return main(["run", *TOY, "--batch", str(source), "--out", str(target), *flags])

    def read():
        return {one["custom_id"]: one for one in map(json.loads, target.read_text().splitlines())}

    return write, run, read, source, target


def test_every_request_is_answered_once(files, capsys):
    write, run, read, _, _ = files
    write(
        line("a"), line("b", model="gpt-4", n=2),
        line("c", PLAIN, prompt="Hi", max_tokens=3), line("d", temperature="hot"),
        line("e", "/v1/responses", input="Hi"), line("f", "/v1/embeddings", input="Hi"),
    )  # fmt: skip
    assert run("--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["answered"], report["failed"]) == (6, 5, 1)
    answers = read()
    assert [*sorted(answers)] == [*"abcdef"] and len({x["id"] for x in answers.values()}) == 6
    answer = answers["a"]["response"]
    assert answer["status_code"] == 200 and answer["request_id"] and answers["a"]["error"] is None
    assert len(answer["body"]["choices"][0]["message"]["content"]) == 6
    assert len(answers["b"]["response"]["body"]["choices"]) == 2
    assert answers["c"]["response"]["body"]["choices"][0]["text"] == "dje"
    assert answers["e"]["response"]["body"]["output"][0]["content"][0]["text"]
    assert answers["f"]["response"]["body"]["data"][0]["embedding"]
    assert answers["d"]["response"]["status_code"] == 400
    assert answers["d"]["response"]["body"]["error"]["param"] == "temperature"


def test_it_goes_on_where_it_was_stopped(files, capsys):
    write, run, read, _, target = files
    write(line("a"), line("b"), line("c"), line("d"))
    assert run() == 0
    before = target.read_text().splitlines()
    broken = json.loads(before[3])
    broken["response"]["status_code"] = 503
    # One answer of a server that went down, one line cut short.
    target.write_text("\n".join([before[0], before[1], json.dumps(broken), before[2][:40]]))
    assert run() == 0
    assert "2 of 4 were answered before" in capsys.readouterr().err
    assert target.read_text().splitlines()[:2] == before[:2]
    assert len(target.read_text().splitlines()) == 4 and len(read()) == 4
    assert run() == 0 and len(target.read_text().splitlines()) == 4


def test_a_file_without_a_request(files, capsys):
    _, run, _, source, target = files
    source.write_text("\n")
    assert run() == 2
    assert "holds no request" in capsys.readouterr().err and not target.exists()


def test_a_line_ends_where_json_lines_do(files):
    _, run, _, source, target = files
    request = json.dumps(line("a\u2028b\x85c"), ensure_ascii=False)
    source.write_text(f"{request}\r\n", encoding="utf-8")
    for _ in range(2):  # The second time its answer is read back.
        assert run() == 0
        (answer,) = target.read_text(encoding="utf-8").rstrip("\n").split("\n")
        assert json.loads(answer)["custom_id"] == "a\u2028b\x85c"


def test_a_mark_of_the_byte_order_before_the_first_line(files):
    _, run, read, source, _ = files
    source.write_text(json.dumps(line("a")) + "\n", encoding="utf-8-sig")
    assert run() == 0 and read()["a"]["response"]["status_code"] == 200


def test_half_a_surrogate_pair_stops_no_other_line(files):
    write, run, read, _, _ = files
    write(
        line("\ud83d", messages=[{"role": "user", "content": "hi"}]),
        line("a", messages=[{"role": "user", "content": "\ud83d"}]),
        line("z"),
    )
    assert run() == 1
    answers = read()
    statuses = {name: one["response"]["status_code"] for name, one in answers.items()}
    assert statuses == {"\ud83d": 200, "a": 400, "z": 200}
    assert "surrogate" in answers["a"]["response"]["body"]["error"]["message"]


@pytest.mark.parametrize(
    ("before", "problem"),
    [
        (None, "is the file of the requests"),
        ("my notes\n", "line 1 is not an answer of a batch and would be lost"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {}}\n', "line 1 is not an answer"),
        ('{"custom_id": "a", "response": "x", "error": null}\n', "line 1 is not an answer"),
    ],
)
def test_a_file_that_is_no_output_is_left_as_it_is(files, before, problem, capsys):
    write, run, _, source, target = files
    write(line("a"))
    if before is None:
        target.hardlink_to(source)
    else:
        target.write_text(before)
    kept = target.read_bytes()
    assert run() == 2
    assert problem in capsys.readouterr().err and target.read_bytes() == kept


def test_an_output_that_cannot_be_a_file(files, tmp_path, capsys):
    write, _, _, source, target = files
    write(line("a"))
    target.mkdir()
    for out in (target, tmp_path / "missing" / "out.jsonl"):
        assert main(["run", *TOY, "--batch", str(source), "--out", str(out)]) == 2
        assert f"--out {out} cannot be used" in capsys.readouterr().err


def test_a_link_to_the_output_stays_one(files, tmp_path):
    write, run, read, _, target = files
    write(line("a"))
    target.symlink_to(tmp_path / "elsewhere.jsonl")
    assert run() == 0 and target.is_symlink() and read().keys() == {"a"}


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        (
            None,
            '{"custom_id": "a", url}',
            "it is not JSON: Expecting property name enclosed in double quotes: column 20.",
        ),
        (None, "[" * 5000, "it is not JSON: it is nested too deeply."),
        (None, '{"custom_id": NaN}', "it is not JSON: NaN is not a JSON number."),
        (None, "[1]", "it is JSON, but not an object; it needs a custom_id"),
        (
            "a",
            '{"custom_id": "a", "url": "/v1/chat/completions"}',
            "it needs a custom_id, a url and a body, and has no body.",
        ),
        (3, json.dumps(line("x") | {"custom_id": 3}), "its custom_id must be a text."),
        ("a", json.dumps(line("a") | {"url": []}), "its url must be a text."),
        ("a", json.dumps(line("a") | {"body": "hi"}), "its body must be an object."),
        (
            "a",
            '{"custom_id": "a", "url": "/v1/rerank", "body": {}}',
            "a request is a POST to one of",
        ),
        ("good", json.dumps(line("good")), "the custom_id 'good' was there before"),
        ("a", json.dumps(line("a", stream=True)), "a batch cannot stream"),
    ],
)
def test_a_line_that_is_no_request_keeps_no_other_from_its_answer(
    files, name, text, problem, capsys
):
    _, run, _, source, target = files
    source.write_text(json.dumps(line("good")) + "\n" + text + "\n" + json.dumps(line("last")))
    for _ in range(2):  # The second time only the bad line is left.
        assert run("--json") == 1
        printed = capsys.readouterr()
        report = json.loads(printed.out)
        assert (report["requests"], report["answered"], report["failed"]) == (3, 2, 1)
        assert f"line 2: {problem}" in printed.err
        answers = [json.loads(one) for one in target.read_text().splitlines()]
        assert len(answers) == 3
        (refused,) = [one for one in answers if one["error"]]
        assert (refused["custom_id"], refused["response"]) == (name, None)
        assert refused["error"]["line"] == 2 and problem in refused["error"]["message"]
        good = {one["custom_id"] for one in answers if one["response"]}
        assert good == {"good", "last"}  # In the order in which they end.


def test_flags_that_do_not_go_together(files, capsys):
    write, run, _, source, _ = files
    write(line("a"))
    assert main(["run", *TOY, "--batch", str(source)]) == 2
    assert "--batch needs --out" in capsys.readouterr().err
    assert main(["run", "Hi", "--model", "toy", "--out", "x"]) == 2
    assert "--out is for --batch" in capsys.readouterr().err
    assert run("--raw") == 2
    for flag, value in (("--temperature", "0.5"), ("--max-tokens", "9"), ("--regex", "a")):
        capsys.readouterr()
        assert run(flag, value) == 2
        assert f"leave {flag} out" in capsys.readouterr().err
    assert run("--compare") == 2
    assert main(["run", *TOY, "--batch", "/nowhere", "--out", "x"]) == 2
    assert "/nowhere cannot be read" in capsys.readouterr().err
