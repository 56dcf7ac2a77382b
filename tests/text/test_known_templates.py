"""Chat templates by llama.cpp's names, against conversations written out by hand."""

from contextlib import closing

import pytest

from forerun.build.chat_template import template_source, template_variables
from forerun.build.target import open_text
from forerun.errors import ConfigError
from forerun.options.config import EngineConfig
from forerun.text.chat import ChatTemplate
from forerun.text.known_templates import KNOWN
from forerun.text.tokenizer import Tokenizer

TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]
END = "<｜end▁of▁sentence｜>"
TURN, OVER = "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"
WRITTEN = {
    "chatml": "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
    "<|im_start|>assistant\n",
    "chatglm4": "[gMASK]<sop><|system|>\nBe kind.<|user|>\nHi<|assistant|>\nHello<|user|>\nBye"
    "<|assistant|>\n",
    "command-r": f"{TURN}<|SYSTEM_TOKEN|>Be kind.{OVER}{TURN}<|USER_TOKEN|>Hi{OVER}"
    f"{TURN}<|CHATBOT_TOKEN|>Hello{OVER}{TURN}<|USER_TOKEN|>Bye{OVER}{TURN}<|CHATBOT_TOKEN|>",
    "deepseek": "Be kind.### Instruction:\nHi\n### Response:\nHello\n<|EOT|>\n"
    "### Instruction:\nBye\n### Response:\n",
    "deepseek2": f"Be kind.\n\nUser: Hi\n\nAssistant: Hello{END}User: Bye\n\nAssistant:",
    "deepseek3": f"Be kind.\n\n<｜User｜>Hi<｜Assistant｜>Hello{END}<｜User｜>Bye<｜Assistant｜>",
    "exaone3": "[|system|]Be kind.[|endofturn|]\n[|user|]Hi\n[|assistant|]Hello[|endofturn|]\n"
    "[|user|]Bye\n[|assistant|]",
    "falcon3": "<|system|>\nBe kind.\n<|user|>\nHi\n<|assistant|>\nHello\n<|user|>\nBye\n"
    "<|assistant|>\n",
    "gemma": "<start_of_turn>user\nBe kind.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello"
    "<end_of_turn>\n<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
    "granite": "<|start_of_role|>system<|end_of_role|>Be kind.<|end_of_text|>\n"
    "<|start_of_role|>user<|end_of_role|>Hi<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>Hello<|end_of_text|>\n"
    "<|start_of_role|>user<|end_of_role|>Bye<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>",
    "llama2": "[INST] Be kind.\nHi [/INST]Hello</s>[INST] Bye [/INST]",
    "llama2-sys": "[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi [/INST]Hello</s>[INST] Bye [/INST]",
    "llama3": "<|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "llama4": "<|header_start|>system<|header_end|>\n\nBe kind.<|eot|>"
    "<|header_start|>user<|header_end|>\n\nHi<|eot|>"
    "<|header_start|>assistant<|header_end|>\n\nHello<|eot|>"
    "<|header_start|>user<|header_end|>\n\nBye<|eot|><|header_start|>assistant<|header_end|>\n\n",
    "mistral-v1": " [INST] Be kind.\n\nHi [/INST] Hello</s> [INST] Bye [/INST]",
    "mistral-v3": "[INST] Be kind.\n\nHi[/INST] Hello</s>[INST] Bye[/INST]",
    "mistral-v3-tekken": "[INST]Be kind.\n\nHi[/INST]Hello</s>[INST]Bye[/INST]",
    "mistral-v7": "[SYSTEM_PROMPT] Be kind.[/SYSTEM_PROMPT][INST] Hi[/INST] Hello</s>"
    "[INST] Bye[/INST]",
    "monarch": "system\nBe kind.</s>\n<s>user\nHi</s>\n<s>assistant\nHello</s>\n<s>user\nBye</s>\n"
    "<s>assistant\n",
    "openchat": "Be kind.<|end_of_turn|>GPT4 Correct User: Hi<|end_of_turn|>"
    "GPT4 Correct Assistant: Hello<|end_of_turn|>GPT4 Correct User: Bye<|end_of_turn|>"
    "GPT4 Correct Assistant:",
    "phi3": "<|system|>\nBe kind.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nHello<|end|>\n"
    "<|user|>\nBye<|end|>\n<|assistant|>\n",
    "phi4": "<|im_start|>system<|im_sep|>Be kind.<|im_end|><|im_start|>user<|im_sep|>Hi<|im_end|>"
    "<|im_start|>assistant<|im_sep|>Hello<|im_end|><|im_start|>user<|im_sep|>Bye<|im_end|>"
    "<|im_start|>assistant<|im_sep|>",
    "vicuna": "Be kind.\n\nUSER: Hi\nASSISTANT: Hello</s>\nUSER: Bye\nASSISTANT:",
    "vicuna-orca": "SYSTEM: Be kind.\nUSER: Hi\nASSISTANT: Hello</s>\nUSER: Bye\nASSISTANT:",
    "zephyr": "<|system|>\nBe kind.<|endoftext|>\n<|user|>\nHi<|endoftext|>\n<|assistant|>\nHello"
    "<|endoftext|>\n<|user|>\nBye<|endoftext|>\n<|assistant|>\n",
}


@pytest.mark.parametrize("name", KNOWN)
def test_what_a_name_stands_for(name):
    source = template_source(EngineConfig(model="toy", chat_template=name), "the model's own")
    with closing(ChatTemplate(source, Tokenizer.byte_level())) as template:
        assert template.render(TALK) == WRITTEN[name]
        without = template.render(TALK[1:2])
        assert "Hi" in without and "Be kind" not in without


def test_a_template_may_be_given_itself_or_in_a_file(tmp_path):
    own = "{{ messages[0]['content'] }}"
    config = EngineConfig(model="toy", chat_template=own)
    assert template_source(config, "x") == own
    path = tmp_path / "chat.jinja"
    path.write_text("{{ 1 }}")
    assert template_source(EngineConfig(model="toy", chat_template=str(path)), "x") == "{{ 1 }}"
    assert template_source(EngineConfig(model="toy"), "x") == "x"
    with pytest.raises(ConfigError, match=r"qwen9, which cannot be read.*chatml, .*llama3"):
        template_source(EngineConfig(model="toy", chat_template="qwen9"), "x")


def test_variables_of_a_template_hold_where_requests_do_not_set_them():
    """As llama.cpp's --chat-template-kwargs, vLLM's --default-chat-template-kwargs."""
    source = "{{ 'on' if enable_thinking else 'off' }} {{ date }}"
    given = '{"enable_thinking": true, "date": "Monday"}'
    config = EngineConfig(model="toy", chat_template=source, chat_template_kwargs=given)
    _, template = open_text(config)
    with closing(template):
        assert template.render(TALK) == "on Monday"
        assert template.render(TALK, extra={"enable_thinking": False}) == "off Monday"
    assert template_variables(EngineConfig(model="toy")) == {}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("enable_thinking=false", "is not a JSON object"),
        ("[1]", r"is \[1\], but must be a JSON object"),
        ('{"a": NaN}', "is not a JSON object"),
        ('{"a": 1, "a": 2}', "is not a JSON object"),
        ('{"messages": []}', "cannot set messages"),
    ],
)
def test_what_are_no_variables_of_a_template(given, words):
    with pytest.raises(ConfigError, match=f"chat-template-kwargs {words}"):
        template_variables(EngineConfig(model="toy", chat_template_kwargs=given))
