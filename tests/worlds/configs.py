"""How the tests' small models are started."""

from dataclasses import replace

from forerun.options.config import EngineConfig
from forerun.text.rendering import BYTE_LEVEL_TEMPLATE

NUMBERS = {
    "torch": {"device": "cpu", "dtype": "float32"},
    "jax": {"dtype": "float32", "threads": None},
    "cpu": {},
}


def small(model, executor="torch", draft=None, **changes):
    """Return an EngineConfig of a model's folder (Path) that drafts always and says what is wrong
    with a draft; on torch and XLA in float32. Its chats are rendered here: no process begins.
    """
    config = EngineConfig(
        model=str(model),
        executor=executor,
        speculative_draft_model_path=str(draft) if draft else None,
        policy="fixed",
        draft_on_error="stop",
        chat_template=BYTE_LEVEL_TEMPLATE,
        max_sequences=4,
        chunked_prefill_size=320,
        kv_tokens=2048,
        threads=1,
    )
    return replace(config, **NUMBERS.get(executor, {}) | changes)
