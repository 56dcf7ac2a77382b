"""What the suites of SGLang, vLLM and LiteLLM hold their servers to, kept as our own."""

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from forerun.serve.bodies.fields import declared
from forerun.serve.bodies.schema import ChatBody, CompletionBody
from forerun.serve.dialects.anthropic.schema import MessagesBody
from forerun.serve.dialects.ollama.schema import OllamaChatBody
from forerun.serve.dialects.responses.schema import ResponsesBody
from forerun.serve.dialects.sglang.schema import GenerateBody
from tests.serve.test_reported import drafting, folder  # noqa: F401
from tests.serve.test_reported import serving as served

GENERATE = "/generate"
HELLO = [{"role": "user", "content": "Hi"}]


# --- log-probabilities ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["OFF", "NEXTN", pytest.param("STANDALONE", marks=pytest.mark.slow)]
)
def test_an_answer_scored_again_as_a_prompt(folder, method):  # noqa: F811
    """Its log-probabilities are those that it was given with, to the bit: verified in trees or
    step by step, and read in chunks, from the cache or not.
    """
    with served(drafting(folder, method)) as client:

        def ask(prompt, **body):
            sent = {"prompt": prompt, "temperature": 0, "logprobs": 2, "seed": 3, **body}
            answer = client.post("/v1/completions", json=sent)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]

        def scored(number):
            ids = random.Random(number).choices(range(8, 250), k=20 + 7 * number)
            said = ask(ids, max_tokens=30, return_token_ids=True, ignore_eos=True)
            again = ask([*ids, *said["token_ids"]], max_tokens=1, echo=True)["logprobs"]
            logprobs = said["logprobs"]
            assert again["token_logprobs"][len(ids) : -1] == logprobs["token_logprobs"]
            assert again["top_logprobs"][len(ids) : -1] == logprobs["top_logprobs"]

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(scored, range(8)))


def test_scores_that_begin_at_other_places_eight_at_once(client):
    """SGLang's logprob_start_len: each answer is the end of the one that begins at 0."""
    texts = ["".join(random.Random(n).choices("abcdefgh ", k=30 + 11 * n)) for n in range(8)]

    def scored(text, start):
        body = {
            "text": text,
            "return_logprob": True,
            "top_logprobs_num": 2,
            "logprob_start_len": start,
            "sampling_params": {"temperature": 0, "max_new_tokens": 6},
        }
        answer = client.post(GENERATE, json=body)
        assert answer.status_code == 200, answer.text
        meta = answer.json()["meta_info"]
        return meta["input_token_logprobs"], meta["output_token_logprobs"]

    whole = [scored(text, 0) for text in texts]
    luck = random.Random(7)
    jobs = [(n, luck.choice([-1, 0, 1, len(texts[n]) // 2, len(texts[n]) - 1])) for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(4):
            luck.shuffle(jobs)
            results = pool.map(lambda job: scored(texts[job[0]], job[1]), jobs)
            for (n, start), (before, behind) in zip(jobs, results, strict=True):
                assert behind == whole[n][1]
                assert before == ([] if start < 0 else whole[n][0][start:])


# --- fields that say nothing ---------------------------------------------------------------

LEAST = {
    "/v1/chat/completions": (ChatBody, {"messages": HELLO, "max_tokens": 6}),
    "/v1/completions": (CompletionBody, {"prompt": "Hi", "max_tokens": 6}),
    "/v1/messages": (MessagesBody, {"messages": HELLO, "max_tokens": 6}),
    "/v1/responses": (ResponsesBody, {"input": "Hi", "max_output_tokens": 6}),
    "/api/chat": (
        OllamaChatBody,
        {"messages": HELLO, "options": {"num_predict": 6}, "model": "toy"},
    ),
    GENERATE: (GenerateBody, {"text": "Hi", "sampling_params": {"max_new_tokens": 6}}),
}
GREEDY = {
    "/api/chat": {"options": {"num_predict": 6, "temperature": 0}, "stream": False},
    GENERATE: {"sampling_params": {"max_new_tokens": 6, "temperature": 0}},
}


def answered(client, path, **more):
    _, least = LEAST[path]
    answer = client.post(path, json={**least, **GREEDY.get(path, {"temperature": 0}), **more})
    assert answer.status_code == 200, (more, answer.text)
    text = json.dumps(answer.json())
    for made in (r'"[a-z_]*id": "[^"]*"', r'"[a-z0-9_]*": [0-9.e-]+', r'"\d{4}-[^"]*Z"'):
        text = re.sub(made, "", text)
    return text


@pytest.mark.parametrize("path", LEAST)
def test_null_and_defaults_say_nothing_in_every_field(client, path):
    """Clients written in other languages send every field that they know, most of them null."""
    body, least = LEAST[path]
    wanted = answered(client, path)
    given = {*least, *GREEDY.get(path, {"temperature": 0})}
    fields = {name: one.default for name, one in declared(body).items() if name not in given}
    for name in fields:
        assert answered(client, path, **{name: None}) == wanted, name
    assert answered(client, path, **dict.fromkeys(fields)) == wanted
    simple = bool | int | float | str
    plain = {name: each for name, each in fields.items() if isinstance(each, simple)}
    assert plain
    for name, default in plain.items():
        assert answered(client, path, **{name: default}) == wanted, name
