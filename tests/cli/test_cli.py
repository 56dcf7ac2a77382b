import importlib
import json
import shlex
import signal
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path
from statistics import median

import pytest

from forerun.cli.commands import COMMANDS
from forerun.cli.main import main
from forerun.cli.run import ROUNDS
from forerun.hub import huggingface
from forerun.hub.catalog import BUILT_IN
from tests.worlds.servers import run_program

TOY = ["--model", "toy", "--kv-tokens", "8192"]
FORERUN = [sys.executable, "-m", "forerun.cli"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_exists_and_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    assert "--json" in capsys.readouterr().out
    assert callable(importlib.import_module(f"forerun.cli.{command}").main)


WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\nfrom forerun.cli.main import main\n"


@pytest.mark.model
def test_what_needs_torch_says_how_to_install_it(tmp_path):
    lines = [
        ["train", "--out", "x", "--preset", "smoke", "--model", "org/never-fetched"],
        ["run", "Hi", "--device", "cuda"],
        ["run", "Hi", "--executor", "torch"],
    ]
    program = f"{WITHOUT_TORCH}print([main(line) for line in {lines}])"
    done = run_program(program, cwd=tmp_path)
    assert done.stdout == "[2, 2, 2]\n" and "Traceback" not in done.stderr
    assert done.stderr.count("pip install 'forerun[torch]'") == 3
    assert done.stderr.count("make tools") == 3


@pytest.mark.model
def test_counting_ngrams_needs_no_torch(tmp_path):
    (tmp_path / "a.txt").write_text("The sky is blue and the sea is blue. " * 20)
    line = ["train", "smollm2-135m", "--out", "out"]
    answers = ["--preset", "table", "--answers", "2", "--answer-tokens", "8", "--held-out", "1"]
    lines = [[*line, "--text", "a.txt"], [*line, "--token-map", "a.txt"], [*line, *answers]]
    program = f"{WITHOUT_TORCH}print([main(line) for line in {lines}])"
    done = run_program(program, cwd=tmp_path)
    assert done.stdout == "[0, 0, 0]\n", done.stderr
    assert "n-gram table is in out/draft" in done.stderr.replace("\n", " ")


def test_run_prints_the_answer_alone_on_stdout(capsys):
    assert main(["run", "Hello", *TOY, "--max-tokens", "30"]) == 0
    out, err = capsys.readouterr()
    assert len(out) == 31 and out.endswith("\n")
    assert "30 tokens" in err and "tokens per step" in err


def test_run_as_json_compared_with_plain(capsys):
    assert main(["run", "Hello", *TOY, "--max-tokens", "60", "--compare", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["same_text"] is True
    assert report["tokens"] == 60 and len(report["text"]) == 60
    assert report["tokens_per_step"] > 1.2
    assert report["speculation"]["draft_tokens"] >= report["speculation"]["accepted"] > 0
    ratios = sorted(again / plain for plain, again in report["rounds"])
    assert len(ratios) == ROUNDS and report["speedup"] == pytest.approx(median(ratios))
    plain = [plain for plain, _ in report["rounds"]]
    assert report["plain_tokens_per_second"] == median(plain)


def test_a_comparison_does_not_draft_from_its_own_answers(capsys):
    """Counted, an answer drafted its own repetitions: 3.8 times plain decoding instead of 1.2."""
    assert main(["run", "Hello", *TOY, "--max-tokens", "20", "--compare", "--json"]) == 0
    info = json.loads(capsys.readouterr().out)["info"]
    assert info["config"]["speculative_ngram_capacity"] == 0
    assert main(["run", "Hello", *TOY, "--max-tokens", "20", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["info"]["config"]["speculative_ngram_capacity"] > 0


def test_run_claims_no_speed_that_it_did_not_measure(capsys):
    assert main(["run", "Hello", *TOY, "--max-tokens", "40", "--policy", "fixed"]) == 0
    err = capsys.readouterr().err
    assert err.count("tokens/s") == 1 and "plain" not in err
    assert "--compare measures the speed without speculation" in err


def test_run_tells_no_speed_of_a_few_tokens(capsys):
    assert main(["run", "Hi", *TOY, "--raw", "--max-tokens", "3", "--compare"]) == 0
    output_tokens = capsys.readouterr().err
    assert "3 tokens, too few to tell a speed" in output_tokens
    assert "tokens/s" not in output_tokens and "same text" in output_tokens
    assert main(["run", "Hi", *TOY, "--raw", "--max-tokens", "3", "--compare", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tokens_per_second"] is report["speedup"] is None


def test_the_prompt_may_come_from_a_pipe():
    done = subprocess.run(
        [*FORERUN, "run", *TOY, "--max-tokens", "5", "--raw"],
        input="Hi",
        capture_output=True,
        check=False,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "djell\n")


def test_a_pipe_that_is_no_text_is_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(b"a\xff"), "utf-8"))
    assert main(["run", *TOY]) == 2
    assert capsys.readouterr().err.strip() == "forerun: The prompt is not valid UTF-8."


def test_seeds_and_stops_reach_the_sampler(capsys):
    texts = []
    for flags in (
        ["--seed", "1"],
        ["--seed", "2"],
        ["--seed", "1", "--speculative-algorithm", "off"],
    ):
        main(["run", "Hi", *TOY, "--temperature", "1", "--max-tokens", "20", *flags])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[2] != texts[1]
    assert main(["run", "Hi", *TOY, "--raw", "--stop", "el"]) == 0
    assert capsys.readouterr().out == "dj\n"


WRONG = (
    *("fly", "run --pages 1", "run Hi --top-k x", "bench", "bench --launch --concurrency 0"),
    *("bench --launch --url u", "bench --launch --repeats 0", "eval --tokens 0"),
    *("eval --temperatures warm", "prove --temperatures 0,nan"),
)


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        (["serv"], 2, "there is no command 'serv'; did you mean serve?"),
        (["run", "Hi", "--model", "smollm2-135"], 3, "did you mean smollm2-135m"),
        (["run", "Hi", "--model", "/nowhere/x.gguf"], 3, "/nowhere/x.gguf"),
        (["run", "Hi", *TOY, "--page-size", "0"], 2, "page-size is 0"),
        (["run", "   ", *TOY], 2, "prompt is empty"),
        (["run", "Hi", *TOY, "--context", "16", "--max-tokens", "500"], 2, "context"),
        (["run", "Hi", "--model", "toy", "--kv-tokens", "999999999999"], 4, "kv-tokens"),
        (["run", "Hi", "--device", "cuda", "--executor", "cpu"], 2, "torch executor"),
        (["prove", *TOY, "--count", "5000"], 2, "5000 prompts"),
        (
            ["prove", *TOY, "--prompts", "/nowhere.jsonl"],
            2,
            "The prompts in /nowhere.jsonl cannot be read: No such file or directory.",
        ),
        (["bench", "--url", "http://127.0.0.1:9/v1"], 2, "does not list its models"),
        (["fetch", "no-such-model"], 3, "no-such-model"),
        (["bench", "--url", "u", "--threads", "2"], 2, "--threads is for --launch"),
        (["bench", "--launch", "--api-key", "k"], 2, "--api-key is for --url"),
        (["run", "Hi", *TOY, "--compare", "--speculative-algorithm", "off"], 2, "--compare"),
        (["run", "Hi", *TOY, "--raw", "--system", "Rhyme."], 2, "--system"),
        (["tune", *TOY, "--speculative-algorithm", "off"], 2, "nothing to tune"),
        (["tune", *TOY, "--out", "/nowhere/a.png"], 2, "no folder /nowhere"),
        (["tune", *TOY, "--out", "a.jpg"], 2, "end in .png"),
        (["eval", *TOY, "--speculative-algorithm", "off"], 2, "nothing to measure"),
        (["eval", *TOY, "--set", "a=/nowhere.jsonl"], 2, "/nowhere.jsonl"),
        (["eval", *TOY, "--count", "999"], 2, "999 prompts cannot be taken of"),
        (
            ["train", "--out", "/o", "--preset", "table", "--start-from", "/d"],
            2,
            "--start-from belongs to --method eagle3 or eagle, not to table",
        ),
        *((line.split(), 2, "") for line in WRONG),
    ],
)
def test_errors_are_one_sentence_and_an_exit_code(line, code, says, capsys):
    assert main(line) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("forerun: ") and says in err
    assert "Traceback" not in err and "usage" not in err and len(err.splitlines()) == 1


def test_forerun_alone_prints_help(capsys):
    assert main([]) == 0
    assert "COMMAND" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (["tune"], ["--policy", "--speculative-num-steps", "--draft-max", "--max-sequences"]),
        (
            ["eval"],
            ["--policy", "--speculative-num-steps", "--draft-max", "--speculative-eagle-topk"],
        ),
        (["eval"], ["--max-sequences"]),
        (["prove"], ["--max-sequences"]),
        (["train", "--out", "x"], ["--max-sequences"]),
    ],
)
def test_what_a_command_decides_itself_is_no_flag_of_its(command, flags, capsys):
    for flag in flags:
        assert main([*command, flag, "4"]) == 2
        err = capsys.readouterr().err
        said = f"There is no option {flag} of forerun {command[0]}; another command has it"
        assert said in err


@pytest.mark.parametrize("command", ["ps", "stop"])
def test_where_a_server_is_is_said_by_its_url(command, capsys):
    assert main([command, "--port", "8999"]) == 2
    said = f"There is no option --port of forerun {command}; use --url for the server's address."
    assert said in capsys.readouterr().err


def test_a_reader_that_goes_away_is_not_an_error():
    line = " ".join([*FORERUN, "run", "Hi", *TOY, "--max-tokens", "3000", "--ignore-eos"])
    done = subprocess.run(
        ["bash", "-c", f'{line} | head -c 5; echo " ${{PIPESTATUS[0]}}"'],
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.stdout.split()[-1] == "141"
    assert "Traceback" not in done.stderr and "Broken" not in done.stderr


def test_a_closed_stream_is_no_traceback():
    """As `>&-` leaves it, or a program that starts others with fewer."""
    line = f"{sys.executable} -m forerun chat toy --max-tokens 2"
    done = subprocess.run(
        f"{line} <&- >&-", shell=True, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr


def test_control_c_ends_with_130_and_without_a_traceback():
    process = subprocess.Popen(
        [*FORERUN, "run", "Hi", *TOY, "--context", "4000",
         "--max-tokens", "3900", "--ignore-eos", "--speculative-algorithm", "off"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        # Tests may run in the background of a shell, where SIGINT is ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )  # fmt: skip
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err.decode().strip() == "interrupted"


def test_prove_verdicts_and_json(capsys):
    quick = ["prove", *TOY, "--quick", "--tokens", "40", "--count", "4"]
    assert main([*quick, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["holds"] and len(report["runs"]) == 8
    assert report["machine"]["cores"] >= 1
    assert main([*quick, "--temperatures", "100", "--tokens", "4"]) == 1
    out, err = capsys.readouterr()
    assert "NOTHING PROVED" in err and "4 of 4" in out
    assert "tokens/s" not in out and "forced into every step" in err


def test_doctor_describes_the_machine(capsys):
    code = main(["doctor", "--json", "--no-torch"])
    facts = json.loads(capsys.readouterr().out)
    assert facts["machine"]["memory_available_bytes"] > 0
    assert facts["packages"]["numpy"]
    works = facts["native_core"]["works"] or facts["torch"]["installed"]
    assert code == (0 if works else 1)
    assert main(["doctor", "--no-torch"]) == code
    assert "compiled core" in capsys.readouterr().out


def test_doctor_names_the_models_that_forerun_list_has(capsys, monkeypatch, tmp_path):
    """Behind a link to another disk too, whatever else lies there: links that lead nowhere, or
    round and round.
    """
    model, disk = BUILT_IN["smollm2-135m"], tmp_path / "disk"
    disk.mkdir()
    with (disk / model.file_name).open("wb") as file:
        file.truncate(model.size)
    (disk / "gone.gguf").symlink_to(tmp_path / "nowhere")
    (disk / "here").symlink_to(".")
    (disk / "above").symlink_to("..")
    (tmp_path / "forerun").mkdir()
    (tmp_path / "forerun" / "models").symlink_to(disk)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(huggingface, "cached", list)
    main(["doctor", "--json", "--no-torch"])
    models = json.loads(capsys.readouterr().out)["cache"]["models"]
    assert models == {"smollm2-135m": model.size}


def test_help_loads_nothing_heavy_and_little():
    """Quick on any machine: of 179 modules, 32 are Python's own at its start."""
    program = (
        "import sys, forerun.cli.command_line as cli; cli.build_parser().format_help();"
        "heavy = ('numpy', 'rich', 'torch', 'httpx', 'starlette');"
        "print([name for name in heavy if name in sys.modules], len(sys.modules))"
    )
    done = run_program(program)
    heavy, _, count = done.stdout.strip().rpartition(" ")
    assert heavy == "[]" and int(count) < 210


def test_constrained_answers(capsys, tmp_path):
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["Paris", "Amsterdam"]}')
    assert main(["run", "Which city?", *TOY, "--schema", str(schema)]) == 0
    assert json.loads(capsys.readouterr().out) in ("Paris", "Amsterdam")
    assert main(["run", "Which city?", *TOY, "--regex", "(Paris|Amsterdam)", "--compare"]) == 0
    assert capsys.readouterr().out.strip() in ("Paris", "Amsterdam")
    assert main(["run", "Which city?", *TOY, "--regex", "(Paris|Amsterdam}"]) == 2
    assert "'}' where ')' was expected at character 16" in capsys.readouterr().err
    schema.write_text("{")
    assert main(["run", "Which city?", *TOY, "--schema", str(schema)]) == 2
    assert f"--schema {schema} is not JSON" in capsys.readouterr().err
    assert main(["run", "Which city?", *TOY, "--grammar", str(tmp_path / "none")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_prove_with_everything(capsys):
    quick = ["--quick", "--count", "9", "--tokens", "20", "--mixed", "--kv-tokens", "1024"]
    assert main(["prove", *TOY, *quick, "--regex", "([a-p]{2},){20}"]) == 0
    out, err = capsys.readouterr()
    assert "other parameters for each" in " ".join(out.split()) and "12 of 12" in out
    assert "draft tokens were accepted" in err.replace("\n", " ")


def test_nearly_nothing_is_imported_where_an_interrupt_would_be_a_traceback():
    """All of Forerun that is loaded before `main` can turn it into a word."""
    program = (
        "import sys, forerun.cli.main; print(*sorted(m for m in sys.modules if 'forerun' in m))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, check=False, text=True
    )
    own = "forerun forerun.cli forerun.cli.main forerun.errors forerun.version"
    assert done.stdout.strip() == own, done.stderr


def test_a_signal_while_the_command_line_is_built_is_no_traceback(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("forerun.cli.command_line.build_parser", interrupted)
    assert main(["serve"]) == 130
    assert capsys.readouterr().err.strip() == "interrupted"


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="this system has no full device")
@pytest.mark.parametrize(
    ("before", "out", "error"),
    [("", FULL, "No space left on device"), ("ulimit -f 0; ", "out", "File too large")],
)
def test_an_output_that_cannot_be_written_is_said(tmp_path, before, out, error):
    command = [sys.executable, "-m", "forerun", "run", "Hi", "--model", "toy"]
    line = ["sh", "-c", f"{before}exec {shlex.join(command)} > {out}"]
    done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 141
    assert f"the output cannot be written: {error}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_command_that_is_killed_by_a_fault_says_what_ran():
    """A model's file that is cut while it is read ends a process by SIGBUS."""
    program = (
        "import os, signal\nimport forerun.cli.main as cli\n"
        "def main(): os.kill(os.getpid(), signal.SIGBUS)\n"
        "cli.main = main\ncli.console()"
    )
    done = run_program(program)
    assert done.returncode == -signal.SIGBUS
    assert "Bus error" in done.stderr and "in console" in done.stderr
