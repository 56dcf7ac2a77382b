"""A real `forerun serve` process, the load that runs on it, and what must hold after a fault."""

import itertools
import json
import os
import signal
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import httpx

from tests.worlds import servers
from tests.worlds.servers import HELD, Server, alive, status

NIGHTLY = os.environ.get("CHAOS") == "nightly"
"""The longer profile, `make chaos-nightly`."""

PATIENCE = 300.0
"""Seconds for what should come soon: everything here competes with the load that it makes."""


def wait_for(check, seconds=PATIENCE):
    """See tests.worlds.servers.wait_for."""
    return servers.wait_for(check, seconds)


PLAIN_TEMPLATE = (
    "{# Not one of the known: it runs in a process of its own. #}"
    "{% for message in messages %}{{ message['role'] + ': ' + (message['content'] or '') + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
MANY = {
    "type": "object",
    "properties": {f"field{i}": {"type": "integer", "maximum": 99} for i in range(400)},
    "additionalProperties": False,
}
"""So many optional keys that the grammar is followed in a process of its own."""
OTHER_TEMPLATE = PLAIN_TEMPLATE.replace("': '", "'> '")
"""Of the second model, which is the same but for what its chats begin with."""
DENSE = {str(ord(blank)): -100 for blank in "\t\n\r "}
CHAT = {"messages": [{"role": "user", "content": "Which city?"}]}


def strict(schema):
    wrapped = {"name": "x", "strict": True, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": wrapped}}


GOLDEN = {
    "greedy": ("/v1/completions", {"prompt": "Hi", "temperature": 0, "max_tokens": 48}),
    "drawn": (
        "/v1/completions",
        {"prompt": "So", "temperature": 0.8, "top_p": 0.9, "seed": 5, "n": 2, "max_tokens": 24},
    ),
    "chat": ("/v1/chat/completions", {**CHAT, "temperature": 0, "max_tokens": 24}),
    "schema": (
        "/v1/chat/completions",
        {**CHAT, **strict(PERSON), "temperature": 0, "max_tokens": 60, "logit_bias": DENSE},
    ),
    "regex": ("/v1/completions", {"prompt": "A", "regex": "(ab|cd){2,5}", "temperature": 0}),
    "apart": (
        "/v1/chat/completions",
        {**CHAT, **strict(MANY), "temperature": 0, "max_tokens": 12, "logit_bias": DENSE},
    ),
}
"""Name -> route and body of the requests whose answers must never change."""


TWO = ("toy", "other")

_numbers = itertools.count()


def new(number: int):
    """Route and body of a request with a grammar that was never compiled."""
    pattern = f"(ab|cd){{2,5}}|q{number}n{next(_numbers)}"
    return "/v1/completions", {"prompt": "A", "regex": pattern, "temperature": 0}


class Real(Server):
    """A `forerun serve` process of one model, or of two: "toy" and "other".

    models    their names; none where it serves one
    requests  the golden ones by name, those to the second model as "other NAME"
    golden    their answers, as `answer` gives them
    warm      bytes in use when it had given them
    memory_report  a pipe of its memory: see serve_measured
    """

    models: tuple[str, ...] = ()
    golden: dict[str, object]
    warm: int
    memory_report: IO[bytes]

    @property
    def requests(self):
        if not self.models:
            return GOLDEN
        return {
            prefix + name: (route, body | {"model": model})
            for prefix, model in zip(("", "other "), self.models, strict=True)
            for name, (route, body) in GOLDEN.items()
        }

    def named(self, names):
        """Return names of requests to every model."""
        return [*names, *(f"other {name}" for name in names if self.models and name in GOLDEN)]

    def answer(self, name: str):
        """What is constant of an answer: status, and choices and usage where it is one. Asked
        again where it says "try again later": other work on the machine may be at fault.
        """
        route, body = self.requests[name]
        texts = []
        assert wait_for(lambda: texts.append(self.http.post(route, json=body)) or not busy(texts))
        return constant(texts[-1], body)

    def answers(self):
        return {name: self.answer(name) for name in self.requests}

    def load(self, **named):
        """What the engines of all loaded models hold together, by their own account."""
        if named or not self.models:
            return super().load(**named)
        loads = [super(Real, self).load(model=model) for model in self.models]
        return {name: sum(load[name] for load in loads) for name in HELD}

    def resident(self) -> int:
        """Bytes of memory that are its own."""
        return sum(map(resident, self.own()))

    def in_use(self) -> int:
        """Bytes of memory that it uses, those not counted which malloc keeps for later."""
        total = 0
        for pid in self.own():
            os.kill(pid, signal.SIGUSR1)
            total += int(self.memory_report.readline())
        return total

    def processor_seconds(self) -> float:
        """That it has used, its helpers' not counted."""
        times = [int(ticks) for pid in self.own() for ticks in status(pid)[11:13]]
        return sum(times) / os.sysconf("SC_CLK_TCK")

    def files(self) -> int:
        return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in self.own())

    def threads(self) -> int:
        return sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in self.own())

    def warm_up(self, rounds: int = 3) -> None:
        """Remember golden answers and what memory it takes to give them."""
        self.golden = self.answers()
        assert all(status == 200 for status, _ in self.golden.values()), self.golden
        for _ in range(rounds):
            with Load(self) as load:
                assert wait_for(lambda load=load: load.done >= 60)
            assert not load.wrong and not load.refused, (load.wrong, load.refused)
        assert wait_for(lambda: not self.held())
        self.warm = self.in_use()

    def kill_children(self, times: int, names=tuple(GOLDEN)) -> "Load":
        """Under load, all that there are; each time some answers later. The load that ran."""
        with Load(self, names=names) as load:
            for _ in range(times):
                assert wait_for(self.children)
                for child in self.children():
                    with suppress(ProcessLookupError):
                        os.kill(child, signal.SIGKILL)
                before = load.done
                assert wait_for(lambda before=before: load.done >= before + 6)
        return load

    def unharmed(self, memory: bool = True) -> None:
        """After a fault: healthy, the golden answers, nothing held, memory back within 5 %."""
        assert wait_for(self.healthy), self.logged()
        assert wait_for(lambda: not self.held()), self.load()
        answers = self.answers()
        assert answers == self.golden, (answers, self.golden)
        assert wait_for(lambda: not self.held())
        assert wait_for(lambda: not self.children("matcher_worker"))
        if memory:
            assert wait_for(lambda: self.in_use() <= 1.05 * self.warm, 60), (
                self.in_use(),
                self.warm,
            )


class Load:
    """Clients that ask golden requests without a pause, whole, until they are stopped. The name
    "new" stands for a grammar that is new to the server.

    everywhere  every model gets what `names` say

    done     answers so far
    wrong    answers with status 200 that are not the golden ones
    refused  (name, status, error) of the others, but for those that came too many at once
    broken   connections that failed
    """

    def __init__(self, server: Real, clients: int = 4, names=tuple(GOLDEN), everywhere=True):
        self.server, self.names = server, server.named(names) if everywhere else names
        self.done, self.wrong, self.refused, self.broken = 0, [], [], []
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask, args=(n,), daemon=True) for n in range(clients)
        ]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE)
            assert not thread.is_alive(), "a client waits for ever"

    def _ask(self, number: int) -> None:
        with httpx.Client(base_url=self.server.root, timeout=PATIENCE, trust_env=False) as http:
            while not self._stop.is_set():
                name = self.names[number % len(self.names)]
                number += 1
                route, body = self.server.requests.get(name) or new(number)
                try:
                    status, parts = constant(http.post(route, json=body), body)
                except httpx.TransportError as error:
                    self.broken.append((name, repr(error)))
                    continue
                self.done += 1
                if status != 200:
                    self.refused += [(name, status, parts)] if status != 429 else []
                elif name in self.server.requests and (status, parts) != self.server.golden[name]:
                    self.wrong.append((name, parts))


def busy(answers: list[httpx.Response]) -> bool:
    return answers[-1].status_code == 429 or "worker_process_lost" in answers[-1].text


def constant(response: httpx.Response, request):
    """Status, and what does not change from one time to the next, of the model of the request."""
    body = response.json()
    if response.status_code != 200:
        return response.status_code, body["error"]
    assert body["model"] == request.get("model", body["model"])
    usage = {k: v for k, v in body["usage"].items() if k in ("prompt_tokens", "completion_tokens")}
    return 200, (body["choices"], usage)


def resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def served(tmp_path, models: int):
    """Return the flags of one toy model, or of two in a file."""
    for name, template in (("toy", PLAIN_TEMPLATE), ("other", OTHER_TEMPLATE)):
        (tmp_path / f"{name}.jinja").write_text(template)
    if models == 1:
        return ["--model", "toy", "--chat-template", str(tmp_path / "toy.jinja")]
    both = {n: {"model": "toy", "chat-template": f"{tmp_path}/{n}.jinja"} for n in TWO}
    (tmp_path / "models.yaml").write_text(json.dumps(both))
    return ["--models-file", str(tmp_path / "models.yaml")]


@contextmanager
def forerun_serve(tmp_path, *flags, models=1, stderr=None, impatient=False, measured=True, **popen):
    """The command itself, loaded and answering. See serve_measured; without `measured` it cannot
    say what memory it uses.

    models  1 or 2 toys, where `flags` name no model
    """
    receiver, tell = os.pipe()
    if measured:
        module = ["tests.chaos.serve_measured", str(tell), *["--impatient"][:impatient]]
        environment = popen.get("env", os.environ) | {"PYTHONMALLOC": "malloc"}
        popen |= {"env": environment, "pass_fds": (tell,)}
    else:
        module = ["forerun"]
    line = [sys.executable, "-m", *module, "serve", *flags]
    if "--model" not in flags:
        line += served(tmp_path, models)
    children: list[int] = []
    popen |= {"stderr": stderr} if stderr else {}
    with (
        os.fdopen(receiver, "rb") as answers,
        servers.started(line, tmp_path / "server.log", False, **popen) as running,
    ):
        os.close(tell)
        try:
            server = Real(running.process, running.url, running.log)
            server.memory_report, server.models = answers, TWO if models == 2 else ()
            assert wait_for(server.healthy), server.logged()
            yield server
            if server.process.poll() is None:
                children = [*server.own()[1:], *server.children()]
        finally:
            for child in children:
                with suppress(ProcessLookupError):
                    os.kill(child, signal.SIGCONT)
    assert wait_for(lambda: not any(map(alive, children))), "a child outlives the server"
