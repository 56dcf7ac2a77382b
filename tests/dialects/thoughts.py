"""What the toy thinks."""

from forerun.text.tokenizer import Tokenizer
from tests.engine.toys import following

TOKENIZER = Tokenizer.byte_level()


def thoughtful():
    """A question whose greedy answer begins with i: it thinks, where i begins a thought."""
    for number in range(1000):
        text = f"Question {number}"
        prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        tokens = following(TOKENIZER.encode(prompt, specials=True).tolist(), 40)
        answer = TOKENIZER.decode(tokens)
        if answer.startswith("i") and "i" in answer[3:30] and len(answer) == 40:
            return text
    raise AssertionError("the toy never begins with i")
