"""The official client against a real server process."""

import asyncio
from typing import Literal

import pytest

from forerun.text.tokenizer import Tokenizer
from tests.engine.toys import following
from tests.lazy import LazyModule

openai, pydantic = LazyModule("openai"), LazyModule("pydantic")


CHAT = [{"role": "user", "content": "Hi"}]
PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
TOKENIZER = Tokenizer.byte_level()


def expected(count):
    """The toy's greedy answer to CHAT, from its definition."""
    tokens = following(TOKENIZER.encode(PROMPT, specials=True).tolist(), count)
    return TOKENIZER.decode(tokens)


@pytest.fixture(scope="module")
def client(toy_server):
    with openai.OpenAI(base_url=toy_server.url, api_key="none", max_retries=0) as client:
        yield client


def ask(client, **options):
    base = {"model": "toy", "messages": CHAT, "max_tokens": 40, "temperature": 0}
    return client.chat.completions.create(**{**base, **options})


def test_models(client):
    assert [model.id for model in client.models.list()] == ["toy"]
    assert client.models.retrieve("toy").id == "toy"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert caught.value.code == "model_not_found"


def test_chat(client):
    answer = ask(client)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content == expected(40)
    assert choice.finish_reason == "length"
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == "toy"
    assert answer.system_fingerprint.startswith("fp_")
    prompt = len(TOKENIZER.encode(PROMPT, specials=True))
    assert answer.usage.prompt_tokens == prompt
    assert answer.usage.completion_tokens == 40
    assert answer.usage.total_tokens == prompt + 40


def test_stream_is_the_answer_in_pieces(client):
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    first, *_, ended, last = chunks
    assert first.choices[0].delta.role == "assistant"
    assert first.choices[0].delta.content == ""
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1
    deltas = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(choice.delta.content or "" for choice in deltas) == expected(40)
    assert [choice.finish_reason for choice in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert ended.choices[0].finish_reason == "length"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert last.choices == []
    assert last.usage.completion_tokens == 40


def test_stream_without_usage_has_a_choice_in_every_chunk(client):
    chunks = list(ask(client, stream=True))
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_choices_differ_and_are_reproducible(client, stream):
    def texts(n):
        options = {"n": n, "temperature": 1.0, "seed": 7, "stream": stream}
        answer = ask(client, **options)
        if not stream:
            assert [choice.index for choice in answer.choices] == list(range(n))
            return [choice.message.content for choice in answer.choices]
        result = [""] * n
        for chunk in answer:
            result[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
        return result

    two = texts(2)
    assert two[0] != two[1]
    assert texts(2) == two
    assert texts(1) == two[:1]
    assert ask(client, temperature=1.0, seed=7).choices[0].message.content == two[0]


def test_without_a_seed_answers_vary(client):
    texts = {ask(client, temperature=1.0).choices[0].message.content for _ in range(3)}
    assert len(texts) == 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_speculation_changes_no_token(client, temperature):
    on, off = (
        ask(
            client,
            temperature=temperature,
            seed=3,
            max_tokens=200,
            extra_body={"speculative": {"enabled": enabled, "stats": True}},
        )
        for enabled in (True, False)
    )
    assert on.choices[0].message.content == off.choices[0].message.content
    assert off.metrics["speculative_decoding"]["num_draft_tokens"] == 0
    counts = on.metrics["speculative_decoding"]
    assert counts["reasons"] == ["fixed by the configuration"]
    output_tokens = off.metrics["speculative_decoding"]["reasons"]
    assert output_tokens == ["off: the request disables speculation"]
    assert counts["num_draft_tokens"] > 0
    # Every token but those past the end came from a step, accepted or the target's own.
    assert counts["num_spec_steps"] + counts["num_accepted_draft_tokens"] >= 200
    assert sum(counts["acceptance_histogram"]) == counts["num_spec_steps"]
    if temperature == 0:  # The toy repeats itself, so n-gram lookup must find something.
        assert counts["mean_acceptance_length"] > 1.5
        share = counts["num_accepted_draft_tokens"] / counts["num_spec_steps"]
        assert counts["mean_acceptance_length"] == 1 + share


def test_stats_come_with_the_last_chunk(client):
    extra = {"speculative": {"stats": True}}
    for options in ({}, {"stream_options": {"include_usage": True}}):
        *chunks, last = ask(client, stream=True, extra_body=extra, **options)
        assert last.metrics["speculative_decoding"]["num_spec_steps"] > 0
        assert not any(hasattr(chunk, "metrics") for chunk in chunks)


def test_speculative_bounds_are_kept(client):
    extra = {"speculative": {"max_nodes": 2, "max_depth": 1, "stats": True}}
    counts = ask(client, max_tokens=200, extra_body=extra).metrics["speculative_decoding"]
    assert counts["num_draft_tokens"] > 0
    assert len(counts["acceptance_histogram"]) <= 2


def test_logprobs(client):
    answer = ask(client, max_tokens=10, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    for entry in content:
        assert entry.logprob == pytest.approx(-0.9327521)
        assert entry.bytes == list(entry.token.encode())
        below = [entry.logprob - other.logprob for other in entry.top_logprobs]
        assert below == pytest.approx([0.0, 0.5, 1.0])
        assert entry.top_logprobs[0].token == entry.token


def test_logprobs_in_a_stream_equal_those_of_the_whole(client):
    whole = ask(client, logprobs=True, top_logprobs=1, temperature=1.0, seed=5)
    pieces = ask(client, logprobs=True, top_logprobs=1, temperature=1.0, seed=5, stream=True)
    streamed = [
        entry
        for chunk in pieces
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == whole.choices[0].logprobs.content


def test_stop_strings_cut_the_text(client):
    text = expected(40)
    stop = text[10:13]
    cut = text[: text.index(stop)]
    for options in ({}, {"extra_body": {"speculative": {"enabled": False}}}):
        choice = ask(client, stop=[stop, "not in there"], **options).choices[0]
        assert (choice.message.content, choice.finish_reason) == (cut, "stop")
        assert choice.stop_reason == stop
    kept = ask(client, stop=stop, extra_body={"include_stop_str_in_output": True})
    assert kept.choices[0].message.content == cut + stop
    streamed = ask(client, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == cut


def test_stop_token_ids_end_the_text(client):
    text = expected(40)
    answer = ask(client, extra_body={"stop_token_ids": [ord(text[5])]}, logprobs=True)
    choice = answer.choices[0]
    assert choice.message.content == text[: text.index(text[5])]
    assert choice.stop_reason == ord(text[5])
    assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content
    # The stop token was decided, so it counts, though it left no text.
    assert answer.usage.completion_tokens == len(choice.message.content) + 1


def test_logit_bias_and_penalties_reach_the_sampler(client):
    first = expected(1)
    # The id after the best one lies half a unit below it.
    after = ask(client, max_tokens=1, logit_bias={str(ord(first) + 1): 0.6})
    assert after.choices[0].message.content == chr(ord(first) + 1)
    short = ask(client, max_tokens=1, logit_bias={str(ord(first) + 1): 0.4})
    assert short.choices[0].message.content == first
    repeated = ask(client, max_tokens=200).choices[0].message.content
    varied = ask(client, max_tokens=200, frequency_penalty=2.0).choices[0].message.content
    assert len(set(varied)) > len(set(repeated))


def test_completions(client):
    tokens = following(b"Hi", 12)
    text = bytes(tokens).decode()
    options = {"model": "toy", "max_tokens": 12, "temperature": 0}
    answer = client.completions.create(prompt="Hi", **options)
    assert answer.choices[0].text == text
    assert answer.object == "text_completion"
    ids = client.completions.create(prompt=[72, 105], **options)
    assert ids.choices[0].text == text
    several = client.completions.create(prompt=["Hi", "Ho"], n=2, **options)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in several.choices][:2] == [text, text]
    assert several.choices[2].text == bytes(following(b"Ho", 12)).decode()
    assert several.usage.prompt_tokens == 4
    assert several.usage.completion_tokens == 48
    lists = client.completions.create(prompt=[[72, 105], [72, 111]], **options)
    assert [choice.text for choice in lists.choices] == [text, several.choices[2].text]
    assert len(client.completions.create(model="toy", prompt="Hi").choices[0].text) <= 16


def test_echo_with_logprobs(client):
    options = {"model": "toy", "prompt": "Hié", "temperature": 0, "logprobs": 1, "echo": True}
    choice = client.completions.create(max_tokens=3, **options).choices[0]
    logprobs = choice.logprobs
    assert choice.text.startswith("Hié")
    assert logprobs.tokens[:4] == ["H", "i", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs.text_offset == [0, 1, 2, 2, 3, 4, 5]
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    # After "H" (s=72, x=72, y=0) the toy's best is 97 + (72 + 144) % 16 = 105 = "i".
    assert logprobs.token_logprobs[1] == pytest.approx(-0.9327521)
    assert logprobs.top_logprobs[1] == {"i": pytest.approx(-0.9327521)}
    only = client.completions.create(max_tokens=0, **options)
    assert only.choices[0].text == "Hié"
    assert only.choices[0].logprobs.token_logprobs == logprobs.token_logprobs[:4]
    assert only.usage.completion_tokens == 0
    streamed = list(client.completions.create(max_tokens=3, stream=True, **options))
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text
    offsets = [at for chunk in streamed for at in chunk.choices[0].logprobs.text_offset]
    assert offsets == logprobs.text_offset


def test_min_tokens_and_ignore_eos(client):
    # The toy ends its turn where the sum of all tokens is divisible by 256: here at once.
    prompt = [100, 156]
    options = {"model": "toy", "prompt": prompt, "temperature": 0, "max_tokens": 5}
    at_once = client.completions.create(**options).choices[0]
    assert (at_once.text, at_once.finish_reason) == ("", "stop")
    forced = client.completions.create(**options, extra_body={"min_tokens": 3})
    assert forced.usage.completion_tokens >= 3
    ignored = client.completions.create(**options, extra_body={"ignore_eos": True})
    assert ignored.usage.completion_tokens == 5
    shown = {"ignore_eos": True, "skip_special_tokens": False}
    text = client.completions.create(**options, extra_body=shown).choices[0].text
    assert text.startswith("<|im_end|>")


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_what_was_parsed_can_be_sent_back(client):
    """OpenAI's `parse` leaves what it read in the message, and sends it along with it."""
    pick = pydantic.create_model("Pick", colour=Literal["red", "green"])
    options = {"model": "toy", "max_tokens": 200, "temperature": 0}
    question = [{"role": "user", "content": "Pick one."}]
    answer = client.chat.completions.parse(messages=question, response_format=pick, **options)
    said = answer.choices[0].message
    assert said.parsed.colour in ("red", "green")
    tools = [openai.pydantic_function_tool(pick)]
    answer = client.chat.completions.parse(
        messages=[*question, said, *question], tools=tools, tool_choice="required", **options
    )
    called = answer.choices[0].message
    (call, *_) = called.tool_calls
    assert call.function.parsed_arguments.colour in ("red", "green")
    results = [
        {"role": "tool", "tool_call_id": one.id, "content": "taken"} for one in called.tool_calls
    ]
    answer = client.chat.completions.create(messages=[*question, called, *results], **options)
    assert answer.choices[0].message.content


def test_typed_errors(client):
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, temperature=3)
    assert (caught.value.param, caught.value.code) == ("temperature", "invalid_value")
    assert caught.value.type == "invalid_request_error"


def test_raw_response_has_ids(client):
    given = {"X-Request-Id": "mine-1"}
    raw = client.chat.completions.with_raw_response.create(
        model="toy", messages=CHAT, max_tokens=1, extra_headers=given
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert raw.parse()._request_id == "mine-1"


def test_async_client_many_at_once(toy_server):
    asyncio.run(many_at_once(toy_server))


async def many_at_once(server):
    async with openai.AsyncOpenAI(base_url=server.url, api_key="none") as client:

        def create(number, **more):
            said = [{"role": "user", "content": str(number)}]
            options = {"model": "toy", "max_tokens": 30, "temperature": 0}
            return client.chat.completions.create(messages=said, **options, **more)

        async def streamed(number):
            stream = await create(number, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        async def whole(number):
            return (await create(number)).choices[0].message.content

        numbers = range(12)
        pieces = await asyncio.gather(*map(streamed, numbers))
        wholes = await asyncio.gather(*map(whole, numbers))
    assert pieces == wholes
    assert len(set(wholes)) > 1
