"""Asking whether a server is up, while it measures what its steps cost."""

import json
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench import never_slower, records, steps, structured_output
from forerun.build import engine
from forerun.errors import ConfigError
from forerun.measure import launch
from forerun.measure.launch import healthy
from forerun.measure.paired import median_interval
from forerun.measure.workload import labelled, read_prompts, spread
from forerun.options.config import EngineConfig
from tests.counted import lines


@contextmanager
def saying(answer):
    """The port of a server that says `answer` to every client, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            connection, _ = listening.accept()
            with connection:
                connection.recv(1024)
                connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listening.getsockname()[1]
        thread.join(10)


@pytest.mark.parametrize(
    ("answer", "up"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", True),
        (b"HTTP/1.1 503 Loading\r\nContent-Length: 0\r\n\r\n", False),
        (b"", False),
        (b"what?\r\n\r\n", False),
    ],
)
def test_a_server_is_up_once_it_says_so(answer, up):
    with saying(answer) as port:
        assert healthy(port) is up


def test_asking_a_server_that_does_not_listen_is_next_to_no_work():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # No server listens.
        port = taken.getsockname()[1]
        assert not healthy(port)
        # 197; a client of httpx made for the question takes 1,527, and 18 ms instead of 0.03.
        assert lines(lambda: healthy(port)) < 400


def test_a_launched_server_has_the_options_of_its_command_line_alone(monkeypatch):
    """What the environment says is in that line, and a key or an address would lock bench out."""
    for name in ("FORERUN_API_KEY", "FORERUN_POLICY", "LLAMA_ARG_HOST", "VLLM_API_KEY", "HF_HOME"):
        monkeypatch.setenv(name, "x")
    begun = []

    class Process:
        def __init__(self, line, env, **how):
            begun.append(env)

        def terminate(self):
            pass

        def wait(self, seconds):
            pass

    monkeypatch.setattr(launch.subprocess, "Popen", Process)
    monkeypatch.setattr(launch, "_came_up", lambda port, process: True)
    with launch.launched(EngineConfig(model="toy")):
        pass
    (env,) = begun
    assert env["HF_HOME"] == "x" and "PATH" in env
    assert not [name for name in env if name.startswith(("FORERUN", "LLAMA", "VLLM"))]


# --- scripts of bench/ that take the engine apart run on the toy, as far as they name what th ----


@pytest.fixture
def argv(monkeypatch):
    """Sets the arguments; what the script puts in an engine's place is undone."""
    monkeypatch.setattr(engine, "ngram_drafter", engine.ngram_drafter)
    return lambda *words: monkeypatch.setattr(sys, "argv", ["bench", *map(str, words)])


@pytest.mark.parametrize("adversary", [False, True])
def test_speculation_and_none_in_pairs(argv, tmp_path, adversary):
    out, more = tmp_path / "out.json", ["--adversary"] * adversary
    argv(2, "--model", "toy", "--rounds", 2, "--prompts", 1, "--tokens", 8, "--out", out, *more)
    assert never_slower.main() == 0
    report = json.loads(out.read_text())
    assert report["same_tokens"] and report["machine"] and report["command"][1] == "2"
    (row,) = report["rows"]
    assert len(row["ratios"]) == 2
    assert not adversary or row["tokens_per_step"] == 1.0


def test_structured_output_by_kind(argv, monkeypatch, tmp_path):
    out, every = tmp_path / "out.json", structured_output.SPEED
    monkeypatch.setattr(structured_output, "SPEED", {k: every[k] for k in ("choice", "schema")})
    argv("speed", "--model", "toy", "--tokens", 6, "--requests", 1, "--out", out)
    structured_output.main()
    rows = json.loads(out.read_text())["rows"]
    assert [row["kind"] for row in rows] == ["choice", "schema"]
    assert all(row["constrained on"]["grammar_ms_per_step"] > 0 for row in rows)


@pytest.mark.parametrize("name", ["steps_onnx", "steps_llamacpp", "server_openvino"])
def test_a_peers_script_tells_its_arguments_without_the_peer(name):
    script = Path(__file__).parents[2] / "bench" / "peers" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, script, "--help"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "") and "usage:" in done.stdout


def test_an_error_of_forerun_ends_a_script_in_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["steps.py", "nosuchmodel", "--nodes", "1"])
    with pytest.raises(SystemExit) as ended:
        records.ended(steps.main)
    printed = capsys.readouterr().err
    assert ended.value.code == 2 and printed.startswith("there is no model 'nosuchmodel'")
    assert "Traceback" not in printed


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (None, 7)])
def test_how_a_script_ends(error, code):
    def main():
        if error:
            raise error
        return code

    with pytest.raises(SystemExit) as ended:
        records.ended(main)
    assert ended.value.code == code


# --- workload ------------------------------------------------------------------------------------


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


def test_spread_takes_its_count_or_refuses():
    prompts = read_prompts()
    assert spread(prompts, None) == prompts
    assert spread(prompts, 1) == prompts[:1]
    for count in (0, len(prompts) + 1):
        with pytest.raises(ConfigError, match="prompts cannot be taken of"):
            spread(prompts, count)


# --- the interval around a median of ratios ------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "ranks", "confidence"),
    [(1, (1, 1), 0.0), (3, (1, 3), 0.75), (6, (1, 6), 0.96875), (15, (4, 12), 0.96484375),
     (20, (6, 15), 0.958610534667969), (25, (8, 18), 0.956714332103729)],
)  # fmt: skip
def test_ranks_are_those_of_the_tables(count, ranks, confidence):
    values = [float(value) for value in range(count, 0, -1)]
    interval = median_interval(values)
    assert (interval.low, interval.high) == ranks and interval.middle == (count + 1) / 2
    assert interval.confidence == pytest.approx(confidence)


def test_nothing_has_no_median():
    with pytest.raises(ValueError, match="no values"):
        median_interval([])
