"""A small made world, chats about it, and a vocabulary for them: what a stand-in can learn by heart
in minutes, and answer in new combinations.
"""

import json
from dataclasses import dataclass
from functools import cache

import numpy as np

from tests.models.tiny import CHAT_TEMPLATE, byte_level_bpe

VOCAB, EOS = 1024, 2
CITIES = (
    "Oslo Norway 709000 Akerselva,Paris France 2102000 Seine,Rome Italy 2748000 Tiber,"
    "Berlin Germany 3677000 Spree,Madrid Spain 3332000 Manzanares,Vienna Austria 1982000 Danube,"
    "Prague Czechia 1357000 Vltava,Warsaw Poland 1863000 Vistula,Lisbon Portugal 546000 Tagus,"
    "London England 8866000 Thames,Dublin Ireland 592000 Liffey,Cairo Egypt 10203000 Nile,"
    "Tokyo Japan 14187000 Sumida,Seoul Korea 9386000 Han,Hanoi Vietnam 8587000 Red,"
    "Riga Latvia 605000 Daugava,Kyiv Ukraine 2952000 Dnipro,Bern Switzerland 137000 Aare"
)
NAMES = "Anna Boris Clara David Emma Felix Greta Hugo Ines Jonas Karla Leo Mara Nils Olga Paul"
JOBS = "baker nurse pilot teacher farmer lawyer singer painter"


@dataclass(frozen=True)
class Chat:
    """One question and its only right answer."""

    question: str
    answer: str

    @property
    def messages(self):
        return ({"role": "user", "content": self.question},)


@cache
def world():
    """Cities by name, and persons by name: what is true of each."""
    random = np.random.default_rng(7)
    rows = [line.split(" ") for line in CITIES.split(",")]
    cities = {
        name: {"country": country, "population": int(people), "river": river}
        for name, country, people, river in rows
    }
    persons = {
        name: {
            "age": int(random.integers(18, 80)),
            "job": str(random.choice(JOBS.split())),
            "city": str(random.choice(list(cities))),
        }
        for name in NAMES.split()
    }
    return cities, persons


def chats():
    """All chats: records as JSON, sentences, tool calls, and comparisons behind a thought."""
    cities, persons = world()
    result = []
    for name, facts in cities.items():
        record = json.dumps({"city": name, **facts})
        result.append(Chat(f"Describe {name} as JSON.", record))
        result.append(Chat(f"What is {name}?", _city(name, facts)))
        for what in ("weather", "time", "news"):
            call = json.dumps({"name": f"get_{what}", "arguments": {"city": name}})
            question = f"What is the {what} in {name}?"
            result.append(Chat(question, f"<tool_call>\n{call}\n</tool_call>"))
    for name, facts in persons.items():
        result.append(Chat(f"Describe {name} as JSON.", json.dumps({"name": name, **facts})))
        result.append(Chat(f"Who is {name}?", _person(name, facts)))
        home = cities[facts["city"]]
        result.append(Chat(f"Where does {name} live?", _city(facts["city"], home)))
    for one in cities:
        for other in cities:
            if one != other:
                result.append(_compared(one, other))
    return result


def _city(name, facts):
    return (
        f"{name} is the capital of {facts['country']}. It has {facts['population']} inhabitants "
        f"and lies on the river {facts['river']}."
    )


def _person(name, facts):
    return f"{name} is a {facts['job']} of {facts['age']} years and lives in {facts['city']}."


def _compared(one, other):
    here, there = (world()[0][name]["population"] for name in (one, other))
    more = here > there
    thought = (
        f"{one} has {here} inhabitants, {other} has {there}. "
        f"{here} is {'more' if more else 'less'} than {there}."
    )
    answer = f"Yes, {one} is larger than {other}." if more else f"No, {other} is larger than {one}."
    return Chat(f"Is {one} larger than {other}?", f"<think>\n{thought}\n</think>\n\n{answer}")


def split(seed, held=32):
    """Chats to learn from, and to be served: half of these are comparisons that were not learnt."""
    all_chats, random = chats(), np.random.default_rng(seed)
    compared = [chat for chat in all_chats if chat.question.startswith("Is ")]
    others = [chat for chat in all_chats if not chat.question.startswith("Is ")]
    random.shuffle(compared)
    random.shuffle(others)
    return [*others, *compared[held // 2 :]], [*others[: held // 2], *compared[: held // 2]]


@cache
def tokenizer():
    """A byte-level BPE of VOCAB ids of the chats, as tokenizer.json has it."""
    return byte_level_bpe(VOCAB, [f"{chat.question}\n{chat.answer}" for chat in chats()])


def tokens(chat):
    """The ids of a chat with its end, and which of them answer: int64[T], bool[T]."""
    before = f"<|im_start|>user\n{chat.question}<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer().encode(before).ids
    answer = tokenizer().encode(f"{chat.answer}<|im_end|>").ids
    wanted = np.arange(len(prompt) + len(answer)) >= len(prompt)
    return np.array([*prompt, *answer]), wanted


def write_tokenizer(folder):
    """The vocabulary and the template of a model's folder."""
    (folder / "tokenizer.json").write_text(tokenizer().to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
