from forerun.client.async_llm import AsyncLLM as AsyncLLM
from forerun.client.llm import LLM as LLM

__version__: str
