"""How far a newcomer has to walk with one token. The limits shrink; only a decision record raises
one. decision 0024 says what each file is opened for.

The walk through captured rounds with a draft head is counted in
tests/parity/test_torch_overlap.py, where the device is emulated.
"""

import pytest

from forerun.build.engine import encode_chat, make_engine
from forerun.build.target import open_target
from forerun.client.completion import make_request
from forerun.options.config import EngineConfig
from tests.shape.walk import Walk

FILES, STATEMENTS = 18, 1_970
"""Of decoding steps with n-gram drafts on the compiled core, from plan to the last delta: that the
engine then proves that nothing leaked (engine/check.py) is no part of a token's life.
"""


@pytest.mark.model
def test_the_walk_on_the_cpu_is_short(capsys):
    target = open_target(EngineConfig())
    try:
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
    finally:
        target.close()
    with capsys.disabled():
        print(f"\nOne token on the CPU opens:\n{walk.listing()}")
    assert len(news) > 10
    assert "speculative/tree.py" in walk.calls
    assert "executors/host_sampler.py" in walk.calls
    assert walk.files <= FILES and walk.statements <= STATEMENTS, walk.listing()
