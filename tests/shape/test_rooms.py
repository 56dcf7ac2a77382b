"""The drawing of the rooms is the one that the imports give, and no two rooms import each other."""

from tests.shape.rooms import DRAWING, drawing, reduced, rooms


def test_the_drawing_is_fresh():
    message = "the rooms have changed; run: .venv/bin/python -m tests.shape.rooms"
    assert DRAWING.read_text(encoding="utf-8") == drawing(), message


def test_rooms_do_not_import_each_other():
    assert reduced(rooms())["serve"]
