"""Modules of the web page that need no page, run by node; the page itself is tested in
tests/browser.
"""

import json
import shutil
import subprocess

import pytest

from forerun.serve.http.static_files import FOLDER

NODE = shutil.which("node")
STUBS = """
globalThis.document = { baseURI: "http://forerun/" };
const denied = () => { throw new DOMException("Access is denied", "SecurityError"); };
Object.defineProperty(globalThis, "sessionStorage", { get: denied, configurable: true });
Object.defineProperty(globalThis, "localStorage", { get: denied, configurable: true });
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run a module beside the page's own; the JSON that it prints."""
    if NODE is None:
        pytest.skip("no node in the PATH")
    folder = tmp_path_factory.mktemp("ui")
    (folder / "package.json").write_text('{"type": "module"}')
    for path in FOLDER.glob("*.js"):
        shutil.copy(path, folder)

    def ran(code):
        (folder / "stubs.js").write_text(STUBS)
        (folder / "test.js").write_text(f'import "./stubs.js";\n{code}')
        line = [NODE, str(folder / "test.js")]
        return json.loads(subprocess.run(line, capture_output=True, check=True, timeout=60).stdout)

    return ran


def imported(run, message, **conversation):
    """What an import says of a conversation with this message; its settings if it is taken."""
    said = {"role": "assistant", "content": "Hi"} | message
    file = {
        "format": "forerun-conversations",
        "conversations": [{"title": "t", "messages": [said], "options": {}} | conversation],
    }
    return run(f"""
      import {{ asMarkdown, fromJson }} from "./export.js";
      let shown;
      try {{
        const [file] = fromJson({json.dumps(json.dumps(file))}, () => "new");
        asMarkdown({{ ...file, options: {{ system: "", ...file.options }} }});
        shown = file.options;
      }} catch (error) {{ shown = `${{error.name}}: ${{error.message}}`; }}
      console.log(JSON.stringify(shown));
    """)


@pytest.mark.parametrize(
    "damage",
    [{"tool_calls": [{}]}, {"files": {}}, {"reasoning": 7}, {"variants": [{"content": None}]}],
)
def test_a_damaged_message_is_not_taken(run, damage):
    """It would be kept, and every later start of the page would fail to show it."""
    options = imported(run, damage)
    assert options == "Error: Conversation 1 of the file has a message that is damaged."


def test_settings_and_times_are_of_their_kind(run):
    whole = {"variants": [{"content": "a"}, {"content": "b"}], "variant": 2, "reasoning": "so"}
    options = {"temperature": "0.5", "max_tokens": 8, "speculation": False}
    assert imported(run, whole, options={**options, "unknown": 1}, created=1e300) == options
    kept = imported(run, {}, options={"system": 5})
    assert kept == "Error: Conversation 1 of the file has a setting that is damaged."


def test_a_key_is_used_where_the_browser_keeps_nothing(run):
    reply = run("""
      import { json, key } from "./api.js";
      const sent = [];
      globalThis.fetch = async (_, { headers }) => {
        sent.push(headers.authorization ?? null);
        return Response.json({});
      };
      await json("health");
      key.set("secret", true);
      await json("health");
      key.set("ключ", false);
      try { await json("health"); } catch (error) { sent.push(error.status); }
      console.log(JSON.stringify(sent));
    """)
    assert reply == [None, "Bearer secret", 401]


def test_figures_of_several_replicas_are_of_all_of_them(run):
    """Where `--replicas` puts their metrics on one page: shares are no sums, buckets are."""
    reply = run("""
      import { Metrics } from "./prom.js";
      const each = (fast, slow) => [["a", fast, 0.25, 2], ["b", slow, 0.75, 0]];
      const page = (...counts) => each(...counts).map(([name, count, used, length]) => `
        t_bucket{le="1",replica="${name}"} ${name === "a" ? count : 0}
        t_bucket{le="2",replica="${name}"} ${count}
        t_bucket{le="+Inf",replica="${name}"} ${count}
        used{replica="${name}"} ${used}
        length{replica="${name}"} ${length}`.replace(/^ +/gm, "")).join("\\n");
      const [before, now] = [new Metrics(page(1, 1), 0), new Metrics(page(2, 4), 1)];
      const shares = [0.25, 0.5].map((part) => now.quantile("t", part, before));
      console.log(JSON.stringify([...shares, now.mean("used"), now.mean("length", true)]));
    """)
    assert reply == [1.0, pytest.approx(4 / 3), 0.5, 2.0]


def test_a_key_that_is_remembered_is_said_to_be(run):
    """The box for it is set then: without it, using the key again would forget it."""
    reply = run("""
      import { key } from "./api.js";
      const kept = new Map();
      const storage = {
        getItem: (name) => kept.get(name) ?? null,
        setItem: (name, value) => kept.set(name, value),
        removeItem: (name) => kept.delete(name),
      };
      for (const name of ["localStorage", "sessionStorage"])
        Object.defineProperty(globalThis, name, { value: storage });
      const said = [key.kept()];
      for (const keep of [true, false]) { key.set("secret", keep); said.push(key.kept()); }
      console.log(JSON.stringify(said));
    """)
    assert reply == [False, True, False]


def test_a_key_that_composes_a_word_is_known(run):
    """Safari ends the composition before the key comes: only its code tells."""
    reply = run("""
      import { composes } from "./dom.js";
      const keys = [[true, 13], [false, 229], [false, 13]];
      const of = ([isComposing, keyCode]) => composes({ isComposing, keyCode });
      console.log(JSON.stringify(keys.map(of)));
    """)
    assert reply == [True, True, False]
