"""The load generator against a server that is scripted to the byte."""

import asyncio
import json
import threading
from contextlib import contextmanager, nullcontext
from math import inf

import httpx
import numpy as np
import pytest

from forerun.cli import bench
from forerun.cli.main import INTERRUPTED, main
from forerun.errors import ConfigError
from forerun.measure import report
from forerun.measure.client import Endpoint, Timing, body_of, find_model, load_level
from forerun.measure.workload import read_prompts
from forerun.options.config import SamplingConfig

PROMPT = read_prompts()[0]
PAUSE = 0.02


class Script:
    """Speaks just enough HTTP. Requests whose text begins with FAIL, CUT or SILENT are
    mistreated.
    """

    def __init__(self):
        self.bodies, self.flying, self.most, self.headers = [], 0, 0, []
        self.routes, self.pause, self.field = [], PAUSE, "content"

    async def handle(self, reader, writer):
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                length = [int(x.split(":")[1]) for x in head.lower().splitlines() if "length" in x]
                body = json.loads(await reader.readexactly(length[0])) if length else None
                self.headers.append(head)
                if not await self.answer(writer, body):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, writer, body):
        if body is None:
            text = json.dumps({"data": [{"id": "scripted"}]})
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
            return True
        self.bodies.append(body)
        text = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        self.routes.append(self.headers[-1].split()[1])
        if text.startswith("FAIL"):
            writer.write(b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nbusy")
            return True
        self.flying += 1
        self.most = max(self.most, self.flying)
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n: keep-alive\n\n")
        silent = text.startswith("SILENT")
        for piece in ("",) if silent else ("", "one", " two three", " four"):
            await asyncio.sleep(self.pause)
            choice = {"text": piece} if "prompt" in body else {"delta": {self.field: piece}}
            self.event(writer, {"choices": [{"index": 0} | choice]})
            await writer.drain()
        self.flying -= 1
        if silent:
            ended = {"index": 0, "delta": {}, "finish_reason": "stop"}
            self.event(writer, {"choices": [ended]})
            self.event(writer, {"choices": [], "usage": {"completion_tokens": 1}})
        elif not text.startswith("CUT"):
            usage = {"completion_tokens": 4, "prompt_tokens": self.count(text)}
            self.event(writer, {"choices": [], "usage": usage})
            writer.write(b"data: [DONE]\n\n")
        await writer.drain()
        return False

    def count(self, text):
        """Two tokens a word, and seven of a template."""
        return 7 + 2 * len(text.split())

    def event(self, writer, value):
        writer.write(b"data: " + json.dumps(value).encode() + b"\n\n")


@contextmanager
def scripted():
    script, ready, ended, place = Script(), threading.Event(), asyncio.Event(), []

    async def serve():
        place.append(asyncio.get_running_loop())
        server = await asyncio.start_server(script.handle, "127.0.0.1", 0)
        place.append(server.sockets[0].getsockname()[1])
        ready.set()
        await ended.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(60)
    try:
        yield script, f"http://127.0.0.1:{place[1]}/v1"
    finally:
        place[0].call_soon_threadsafe(ended.set)
        thread.join()


def load(url, texts, at_once=1, key=""):
    bodies = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    return asyncio.run(load_level(Endpoint(url, "m", key), bodies, at_once))


def test_times_and_tokens_are_those_that_were_sent():
    with scripted() as (_, url):
        (timing,), seconds = load(url, ["hello"])
    assert timing.error is None
    assert timing.tokens == 4
    assert len(timing.arrivals) == 3
    # A piece cannot come before it was sent; a busy machine may bring two at once.
    for number, arrival in enumerate(timing.arrivals, 2):
        assert arrival >= number * PAUSE * 0.9
    assert timing.per_token == pytest.approx(sum(timing.gaps) / 3)
    assert timing.first < timing.total <= seconds


def test_reasoning_is_text_too():
    """Usage counts its tokens: an answer that is cut while the model thinks is no empty one."""
    for name in ("reasoning_content", "reasoning"):
        with scripted() as (script, url):
            script.field = name
            (timing,), _ = load(url, ["hello"])
        assert timing.error is None and len(timing.arrivals) == 3 and timing.tokens == 4


def test_concurrency_is_kept_and_not_exceeded():
    with scripted() as (script, url):
        timings, _ = load(url, ["x"] * 10, at_once=3)
    assert len(timings) == 10
    assert script.most == 3


def test_errors_are_counted_and_do_not_stop_the_others():
    with scripted() as (_, url):
        timings, seconds = load(url, ["FAIL", "x", "CUT"], at_once=2)
    level = report.one_repeat("on", 2, timings, seconds)
    assert level.errors == 1 and level.requests == 3
    assert "429" in level.first_error and "busy" in level.first_error
    # The one that was cut short sent no usage: its three pieces are counted.
    assert level.tokens == 4 + 3
    assert level.throughput == pytest.approx(7 / seconds)
    failed = asyncio.run(load_level(Endpoint("http://127.0.0.1:9/v1", "m"), [{}], 1))[0]
    assert "Connect" in failed[0].error


def test_an_answer_without_text_says_how_it_ended():
    """A model of random weights may stop at once: nothing can be timed, and nothing is broken."""
    with scripted() as (_, url):
        (timing,), _ = load(url, ["SILENT"], at_once=1)
    assert timing.error.startswith(
        "the answer was empty (1 token without text, finish_reason stop)"
    )
    assert "--ignore-eos" in timing.error and timing.tokens == 1


def test_the_key_goes_along_and_the_model_is_found():
    with scripted() as (script, url):
        load(url, ["x"], key="secret")
        assert "authorization: bearer secret" in script.headers[-1].lower()
        assert find_model(url, "", None) == "scripted"
        assert find_model(url, "", "mine") == "mine"
    for wrong in ("http://[::1", "http://127.0.0.1:abc/v1"):
        for wanted in ("mine", None):
            with pytest.raises(ConfigError, match="is no address: "):
                find_model(wrong, "", wanted)
        assert main(["bench", "--url", wrong]) == 2
    with pytest.raises(ConfigError, match="does not list its models"):
        find_model("http://127.0.0.1:9/v1", "", None)


def test_a_server_that_still_loads_is_no_wrong_address(monkeypatch):
    body = {"error": {"message": "The model is still loading."}}
    monkeypatch.setattr(httpx, "get", lambda *_, **__: httpx.Response(503, json=body))
    with pytest.raises(ConfigError, match=r"answers nothing yet: The model is still loading\."):
        find_model("http://127.0.0.1:9/v1", "", None)


def test_bodies_are_plain_openai_by_default():
    plain = body_of(PROMPT, "m", SamplingConfig(max_tokens=5), None)
    assert set(plain) == {
        "model", "messages", "max_tokens", "temperature", "top_p", "seed", "stream",
        "stream_options",
    }  # fmt: skip
    ask = SamplingConfig(top_k=4, ignore_eos=True, stop=("a",))
    more = body_of(PROMPT, "m", ask, {"enabled": False})
    assert (more["top_k"], more["ignore_eos"], more["stop"]) == (4, True, ["a"])
    assert more["speculative"] == {"enabled": False}


def repeat_of(*seconds):
    timings = [Timing([s, s + 0.1], 2, s + 0.1) for s in seconds]
    return report.one_repeat("on", 1, timings, 1.0)


def test_medians_are_over_repeats_and_percentiles_over_requests():
    assert report.percentiles([0.001 * i for i in range(101)]) == pytest.approx(
        {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    )
    assert report.percentiles([]) == {}
    merged = report.median_of([repeat_of(1.0), repeat_of(3.0), repeat_of(100.0)])
    assert merged.first_ms["p50"] == pytest.approx(3000.0)
    assert merged.requests == 3
    assert merged.per_token_ms["p50"] == pytest.approx(100.0)


def test_the_command_prints_json(capsys):
    line = ["--concurrency", "1,2", "--requests", "4", "--repeats", "2"]
    with scripted() as (script, url):
        assert main(["bench", "--url", url, *line, "--max-tokens", "4", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["model"] == "scripted"
    assert [(level["at_once"], level["requests"]) for level in result["levels"]] == [(1, 8), (2, 8)]
    assert all(level["throughput"] > 0 for level in result["levels"])
    assert script.most == 2
    # No two prompts are equal, or a prefix cache would answer for some.
    texts = [body["messages"][0]["content"] for body in script.bodies]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(("whole", "levels"), [(5, [1, 1]), (0, [])])
def test_interrupted_it_shows_the_repeats_that_are_whole(whole, levels, capsys, monkeypatch):
    """Two of both sides and one of one; nothing whole is nothing shown."""
    real, begun, handlers = bench.load_level, [], []

    async def load_level(endpoint, bodies, at_once, report=None, rate=inf):
        begun.append(at_once)
        if report is None:  # Warming up.
            return await real(endpoint, bodies, at_once)
        if len(begun) == 2 + whole + 1:
            raise KeyboardInterrupt
        return await real(endpoint, bodies, at_once, report, rate)

    def say(what, done, total):
        handlers.append(what)

    monkeypatch.setattr(bench, "load_level", load_level)
    monkeypatch.setattr(bench, "bars", lambda: nullcontext(say))
    line = ["--speculative", "both", "--concurrency", "1,2", "--requests", "2", "--json"]
    with scripted() as (_, url):
        assert main(["bench", "--url", url, *line, "--max-tokens", "2"]) == INTERRUPTED
    out = capsys.readouterr().out
    shown = json.loads(out)["levels"] if out else []
    assert [level["at_once"] for level in shown] == levels
    assert all(level["requests"] == 4 for level in shown)
    runs = [f", run {number} of 12" for number in range(1, whole + 1)]
    assert [what for what in dict.fromkeys(handlers) if not what.endswith(tuple(runs))] == []


@pytest.mark.parametrize(
    ("head", "body", "hint"),
    [("503 No", "", False), ("400 No", '{"error": {"code": "no_chat_template"}}', True)],
)
def test_failures_are_said_and_are_exit_code_one(tmp_path, capsys, head, body, hint):
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "x"}')
    with scripted() as (script, url):

        async def refuse(writer, _):
            response = f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\n\r\n{body}"
            writer.write(response.encode())
            return True

        script.answer = refuse
        line = ["--model", "m", "--repeats", "1", "--concurrency", "1", "--prompts", str(prompts)]
        assert main(["bench", "--url", url, *line]) == 1
    out, err = capsys.readouterr()
    assert f"8 of 8 requests failed, first: HTTP {head[:3]}" in err
    assert ("measured with --completions" in err) == hint
    assert "m at http://127.0.0.1" in out


def test_made_requests_have_the_lengths_that_were_wished_for(capsys):
    line = ["--input-len", "300", "--output-len", "50", "--range-ratio", "0.5", "--requests", "12"]
    line += ["--concurrency", "4", "--repeats", "1", "--completions", "--json"]
    with scripted() as (script, url):
        script.pause = 0.0
        assert main(["bench", "--url", url, *line]) == 0
    (level,) = json.loads(capsys.readouterr().out)["levels"]
    assert set(script.routes) == {"/v1/completions"}
    bodies = script.bodies[-12:]
    prompts = [script.count(body["prompt"]) for body in bodies]
    answers = [body["max_tokens"] for body in bodies]
    assert all(150 - 20 <= tokens <= 300 for tokens in prompts) and max(prompts) > 200
    assert all(25 <= tokens <= 50 for tokens in answers) and len(set(answers)) > 5
    assert all(body["ignore_eos"] for body in bodies)
    assert (level["requests"], level["prompt_tokens"]) == (12, sum(prompts))
    assert level["answers_per_second"] > 0
    assert len({body["prompt"][:30] for body in script.bodies}) == len(script.bodies)


def test_requests_come_at_the_rate_that_was_wished_for(capsys):
    """Whatever the answers take: each begins at its time, or later on a busy machine."""
    line = ["--rate", "100", "--requests", "10", "--repeats", "1", "--json"]
    with scripted() as (script, url):
        script.pause = 0.05
        assert main(["bench", "--url", url, *line]) == 0
    (level,) = json.loads(capsys.readouterr().out)["levels"]
    assert (level["at_once"], level["requests"]) == (10, 10)
    assert script.most > 1
    gaps = np.random.default_rng(10).exponential(1 / 100, 10)
    assert 10 / level["answers_per_second"] >= gaps.sum() + 4 * 0.05


def test_both_sides_are_compared_pair_by_pair(capsys):
    line = ["--speculative", "both", "--requests", "2", "--concurrency", "2", "--repeats", "2"]
    with scripted() as (script, url):
        script.pause = 0.0
        assert main(["bench", "--url", url, *line]) == 0
        assert main(["bench", "--url", url, *line, "--repeats", "1"]) == 0
    several, one = capsys.readouterr().out.split("on over off, 2 at once: ")[1:]
    assert "50% sure" in several.splitlines()[0]
    assert "of one pair" in one


@pytest.mark.parametrize(
    ("flags", "tokens", "why"),
    [
        ("--input-len 100", 0, "--input-len needs a server that counts prompt tokens"),
        ("--input-len 100", 64, "of a length in tokens cannot be made for it"),
        ("--range-ratio 0.5", 9, "--range-ratio needs --input-len or --output-len"),
    ],
)
def test_prompts_of_a_length_that_cannot_be_made(flags, tokens, why, capsys):
    """The server counts so many tokens, whatever it is sent."""
    with scripted() as (script, url):
        script.count = lambda text: tokens
        assert main(["bench", "--url", url, *flags.split()]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--rate", "0"], "is not a number above 0, or inf"),
        (["--rate", "nan"], "is not a number above 0, or inf"),
        (["--range-ratio", "1.5"], "is above 1"),
        (["--input-len", "0"], "is not a positive whole number"),
    ],
)
def test_lengths_and_rates_that_cannot_be(flags, why, capsys):
    assert main(["bench", "--url", "http://127.0.0.1:9", *flags]) == 2
    assert why in capsys.readouterr().err


def test_settings_of_speculation_are_compared_by_tune(capsys):
    assert main(["bench", "--speculative-grid", "--model", "toy"]) == 2
    printed = capsys.readouterr().err
    assert "no option --speculative-grid of forerun bench; forerun tune compares" in printed


def test_what_the_environment_says_of_engines_is_not_for_a_server_elsewhere(
    capsys, monkeypatch, tmp_path
):
    monkeypatch.setenv("FORERUN_CONTEXT", "4096")
    (tmp_path / "engine.yaml").write_text("page-size: 32")
    line = ["bench", "--url", "http://127.0.0.1:9"]
    assert main(line) == 2
    assert "does not list its models" in capsys.readouterr().err
    assert main([*line, "--config", str(tmp_path / "engine.yaml")]) == 2
    assert "page-size in" in capsys.readouterr().err


def test_a_second_run_has_other_prompts(capsys):
    """Or the first one's would be in the server's prefix cache."""
    line = ["--requests", "2", "--concurrency", "1", "--repeats", "1", "--json"]
    with scripted() as (script, url):
        script.pause = 0.0
        for _ in range(2):
            assert main(["bench", "--url", url, *line, "--input-len", "300"]) == 0
    texts = [body["messages"][0]["content"] for body in script.bodies]
    measured = [text for text in texts if text.startswith("Request")]
    assert len({text[:15] for text in measured}) == 2
