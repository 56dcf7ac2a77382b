"""Chat templates that llama.cpp has by name, for `--chat-template NAME`.

For models whose file has none: the facts of their formats, written as Jinja. None supports tools;
these are added to the system message (text/conversation.py).
"""

_EACH = "{% for message in messages %}"
_END = "{% endfor %}"
_SYSTEM = "{% if message['role'] == 'system' %}"
_USER = "{% elif message['role'] == 'user' %}"
_ELSE = "{% else %}"
_FI = "{% endif %}"
_OPEN = "{% if add_generation_prompt %}"
_ROLE, _CONTENT = "{{ message['role'] }}", "{{ message['content'] }}"
_TRIMMED = "{{ message['content'] | trim }}"
_BOS = "{{ bos_token }}"
_FULL = "<｜end▁of▁sentence｜>"
_TURN, _OVER = "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"


def _same(before: str, after: str, begun: str, content: str = _CONTENT, first: str = "") -> str:
    """Return a template with the same marks around every turn, which contain its role."""
    return f"{first}{_EACH}{before}{content}{after}{_END}{_OPEN}{begun}{_FI}"


def _own(system: str, user: str, assistant: str, begun: str, first: str = "") -> str:
    """Return a template with different marks for each role's turns."""
    turns = f"{_SYSTEM}{system}{_USER}{user}{_ELSE}{assistant}{_FI}"
    return f"{first}{_EACH}{turns}{_END}{_OPEN}{begun}{_FI}"


def _inst(system: str, user: str, assistant: str, begin: str) -> str:
    """Return a template like Mistral's and Llama 2's: a system message is part of the next user's
    turn.
    """
    opened = "{% if loop.first or loop.previtem['role'] != 'system' %}" + begin + _FI
    turns = f"{_SYSTEM}{begin}{system}{_USER}{opened}{user}{_ELSE}{assistant}{_FI}"
    return f"{_BOS}{_EACH}{turns}{_END}"


_GEMMA = (
    f"{_BOS}{{% set before = namespace(text='') %}}{_EACH}{_SYSTEM}"
    "{% set before.text = (message['content'] | trim) ~ '\n\n' %}"
    f"{_ELSE}<start_of_turn>"
    "{{ 'model' if message['role'] == 'assistant' else message['role'] }}\n"
    f"{{{{ before.text }}}}{_TRIMMED}<end_of_turn>\n"
    "{% set before.text = '' %}"
    f"{_FI}{_END}{_OPEN}<start_of_turn>model\n{_FI}"
)

KNOWN = {
    "chatml": _same(f"<|im_start|>{_ROLE}\n", "<|im_end|>\n", "<|im_start|>assistant\n"),
    "chatglm4": _same(f"<|{_ROLE}|>\n", "", "<|assistant|>\n", first="[gMASK]<sop>"),
    "command-r": _own(
        f"{_TURN}<|SYSTEM_TOKEN|>{_TRIMMED}{_OVER}",
        f"{_TURN}<|USER_TOKEN|>{_TRIMMED}{_OVER}",
        f"{_TURN}<|CHATBOT_TOKEN|>{_TRIMMED}{_OVER}",
        f"{_TURN}<|CHATBOT_TOKEN|>",
        _BOS,
    ),
    "deepseek": _own(
        _CONTENT,
        f"### Instruction:\n{_CONTENT}\n",
        f"### Response:\n{_CONTENT}\n<|EOT|>\n",
        "### Response:\n",
        _BOS,
    ),
    "deepseek2": _own(
        f"{_CONTENT}\n\n",
        f"User: {_CONTENT}\n\n",
        f"Assistant: {_CONTENT}{_FULL}",
        "Assistant:",
        _BOS,
    ),
    "deepseek3": _own(
        f"{_CONTENT}\n\n",
        f"<｜User｜>{_CONTENT}",
        f"<｜Assistant｜>{_CONTENT}{_FULL}",
        "<｜Assistant｜>",
        _BOS,
    ),
    "exaone3": _own(
        f"[|system|]{_TRIMMED}[|endofturn|]\n",
        f"[|user|]{_TRIMMED}\n",
        f"[|assistant|]{_TRIMMED}[|endofturn|]\n",
        "[|assistant|]",
    ),
    "falcon3": _same(f"<|{_ROLE}|>\n", "\n", "<|assistant|>\n"),
    "gemma": _GEMMA,
    "granite": _same(
        f"<|start_of_role|>{_ROLE}<|end_of_role|>",
        "<|end_of_text|>\n",
        "<|start_of_role|>assistant<|end_of_role|>",
    ),
    "llama2": _inst(f"{_TRIMMED}\n", f"{_TRIMMED} [/INST]", f"{_TRIMMED}</s>", "[INST] "),
    "llama2-sys": _inst(
        f"<<SYS>>\n{_TRIMMED}\n<</SYS>>\n\n", f"{_TRIMMED} [/INST]", f"{_TRIMMED}</s>", "[INST] "
    ),
    "llama3": _same(
        f"<|start_header_id|>{_ROLE}<|end_header_id|>\n\n",
        "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        _TRIMMED,
        _BOS,
    ),
    "llama4": _same(
        f"<|header_start|>{_ROLE}<|header_end|>\n\n",
        "<|eot|>",
        "<|header_start|>assistant<|header_end|>\n\n",
        _TRIMMED,
        _BOS,
    ),
    "mistral-v1": _inst(f"{_CONTENT}\n\n", f"{_CONTENT} [/INST]", f" {_CONTENT}</s>", " [INST] "),
    "mistral-v3": _inst(f"{_CONTENT}\n\n", f"{_CONTENT}[/INST]", f" {_TRIMMED}</s>", "[INST] "),
    "mistral-v3-tekken": _inst(
        f"{_CONTENT}\n\n", f"{_CONTENT}[/INST]", f"{_CONTENT}</s>", "[INST]"
    ),
    "mistral-v7": _own(
        f"[SYSTEM_PROMPT] {_CONTENT}[/SYSTEM_PROMPT]",
        f"[INST] {_CONTENT}[/INST]",
        f" {_CONTENT}</s>",
        "",
        _BOS,
    ),
    "monarch": _same(
        "{% if not loop.first %}<s>{% endif %}" + f"{_ROLE}\n", "</s>\n", "<s>assistant\n"
    ),
    "openchat": _own(
        f"{_CONTENT}<|end_of_turn|>",
        f"GPT4 Correct User: {_CONTENT}<|end_of_turn|>",
        f"GPT4 Correct Assistant: {_CONTENT}<|end_of_turn|>",
        "GPT4 Correct Assistant:",
        _BOS,
    ),
    "phi3": _same(f"<|{_ROLE}|>\n", "<|end|>\n", "<|assistant|>\n"),
    "phi4": _same(
        f"<|im_start|>{_ROLE}<|im_sep|>", "<|im_end|>", "<|im_start|>assistant<|im_sep|>"
    ),
    "vicuna": _own(
        f"{_CONTENT}\n\n", f"USER: {_CONTENT}\n", f"ASSISTANT: {_CONTENT}</s>\n", "ASSISTANT:", _BOS
    ),
    "vicuna-orca": _own(
        f"SYSTEM: {_CONTENT}\n",
        f"USER: {_CONTENT}\n",
        f"ASSISTANT: {_CONTENT}</s>\n",
        "ASSISTANT:",
        _BOS,
    ),
    "zephyr": _same(f"<|{_ROLE}|>\n", "<|endoftext|>\n", "<|assistant|>\n"),
}
"""Templates by llama.cpp's names."""
