"""The default model under an open schema: the text that plain decoding gives."""

import json
from dataclasses import replace

import pytest

from forerun.build.engine import make_engine
from forerun.build.target import open_target
from forerun.client.completion import complete, make_request
from forerun.constrain.grammar import Grammar
from forerun.executors import cpu
from forerun.options.config import EngineConfig

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(bool(cpu.available()), reason="no native core on this machine"),
]

TEXT = {"type": "string"}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "age": {"type": "integer"},
        "city": TEXT,
        "zip": TEXT,
        "active": {"type": "boolean"},
        "tags": {"type": "array", "items": TEXT},
    },
}
# Behind a key that the schema does not name, lists and objects are as likely as each other: both
# become siblings in the trees.
PROMPT = """Records of people:
{"name": "Bob", "age": 46, "pet": {"price": "low"}, "home": {"price": "low"}, "job": ["old", "new"]}
{"name": "Anna", "age": 59, "home": ["red", "blue"], "car": ["red", "blue"], "job": ["old", "new"]}
{"name": "Cleo", "age": 60, "pet": {"size": "big"}, "job": ["old", "new"], "car": ["red", "blue"]}
{"name": "Anna", "age": 56, "car": {"price": "low"}, "food": ["red", "blue"], "pet": ["red"]}
{"name": "Cleo", "age": 35, "home": {"size": "big"}, "car": ["red", "blue"], "pet": ["old", "new"]}
{"name": "Bob", "age": 24, "pet": ["red", "blue"], "car": ["red"], "food": {"price": "low"}}
"""
SEEDS = (0, 1, 2, 6, 7, 16, 18, 19, 23, 25, 30, 31)
"""All but the first two had other answers when masks were remembered over a rollback (18 and 23
ended with "the grammar's matcher gave up"): docs/inside/llguidance-rollback.md."""


@pytest.mark.slow
def test_under_an_open_schema_speculation_changes_no_token():
    config = EngineConfig(policy="fixed", speculative_num_draft_tokens=9, kv_tokens=8192)
    target = open_target(config)
    grammar, prompt = target.compile(Grammar.json_schema(SCHEMA)), target.tokenizer.encode(PROMPT)
    told = []
    for speculation in ("off", "auto"):
        engine = make_engine(target, replace(target.config, speculative_algorithm=speculation))
        engine.start()
        options = {"max_tokens": 80, "grammar": grammar, "temperature": 0.7}
        requests = [
            make_request(prompt, target.tokenizer.eos_ids, seed=seed, **options) for seed in SEEDS
        ]
        at_once = None if speculation == "off" else 1
        told.append([done for (done,) in complete(engine, requests, at_once)])
        engine.shutdown()
    target.close()
    plain, guessed = told
    assert [done.tokens for done in guessed] == [done.tokens for done in plain]
    whole = [done.text for done in plain if done.finish == "stop"]
    assert len(whole) > len(plain) // 2 and all(map(json.loads, whole))
    assert sum(done.stats.accepted for done in guessed) > 20 * len(SEEDS), "nothing was guessed"
