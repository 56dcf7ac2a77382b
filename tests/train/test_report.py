"""The report says what the metrics say and needs no other file."""

import xml.etree.ElementTree as xml

from forerun.train.report import Line, plot, write_report


def row(step, length):
    return {"step": step, "loss": 9 - length, "accuracy": [length / 4, 0.125], "length": length}


def test_report_is_one_file_with_all_checks(tmp_path):
    metrics = {
        "target": "a <small> model",
        "config": {"rate": 0.001},
        "answer_tokens": 12345,
        "chats": 7,
        "best_simulated_length": 1.5,
        "history": [row(0.0, 1.0), row(50.0, 1.25), row(100.0, 1.5)],
    }
    path = tmp_path / "report.html"
    write_report(path, metrics)
    page = path.read_text()
    assert "a &lt;small&gt; model" in page
    assert page.count("<svg") == 3
    assert all(text in page for text in ("12,345", "1.250", "0.312", "<td>rate</td>"))
    assert "http" not in page
    assert "src=" not in page


def test_averaged_weights_have_a_curve_of_their_own(tmp_path):
    history = [row(0.0, 1.0), row(9.0, 1.2) | {"averaged": 1.4}]
    metrics = {
        "target": "t",
        "config": {},
        "answer_tokens": 1,
        "chats": 1,
        "best_simulated_length": 1.4,
        "history": history,
    }
    write_report(tmp_path / "report.html", metrics)
    assert ">averaged</text>" in (tmp_path / "report.html").read_text()


def test_curves_lie_where_they_should():
    drawing = xml.fromstring(plot("x", [0, 10], [Line("up", [1.0, 3.0]), Line("flat", [2.0, 2.0])]))
    up, flat = (
        [[float(n) for n in point.split(",")] for point in line.get("points").split()]
        for line in drawing.iter("polyline")
    )
    assert up[0][0] < up[1][0]
    assert up[0][1] > flat[0][1] == flat[1][1] > up[1][1]  # y grows downwards.
    assert flat[0][1] == (up[0][1] + up[1][1]) / 2


def test_one_check_alone_can_be_drawn():
    assert "<polyline" in plot("x", [0.0], [Line("one", [2.0])])
