import json

import pytest

from forerun.errors import ConfigError
from forerun.measure.workload import labelled, read_prompts, spread


def test_messages_and_plain_prompts_are_read(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "Hi"},
        {"id": "x", "kind": "k", "messages": [{"role": "user", "content": "Ho"}]},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    first, second = read_prompts(path)
    assert first.messages == ({"role": "user", "content": "Hi"},)
    assert (second.id, second.kind, second.text) == ("x", "k", "Ho")
    assert labelled(second, "7. ").text == "7. Ho"
    assert second.text == "Ho"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is not an object"),
        ("[" * 5000, "line 2 is not JSON"),
        ("{}", "line 2 needs"),
        ('{"messages": []}', "line 2 needs"),
        ('{"messages": [{"role": "user"}]}', "line 2 needs"),
        ('{"messages": ["hi"]}', "line 2 needs"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, complaint):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(ConfigError, match=complaint):
        read_prompts(path)


def test_a_line_ends_where_json_lines_do(tmp_path):
    path = tmp_path / "prompts.jsonl"
    line = json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False)
    path.write_text(line + "\r\n", encoding="utf-8-sig")
    (prompt,) = read_prompts(path)
    assert prompt.text == "a\u2028b\x85c"


def test_files_that_hold_nothing_or_are_not_there(tmp_path):
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name in ("empty", "binary", "missing"):
        with pytest.raises(ConfigError, match=name):
            read_prompts(tmp_path / name)


def test_spread_takes_what_was_asked_or_refuses():
    prompts = read_prompts()
    assert spread(prompts, None) == prompts
    assert spread(prompts, 1) == prompts[:1]
    for count in (0, len(prompts) + 1):
        with pytest.raises(ConfigError, match="prompts cannot be taken of"):
            spread(prompts, count)
