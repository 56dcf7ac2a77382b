"""Evaluation and retrieval libraries: lm-evaluation-harness in its three modes, llama-index."""

import subprocess

import pytest

from tests.dialects.requests import GREEDY, MESSAGES, text_of
from tests.worlds.servers import PYTHON, ROOT

pytestmark = pytest.mark.slow

TEXTS = (
    "The sky is blue because the light of the sun is scattered by the air.",
    "def is_prime(n):\n    return n > 1 and all(n % i for i in range(2, n))\n",
    "Ein Satz mit Umlauten: \u00e4\u00f6\u00fc\u00df, und \u2603.",
)
PAIRS = (("The capital of France is", " Paris."), ("The capital of France is", " Rome."))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The default model's tokenizer, as Hugging Face libraries read it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    line = [PYTHON, "-m", "forerun", "models", "show", "smollm2-135m", "--tokenizer", folder]
    subprocess.run(line, check=True, capture_output=True, cwd=ROOT)
    return str(folder)


def test_lm_eval_says_the_same_in_string_token_and_remote_mode(real, tokenizer):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    modes = {
        "token": {"tokenizer": tokenizer, "tokenized_requests": True},
        "string": {"tokenizer": tokenizer, "tokenized_requests": False},
        "remote": {"tokenizer_backend": "remote", "tokenized_requests": True},
    }
    scores = {}
    for mode, options in modes.items():
        model = LocalCompletionsAPI(base_url=f"{real.url}/completions", model="smollm2-135m",
                                    max_length=512, **options)  # fmt: skip
        whole = [Instance("loglikelihood_rolling", {}, (text,), i) for i, text in enumerate(TEXTS)]
        pairs = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)]
        scores[mode] = (model.loglikelihood_rolling(whole), model.loglikelihood(pairs))
    assert scores["token"] == scores["string"] == scores["remote"]
    rolling, ((paris, _), (rome, _)) = scores["token"]
    assert all(value < 0 for value in rolling) and paris > rome


def test_llama_index(server):
    pytest.importorskip("llama_index.llms.openai_like")
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    expected = text_of(server, **GREEDY)
    model = OpenAILike(model="toy", api_base=server.url, api_key="none", is_chat_model=True,
                       max_tokens=40, temperature=0.0)  # fmt: skip
    question = [ChatMessage(role="user", content=MESSAGES[0]["content"])]
    assert model.chat(question).message.content == expected
    assert "".join(piece.delta for piece in model.stream_chat(question)) == expected
    plain = OpenAILike(model="toy", api_base=server.url, api_key="none", is_chat_model=False,
                       max_tokens=40, temperature=0.0)  # fmt: skip
    theirs = server.complete(max_tokens=40).json()["choices"][0]["text"]
    assert plain.complete("Hi").text == theirs
