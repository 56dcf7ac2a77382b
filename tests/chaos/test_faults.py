"""Faults against a real server process. After each it must be as a fresh one: see Real.unharmed."""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.worlds.real_server import GOLDEN, NIGHTLY, PATIENCE, Load, alive, forerun_serve, wait_for
from tests.worlds.servers import ROOT

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900)]
KILLS = 200 if NIGHTLY else 25
ACCEPTED = {
    "the chat template takes too much memory or time",
    "The messages cannot be rendered: the process that it runs in",
    "response_format cannot be compiled: the process that it runs in",
    "structured_outputs.regex cannot be compiled",
    "regex cannot be compiled: the process that it runs in",
    "The answer ended after",
}
"""Errors of a request whose own process was killed or stopped. No others."""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory, models):
    """Golden answers of a server that nothing happened to."""
    with forerun_serve(tmp_path_factory.mktemp("fresh"), models=models) as server:
        return server.answers()


@pytest.fixture
def server(tmp_path, fresh, models):
    with forerun_serve(tmp_path, models=models) as server:
        server.warm_up()
        assert server.golden == fresh
        yield server
        assert "Traceback" not in server.logged()


def clear(load):
    """No answer was wrong, no connection broke, and every refusal gave its reason."""
    assert not load.wrong and not load.broken, (load.wrong, load.broken)
    for name, _, error in load.refused:
        assert name.split()[-1] not in ("greedy", "drawn"), error
        assert any(error["message"].startswith(text) for text in ACCEPTED), (name, error)


def test_every_child_is_killed_again_and_again(server):
    clear(server.kill_children(KILLS))
    server.unharmed()


@pytest.mark.parametrize("kind", ["render_worker", "llguidance_worker", "matcher_worker"])
def test_a_child_is_stopped(tmp_path, fresh, models, kind):
    """It is given up and started anew; meanwhile requests that do not need it are served."""
    with forerun_serve(tmp_path, models=models, impatient=True) as server:
        server.warm_up()
        assert server.golden == fresh
        with Load(server, names=("apart", "chat", "new")) as needing:
            assert wait_for(lambda: server.children(kind))
            stopped = server.children(kind)
            for child in stopped:
                os.kill(child, signal.SIGSTOP)
            with Load(server, names=("greedy", "drawn")) as others:
                assert wait_for(lambda: others.done >= 20)
                # The second compiler gets what takes the first too long.
                given_up = all if kind == "llguidance_worker" else any
                assert wait_for(lambda: not given_up(map(alive, stopped))), kind
            before = needing.done
            assert wait_for(lambda: needing.done >= before + 3)
        assert not others.refused and not others.wrong and not others.broken
        clear(needing)
        server.unharmed()


def test_the_log_goes_to_a_full_disk(tmp_path, fresh, models):
    """Nothing that it serves depends on what it can write: every write fails."""

    def nothing_fits():
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    with (
        Path("/dev/full").open("w") as full,
        forerun_serve(tmp_path, models=models, stderr=full, preexec_fn=nothing_fits) as server,
    ):
        server.warm_up()
        assert server.golden == fresh
        server.unharmed()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0


def mounted(script):
    """A command in a mount namespace of its own; skips where that is not allowed."""
    command = ["unshare", "-m", "sh", "-c", script, "sh"]
    probe = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"no mount namespaces here: {probe.stderr.strip()}")
    return command


def run_forerun(prefix, cache, *words):
    line = [*prefix, sys.executable, "-m", "forerun", *words]
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    return subprocess.run(
        line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_fetching_to_a_full_or_read_only_cache(tmp_path):
    """One sentence that names the place, before anything is downloaded."""
    cache = tmp_path / "cache"
    cache.mkdir()
    for script, words in (
        (f'mount -t tmpfs -o size=64k tmpfs {cache} && exec "$@"', ("MB free", "needed")),
        (
            f'mount --bind {cache} {cache} && mount -o remount,ro,bind {cache} && exec "$@"',
            ("cannot be written",),
        ),
    ):
        done = run_forerun(mounted(script), cache, "fetch", "smollm2-135m")
        assert done.returncode == 3, done
        last = done.stderr.strip().splitlines()[-1]
        assert str(cache) in last and all(word in last for word in words), done.stderr
        assert "Traceback" not in done.stderr
    assert not list(cache.rglob("*.gguf"))


@pytest.mark.model
def test_serving_from_a_read_only_cache(tmp_path):
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    prefix = mounted(
        f'mount --bind {cache} {cache} && mount -o remount,ro,bind {cache} && exec "$@"'
    )
    done = run_forerun(prefix, cache, "run", "Hi", "--max-tokens", "3", "--temperature", "0")
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_the_clock_jumps(tmp_path, fresh, models):
    """By a month, there and back, under load. Deadlines are of the clock that never jumps."""
    library, clock = tmp_path / "clock.so", tmp_path / "clock"
    source = str(ROOT / "tests/chaos/clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), source], check=True)
    clock.write_bytes(bytes(8))
    environment = os.environ | {"LD_PRELOAD": str(library), "CLOCK_OFFSET": str(clock)}
    with forerun_serve(tmp_path, models=models, env=environment) as server:
        server.warm_up(1)
        assert server.golden == fresh
        created = []
        with Load(server) as load:
            for days in (30, -30, 0, 3650, -1):
                with clock.open("r+b") as file:  # Not cut to nothing in between.
                    file.write((days * 86400).to_bytes(8, "little", signed=True))
                before = load.done
                assert wait_for(lambda before=before: load.done >= before + 12)
                route, body = GOLDEN["greedy"]
                created.append(server.post(route, body).json()["created"])
        assert created[0] - created[1] > 59 * 86400, "the clock did not jump"
        assert not load.wrong and not load.broken and not load.refused, load.refused
        server.unharmed(memory=False)


@pytest.mark.parametrize("names", [tuple(GOLDEN), ("greedy", "drawn")])
def test_sigterm_under_load(server, names):
    """Every request gets the whole answer, or an error; the process ends with 0 and leaves no
    child.
    """
    with Load(server, clients=6, names=names) as load:
        assert wait_for(lambda: load.done >= 12 and server.load()["running"])
        children = [*server.own()[1:], *server.children()]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(PATIENCE) == 0
    assert not load.wrong
    assert {(status, error["code"]) for _, status, error in load.refused} <= {
        (503, "shutting_down")
    }
    assert wait_for(lambda: not any(map(alive, children)))


def test_the_server_itself_is_killed(server):
    """Its children notice and end."""
    with Load(server) as load:
        assert wait_for(lambda: load.done >= 12 and server.children("matcher_worker"))
        children = [*server.own()[1:], *server.children()]
        server.process.kill()
        server.process.wait(PATIENCE)
    assert not load.wrong and len(children) >= 3
    assert wait_for(lambda: not any(map(alive, children)))


def test_an_engine_is_killed_beside_another_model(tmp_path):
    """The other model's clients never notice; its own get errors, until it is loaded anew."""
    with forerun_serve(tmp_path, models=2) as server:
        server.warm_up()
        pids = server.http.get("/health").json()["engine_pids"]
        names, theirs = ("greedy", "drawn", "chat", "schema"), ("other greedy", "other chat")
        with (
            Load(server, names=names, everywhere=False) as untouched,
            Load(server, clients=2, names=theirs, everywhere=False) as hurt,
        ):
            for turn in range(5 if not NIGHTLY else 40):
                engine = server.http.get("/health").json()["engine_pids"]
                assert engine["toy"] == pids["toy"]
                os.kill(engine["other"], signal.SIGKILL)
                before = hurt.done - len(hurt.refused), untouched.done
                assert wait_for(lambda b=before[0]: hurt.done - len(hurt.refused) >= b + 6), turn
                assert wait_for(lambda b=before[1]: untouched.done >= b + 6), turn
        assert not untouched.wrong and not untouched.refused and not untouched.broken
        assert not hurt.wrong and not hurt.broken and hurt.refused
        assert {error["code"] for _, _, error in hurt.refused} <= {"engine_stopped"}
        assert server.answers() == server.golden
        assert wait_for(lambda: not server.held())


def test_two_models_of_which_one_fits(tmp_path):
    """Each request for one lets the other go, if that does not answer; engines are killed."""
    flags = ("--max-loaded-models", "1", "--unload-after", "2")
    with forerun_serve(tmp_path, *flags, models=2) as server:
        server.golden = server.answers()
        assert all(status == 200 for status, _ in server.golden.values()), server.golden
        with Load(server, clients=3) as load:
            for turn in range(8 if not NIGHTLY else 80):
                before = load.done - len(load.refused)
                assert wait_for(lambda b=before: load.done - len(load.refused) >= b + 12), turn
                pids = server.http.get("/health").json()["engine_pids"]
                assert len(pids) <= 1
                if turn % 2:
                    for pid in filter(None, pids.values()):
                        os.kill(pid, signal.SIGKILL)
        assert not load.wrong and not load.broken, (load.wrong, load.broken)
        assert {error["code"] for _, _, error in load.refused} <= {"no_room", "engine_stopped"}
        assert server.answers() == server.golden
        assert wait_for(lambda: not server.held())
        assert wait_for(lambda: not server.children("engine", helpers=False)), "none is let go"
        assert "Traceback" not in server.logged()


@pytest.mark.model
def test_the_default_model_survives_the_same(tmp_path):
    names = ("greedy", "chat", "regex")
    with forerun_serve(tmp_path, "--model", "smollm2-135m") as server:
        server.golden = {name: server.answer(name) for name in names}
        assert all(status == 200 for status, _ in server.golden.values())
        with Load(server, names=names) as load:
            for _ in range(5):
                for child in server.children():
                    os.kill(child, signal.SIGKILL)
                before = load.done
                assert wait_for(lambda before=before: load.done >= before + 4)
        clear(load)
        assert wait_for(lambda: not server.held()) and server.healthy()
        assert {name: server.answer(name) for name in names} == server.golden
        assert wait_for(lambda: not server.held())
        with pytest.raises(httpx.HTTPStatusError):
            server.post("/v1/completions", {"prompt": 3}).raise_for_status()
