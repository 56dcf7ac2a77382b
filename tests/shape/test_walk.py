"""How far a newcomer has to walk with one token. The limits shrink; only a decision record raises
one. decision 0024 says what each file is opened for.

The walk through captured rounds with a draft head is counted in
tests/parity/test_overlap.py, where the device is emulated.
"""

from contextlib import closing

import pytest
from starlette.testclient import TestClient

from forerun.build.engine import encode_chat, load, make_engine
from forerun.build.target import open_target
from forerun.client.completion import make_request
from forerun.options.config import EngineConfig, ServeSettings
from forerun.serve.app import create_app
from tests.shape.walk import Walk

FILES, STATEMENTS = 18, 1_970
"""Of decoding steps with n-gram drafts on the compiled core, from plan to the last delta: that the
engine then proves that nothing leaked (engine/check.py) is no part of a token's life.
"""

CHAT_FILES, CHAT_STATEMENTS = 53, 6_590
"""Of a plain chat that is streamed, from body to last event, with the engine in the server's
process: the second of its server, so that nothing is loaded on the way.
"""


@pytest.mark.model
def test_the_walk_on_the_cpu_is_short(capsys):
    with closing(open_target(EngineConfig())) as target:
        engine = make_engine(target, target.config)
        messages = [{"role": "user", "content": "Repeat the alphabet three times."}]
        news = []
        engine.submit(make_request(encode_chat(target, messages), max_tokens=60), news.append)
        for _ in range(3):  # The prompt, and the first steps of the slot.
            engine.step_once()
        with Walk() as walk:
            while not (news and news[-1].finish):
                engine.step_once()
        engine.shutdown()
    with capsys.disabled():
        print(f"\nOne token on the CPU opens:\n{walk.listing()}")
    assert len(news) > 10
    assert "speculative/tree.py" in walk.calls
    assert "executors/host_sampler.py" in walk.calls
    assert walk.files <= FILES and walk.statements <= STATEMENTS, walk.listing()


@pytest.mark.model
def test_the_walk_of_a_chat_is_short(capsys):
    loaded, walk = load(EngineConfig()), Walk()
    with TestClient(create_app(loaded, ServeSettings())) as client:

        def ask(text):
            body = {"messages": [{"role": "user", "content": text}], "stream": True}
            reply = client.post("/v1/chat/completions", json=body | {"max_tokens": 12, "seed": 1})
            assert reply.text.endswith("data: [DONE]\n\n")

        ask("Say hello in five words.")
        client.portal.call(walk.__enter__)
        loaded.engine.run_in_engine(lambda core: walk.__enter__())
        ask("Name six colours of the rainbow.")
        client.portal.call(walk.__exit__)
        loaded.engine.run_in_engine(lambda core: walk.__exit__())
        walk.calls.pop("engine/check.py", None)  # The engine became idle.
        walk.calls.pop("serve/observe/logs.py", None)  # Another test switched logs on.
    with capsys.disabled():
        print(f"\nA streamed chat opens:\n{walk.listing()}")
    assert "serve/answers/session.py" in walk.calls and "engine/step.py" in walk.calls
    assert walk.files <= CHAT_FILES and walk.statements <= CHAT_STATEMENTS, walk.listing()
