"""What we call no regular expression is none to V8 either, which is ECMA-262's."""

import random

from forerun.constrain.schema.regex_faults import regex_fault
from tests.constrain.test_regex_faults import NO_REGEX, PARTS

READ = """patterns => patterns.filter((pattern) => ["", "u", "v"].some((flags) => {
  try { return new RegExp(pattern, flags); } catch { return false; }
}))"""
"""Those that it takes with or without a flag."""


def test_v8_takes_none_of_what_is_refused(browser):
    rng = random.Random(8)
    patterns = ["".join(rng.choices(PARTS, k=rng.randint(1, 9))) for _ in range(20_000)]
    refused = [pattern for pattern in patterns if regex_fault(pattern)]
    assert len(refused) > 5000
    page = browser.new_page()
    assert page.evaluate(READ, [pattern for pattern, *_ in NO_REGEX]) == []
    assert page.evaluate(READ, refused) == []
    assert len(page.evaluate(READ, patterns)) > 1000, "it reads patterns"
