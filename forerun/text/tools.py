r"""Tool calls in the format of a model, and their parser.

A format is a notation of calls that models were trained on. Nearly all have a text that begins
calls; text before it is ordinary content. Models of the first two sometimes omit it, as Qwen2.5
Coder does: an answer, or a fence in it, that begins with an offered function's name is a call.

    hermes   <tool_call>\n{"name": "f", "arguments": {...}}\n</tool_call>     Hermes, Qwen
    llama3   {"name": "f", "parameters": {...}}, without an opener           Llama 3
    mistral  [TOOL_CALLS] [{"name": "f", "arguments": {...}}, ...]           Mistral
    mistral-args  [TOOL_CALLS]f[ARGS]{...}, one after the other         newer ones of Mistral
    granite  <|tool_call|>[{"name": "f", "arguments": {...}}, ...]             Granite 3
    phi4     <|tool_call|>{"name": "f", "arguments": {...}}<|/tool_call|>       Phi-4 mini
    gigachat3.1  <|function_call|>{"name": "f", "arguments": {...}}           GigaChat 3.1
    kimi     <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0
             <|tool_call_argument_begin|>{...}<|tool_call_end|>...             Kimi K2
    deepseek-v3.1  <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}
             <｜tool▁call▁end｜>...<｜tool▁calls▁end｜>                       DeepSeek V3.1
    deepseek-v3  the same, function<｜tool▁sep｜>f\n```json\n{...}\n``` in a call  DeepSeek V3, R1
    harmony  ... to=functions.f<|message|>{...}, in messages (harmony.py)      gpt-oss
    glm      <tool_call>f\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>\n</tool_call>
    qwen3-coder  <tool_call>\n<function=f>\n<parameter=k>\nv\n</parameter>\n</function>\n
             </tool_call>    Qwen3-Coder, Qwen3.5, Nemotron 3, Granite 4.2
    seed-oss     the same in <seed:tool_call>                                   Seed-OSS
    minimax-m2   <minimax:tool_call>\n<invoke name="f">\n<parameter name="k">v</parameter>\n
             </invoke>\n...</minimax:tool_call>                                  MiniMax M2
    deepseek-v3.2  the same in tags of their own, which mark strings             DeepSeek V3.2
    deepseek-v4  the same with tool_calls, not function_calls                     DeepSeek V4
    gigachat3.5  the same, called GCML                                          GigaChat 3.5
    minicpm5     <function name="f"><param name="k">v</param></function>             MiniCPM5
    gemma4   <|tool_call>call:f{k:<|"|>v<|"|>,n:1}<tool_call|>                   Gemma 4
    functiongemma  the same in <start_function_call>, <escape>, <end_function_call>
    nemotron <TOOLCALL>[{"name": "f", "arguments": {...}}, ...]</TOOLCALL>    Nemotron
    apriel   the same in <tool_calls>                                          Apriel
    lfm2     <|tool_call_start|>[f(k='v', n=1), g()]<|tool_call_end|>   LFM2, LFM2.5
    olmo3    <function_calls>f(k='v', n=1)\ng()</function_calls>            OLMo 3
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from forerun.text.gemma_calls import QUOTES, GemmaCalls
from forerun.text.harmony import CHANNEL, MARKS, shows_harmony
from forerun.text.python_calls import PythonCalls
from forerun.text.reasoning import overlap
from forerun.text.tagged_calls import (
    DSML_TAGS,
    GCML_TAGS,
    MINICPM_TAGS,
    MINIMAX_TAGS,
    QWEN_TAGS,
    FunctionCalls,
    FunctionTags,
    GlmCalls,
)
from forerun.text.tool_bodies import (
    FENCE,
    BareCalls,
    BareHeads,
    Body,
    CallPiece,
    DividedCall,
    JsonCalls,
    MarkedCalls,
    ParsedDelta,
    Tools,
)

OPEN_FENCE, CLOSE_FENCE = f"\n{FENCE}json\n", f"\n{FENCE}"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A notation of calls.

    opener     begins one call or a list of them; "" = calls have none
    closer     ends what the opener began; "" = the end of the arguments or of the answer does
    arguments  the key of the arguments, if calls are JSON
    alone      such a call may have no opener (BareHeads)
    fenced     a call's kind precedes the divider; its name and arguments, in a fence, follow it
    divider    between name and arguments, if they are separate
    listed     calls are a JSON list, which is opened once
    each       begins and ends one call among several
    bare       also begins a call, if a model omits the opener or has none
    quote      around strings
    tags       around functions and parameters, if calls are written so
    together   all calls are between one opener and one closer
    """

    name: str
    opener: str
    closer: str
    arguments: str
    divider: str = ""
    listed: bool = False
    each: tuple[str, str] = ("", "")
    bare: str = ""
    quote: str = ""
    tags: FunctionTags | None = None
    together: bool = False
    alone: bool = False
    fenced: bool = False

    @property
    def around(self) -> tuple[str, str, str]:
        """Texts before the name of one call among several, before its arguments, and behind
        these.
        """
        begin, end = self.each
        if self.fenced:
            return f"{begin}function{self.divider}", OPEN_FENCE, f"{CLOSE_FENCE}{end}"
        return begin, self.divider, end

    @property
    def begin(self) -> str:
        """The text that begins calls: the opener, or without one the beginning of a function."""
        return self.opener or self.bare

    @property
    def ends_thoughts(self) -> tuple[str, ...]:
        """Texts that end reasoning although it was not closed."""
        return (self.begin,) if self.bare or self.together else ()

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be control tokens of a model."""
        if self.opener == CHANNEL:
            return MARKS
        return tuple(filter(None, (self.opener, self.closer, self.divider, self.quote, *self.each)))

    @property
    def seen(self) -> tuple[str, ...]:
        """Texts that the parser needs even if they are control tokens: marks, and the beginnings of
        tags.
        """
        tags = self.tags
        ends = (tags.function_end, tags.parameter, tags.parameter_end) if tags is not None else ()
        return (*self.marks, *(text.partition(" ")[0] for text in (self.bare, *ends) if text))


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", "arguments", alone=True)
LLAMA3 = ToolFormat("llama3", "", "", "parameters", alone=True)
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "]", "arguments", listed=True)
GRANITE = ToolFormat("granite", "<|tool_call|>", "]", "arguments", listed=True)
PHI4 = ToolFormat("phi4", "<|tool_call|>", "<|/tool_call|>", "arguments")
GIGACHAT = ToolFormat("gigachat3.1", "<|function_call|>", "", "arguments")
KIMI = ToolFormat(
    "kimi",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "",
    "<|tool_call_argument_begin|>",
    each=("<|tool_call_begin|>", "<|tool_call_end|>"),
    together=True,
)
DEEPSEEK31 = replace(
    KIMI,
    name="deepseek-v3.1",
    opener="<\uff5ctool\u2581calls\u2581begin\uff5c>",
    closer="<\uff5ctool\u2581calls\u2581end\uff5c>",
    divider="<\uff5ctool\u2581sep\uff5c>",
    each=("<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"),
)
DEEPSEEK3 = replace(DEEPSEEK31, name="deepseek-v3", fenced=True)
HARMONY = ToolFormat("harmony", CHANNEL, "", "")
MISTRAL_ARGS = ToolFormat("mistral-args", "[TOOL_CALLS]", "", "", "[ARGS]")
GLM = ToolFormat("glm", "<tool_call>", "</tool_call>", "")
QWEN = ToolFormat(
    "qwen3-coder", "<tool_call>", "</tool_call>", "", bare="<function=", tags=QWEN_TAGS
)
SEED = replace(QWEN, name="seed-oss", opener="<seed:tool_call>", closer="</seed:tool_call>")
MINIMAX = ToolFormat(
    "minimax-m2",
    "<minimax:tool_call>",
    "</minimax:tool_call>",
    "",
    tags=MINIMAX_TAGS,
    together=True,
)
DSML = ToolFormat(
    "deepseek-v3.2",
    "<\uff5cDSML\uff5cfunction_calls>",
    "</\uff5cDSML\uff5cfunction_calls>",
    "",
    tags=DSML_TAGS,
    together=True,
)
DSML4 = replace(
    DSML,
    name="deepseek-v4",
    opener="<\uff5cDSML\uff5ctool_calls>",
    closer="</\uff5cDSML\uff5ctool_calls>",
)
GCML = replace(
    DSML,
    name="gigachat3.5",
    opener="<\uff5cGCML\uff5ctool_calls>",
    closer="</\uff5cGCML\uff5ctool_calls>",
    tags=GCML_TAGS,
)
MINICPM = ToolFormat("minicpm5", "", "", "", bare='<function name="', tags=MINICPM_TAGS)
GEMMA = ToolFormat("gemma4", "<|tool_call>", "<tool_call|>", "", quote=QUOTES[0])
FUNCTION_GEMMA = ToolFormat(
    "functiongemma", "<start_function_call>", "<end_function_call>", "", quote=QUOTES[1]
)
NEMOTRON = ToolFormat("nemotron", "<TOOLCALL>", "</TOOLCALL>", "arguments", listed=True)
APRIEL = replace(NEMOTRON, name="apriel", opener="<tool_calls>", closer="</tool_calls>")
LFM2 = ToolFormat("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", "", listed=True)
OLMO3 = ToolFormat("olmo3", "<function_calls>", "</function_calls>", "", together=True)

FORMATS = {
    format.name: format
    for format in (
        *(HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, GLM, QWEN, SEED),
        *(GRANITE, PHI4, KIMI, HARMONY, LFM2, GEMMA, MINIMAX, DSML, MINICPM),
        *(DEEPSEEK3, DEEPSEEK31, DSML4, GCML, GIGACHAT),
        *(FUNCTION_GEMMA, NEMOTRON, APRIEL, OLMO3),
    )
}

_SIGNS = (
    ("<arg_key>", GLM),
    (SEED.opener, SEED),
    (MINIMAX.opener, MINIMAX),
    ("\uff5cDSML\uff5c", DSML),
    (GCML.opener, GCML),
    ("<function=", QWEN),
    (MINICPM.bare, MINICPM),
    (KIMI.opener, KIMI),
    ("[ARGS]", MISTRAL_ARGS),
    ("[TOOL_CALLS]", MISTRAL),
    (f"{APRIEL.opener}[", APRIEL),
    (OLMO3.opener, OLMO3),
    ("<tool_call>", HERMES),
    ("<|/tool_call|>", PHI4),
    (GEMMA.opener, GEMMA),
    (FUNCTION_GEMMA.opener, FUNCTION_GEMMA),
    (GIGACHAT.opener, GIGACHAT),
    (NEMOTRON.opener, NEMOTRON),
    ("<|tool_call|>", GRANITE),
    (LFM2.opener, LFM2),
    ("<|tool_list_start|>", LFM2),
    ("List of tools: ", LFM2),
)


def takes_tools(template: str) -> bool:
    """Return whether a chat template mentions `tools` at all."""
    return re.search(r"\btools\b", template) is not None


def format_of(template: str) -> ToolFormat:
    """Return the format of calls in a chat template, recognised by its marks; Hermes if it has
    none.
    """
    if shows_harmony(template):
        return HARMONY
    for sign, format in _SIGNS:
        if sign in template:
            return DSML4 if format is DSML and "tool_calls>" in template else format
    if DEEPSEEK31.opener in template and takes_tools(template):  # Else calls are those of a prompt.
        return DEEPSEEK3 if f"{FENCE}json" in template else DEEPSEEK31
    llama = takes_tools(template) and "parameters" in template and "ipython" in template
    return LLAMA3 if llama else HERMES


_MOST_SPACE = 1024
"""Most white space that is held back: otherwise the time for a text of white space would grow
quadratically.
"""


class ToolReader:
    """Splits the text of one answer, in pieces of any size, into content and calls.

    Text that turns out to be no call is content, unchanged. White space around calls is dropped.

    several  whether more objects without an opener may be calls than the first; of those after an
             opener a grammar decides
    """

    def __init__(self, format: ToolFormat, tools: Tools, several: bool = True) -> None:
        self._format, self._several = format, several
        objects = JsonCalls(format.closer)
        self._body: Body = objects
        self._objects = objects
        self._heads = BareHeads(tools) if format.alone else None
        self._reading: Body | BareCalls = objects
        if format is GLM:
            self._body = GlmCalls(tools, format.closer)
        elif format.tags is not None:
            self._body = FunctionCalls(tools, format.closer, format.tags)
        elif format.quote:
            self._body = GemmaCalls(tools, format.closer, format.quote)
        elif format in (LFM2, OLMO3):
            self._body = PythonCalls(tools, format.closer)
        elif format is MISTRAL_ARGS:
            self._body = DividedCall()
        elif format.each[0]:
            self._body = MarkedCalls(format.around, format.closer, format is KIMI)
        self._inside = False
        self._spoke = False
        self._held = ""
        self._unread: list[str] = []
        self._read = False

    @property
    def called(self) -> bool:
        """Whether at least one call has begun."""
        return self._body.count > 0

    def push(self, text: str) -> ParsedDelta:
        """Parse the next piece of an answer, and return the content and calls that are certain; a
        possible part of a mark is held back.
        """
        content, calls = "", list[CallPiece]()
        self._held += text
        while self._held:
            before = self._inside
            if self._inside:
                calls += self._within()
                piece = "" if self._inside else self._no_call()
                self._spoke = self._spoke and not self._read
            else:
                piece = self._outside()
            content += piece
            self._spoke = self._spoke or bool(piece)
            if self._inside == before:
                break
        return ParsedDelta(content=content, calls=tuple(calls))

    def finish(self, cut: bool = False) -> ParsedDelta:
        """Return the content that was held back, at the end of the text. cut: the answer reached
        its token limit, so the beginning of a call is not content.
        """
        held, self._held = self._held, ""
        opener = self._format.begin
        if cut and opener and (self._inside or (held and opener.startswith(held.strip()))):
            return ParsedDelta()
        if self._inside:
            return ParsedDelta(content=self._no_call() + (held if not self._read else ""))
        return ParsedDelta(content=held.rstrip() if self.called else held)

    def _enter(self, body: Body | BareCalls, opener: str, rest: str) -> None:
        self._inside, self._read, self._unread = True, False, [opener]
        self._reading, self._held = body, rest

    def _within(self) -> Sequence[CallPiece]:
        """Pass the text to the body. What it reads before it finds a call may be none."""
        text = self._held
        calls, self._held, self._inside = self._reading.push(text)
        self._read = self._read or bool(calls)
        if self._read:
            self._unread.clear()
        else:
            self._unread.append(text[: len(text) - len(self._held)])
        return calls

    def _no_call(self) -> str:
        """Return the text of a body without a call, opener included."""
        text = "".join(self._unread)
        self._unread.clear()
        return text

    def _outside(self) -> str:
        """Return content that is certain; hold back white space and a possible beginning of a
        call.
        """
        text, opener, bare = self._held, self._format.opener, self._format.bare
        at = text.find(opener) if opener else -1
        heads = self._heads is not None and (self._several or not self.called)
        if heads and (found := self._head_before(at)) is not None:
            begin, brace = found
            content = text[:begin].rstrip()
            if brace < 0:
                self._held = text[len(content) :]
            else:
                self._enter(BareCalls(self._objects), text[len(content) : brace], text[brace:])
            return content
        alone = text.find(bare, 0, at if at >= 0 else None) if bare else -1
        if alone >= 0:
            content = text[:alone].rstrip()
            self._enter(self._body, text[len(content) : alone], text[alone:])
            return content
        if at >= 0:
            content = text[:at].rstrip()
            self._enter(self._body, text[len(content) : at] + opener, text[at + len(opener) :])
            return content
        marks = filter(None, (opener, bare, FENCE if self._format.alone else ""))
        held = max(overlap(text, mark) for mark in marks)
        end = len(text) - held
        cut = max(len(text[:end].rstrip()), end - _MOST_SPACE)
        self._held = text[cut:]
        return text[:cut]

    def _head_before(self, opener: int) -> tuple[int, int] | None:
        """Return (index where a call without an opener begins, index of its object's brace; -1 if
        later text decides); None if there is none before index `opener` (-1: anywhere).
        """
        assert self._heads is not None
        text, fence = self._held, -1
        place = fence if self._spoke else 0
        while place <= opener or opener < 0:
            brace = self._heads.object_at(text, place) if place >= 0 else -1
            if brace is None or brace >= 0:
                return place, -1 if brace is None else brace
            fence = text.find(FENCE, fence + 1)
            if fence < 0:
                return None
            place = fence
        return None
