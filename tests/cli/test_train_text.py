"""`forerun train --text`: an n-gram table of text files, without an answer of the model."""

import pytest

from forerun.cli.main import main
from forerun.drafts.ngram_table import FILE, read_ngram_table

VOCAB = 49152


@pytest.mark.model
def test_text_files_become_a_draft(tmp_path):
    texts = []
    for name, text in (("a.txt", "The sky is blue and the sea is blue. " * 20), ("b.md", "é" * 9)):
        texts.append(tmp_path / name)
        texts[-1].write_text(text, encoding="utf-8")
    out = tmp_path / "out"
    assert main(["train", "smollm2-135m", "--out", str(out), "--text", *map(str, texts)]) == 0
    table = read_ngram_table(out / "draft" / FILE, VOCAB)
    assert table.contexts > 10 and not table.answers


@pytest.mark.model
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"once", "no pair of tokens occurs twice"),
        (b"", "no pair of tokens occurs twice"),
    ],
)
def test_what_is_no_text_is_refused_by_name(tmp_path, capsys, content, says):
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    code = main(["train", "smollm2-135m", "--out", str(tmp_path / "out"), "--text", str(text)])
    assert code == 1 or code == 2
    error = capsys.readouterr().err
    assert says in error and "text.txt" in error and "Traceback" not in error


@pytest.mark.model
def test_what_the_same_command_does_not_mend_is_not_said_to_go_on(tmp_path, capsys):
    (tmp_path / "target.json").write_text('"another"')
    line = ["train", "smollm2-135m", "--out", str(tmp_path), "--preset", "table"]
    assert main(line) == 2
    printed = capsys.readouterr().err
    assert "holds chats of another, not of " in printed and "same command" not in printed


@pytest.mark.model
@pytest.mark.parametrize("flag", ["--text", "--token-map"])
def test_results_that_cannot_be_written_are_a_sentence(tmp_path, capsys, flag):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("The sky is blue and the sea is blue. " * 20)
    out.mkdir()
    (out / "draft").write_text("a file")
    (out / "token_map.json").mkdir()
    assert main(["train", "smollm2-135m", "--out", str(out), flag, str(text)]) == 5
    assert f"{out} cannot be written (" in capsys.readouterr().err
