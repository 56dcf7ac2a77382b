"""Formatting with `%`, and methods of strings, in chat templates: as Jinja does it."""

import jinja2
import pytest

from forerun.errors import RequestError
from forerun.text.percent import with_filters
from forerun.text.template import Template

NAMES = {
    "x": "it's a-b c_d",
    "n": 7,
    "f": 3.14159,
    "none": None,
    "d": {"a": 1, "b": {"c": "deep"}},
    "items": ["p", "q"],
}
SAME = [
    "{{ '%s' % x }}",
    "{{ '%s' % n }}{{ '%d' % n }}{{ '%s' % none }}",
    "{{ '%s-%05d' % (x, n) }}",
    "{{ '%s' % (x,) }}|{{ '%s' % (x) }}",
    '{{ "%s" % x ~ "!" }}{{ "a" + "%s" % x }}',
    "{{- '%.2f' % f -}} | {{ '%5.1f%%' % f }}",
    "{{ '%s' % d.b.c }}{{ '%s' % d['a'] }}{{ '%s' % items[0] }}",
    "{{ '%s' % x|upper }}{{ '%s' % x | replace('a', 'o') | upper }}",
    "{{ '%s' % x.split(' ')[0].upper() }}",
    "{{ '%s' % -n }}{{ '%s' % [1, (2, 3)]|length }}",
    "{{ '%s' % ('%s' % n) }}{{ '%s, %s' % ('%d' % n, '%%') }}",
    "{{ '%(a)s' % d }}",
    "{{ '%s and %s' % (items[0], {'k': '}}'}['k']) }}",
    "{% if '%d' % n == '7' %}yes{% else %}no{% endif %}",
    "{% set y = '<%s>' % x %}{{ y }}",
    "{% for i in items %}{{ '%d:%s ' % (loop.index, i) }}{% endfor %}",
    "{{ n % 4 }}{{ (n + 1) % 3 }}{{ n%2 }}{{ 17 % n }}",
    "'%s' % x {# '%s' % x #} {% raw %}{{ '%s' % x }}{% endraw %}{{ '%s' % n }}",
    "100%{{ '%' }}{{ '{{' }}{{ '%}' }}{{ \"it's %s\" % n }}",
    "{{ {'a': {'b': '%s' % n}} }}",
    "{{ x.title() }}{{ x|title }}{{ 'AB cD'.title() }}{{ 'AB cD'|title }}",
    "{{ x.title() ~ 'a b'.title() }}{{ x.title()|upper }}",
    "{{ x.upper() }}{{ x.lower() }}{{ x.capitalize() }}",
    "{{ '{} {}'.format(x, n) }}",
    "{{ '%s' | format(x) }}{{ '%s%s' | format(x, n) }}",
    "{{ d.q|length }}{{ q | count }}{{ x|length }}{{ d.q|first }}|{{ items|last }}{{ d.q|last }}",
    "{% for k, v in d.q|items %}{{ k }}{% endfor %}{% if d.q|length > 0 %}!{% endif %}{{ n }}",
    "a\r\n{% if n %}\r\nb\r{% endif %}\r\nc",
]


@pytest.mark.parametrize("source", SAME)
def test_it_is_what_jinja_makes_of_it(source):
    theirs = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    assert Template(source).render(NAMES) == theirs.render(NAMES)


@pytest.mark.parametrize(
    "source",
    [
        "",
        "text",
        "{{ a % b }}",
        "{{ n % 2 == 0 }}",
        "{% if a %}",
        "{{ '%s' }}",
        "{{",
        "{%",
        "{#",
        "{{ '",
        "{{ 'a' % }}",
        "{{ 'a' %",
        '{{ "\\" % " }}',
        "{% raw %}{{ '%s' % x }}",
        "{{ x.title().upper() }}",
        "{{ x.title",
        "{{ x.title(",
    ],
)
def test_all_else_stays_as_it_is(source):
    assert with_filters(source) == source


@pytest.mark.parametrize(
    "source", ["{{ '%d' % x }}", "{{ '%s %s' % x }}", "{{ '%(z)s' % d }}", "{{ '%q' % n }}"]
)
def test_what_cannot_be_formatted_is_named(source):
    with pytest.raises(RequestError, match="the chat template cannot format '%"):
        Template(source).render(NAMES)


@pytest.mark.parametrize("source", ["{{ '%99999d' % n }}", "{{ '%(n)99999d' % {'n': n} }}"])
def test_an_absurd_width_is_refused_here_too(source):
    with pytest.raises(RequestError, match="absurd width"):
        Template(source).render(NAMES)


def test_a_tag_that_does_not_end_is_left_to_the_parser():
    assert with_filters("{{ x.title()") == "{{ x|title_of_python"
    assert with_filters("{{ '%s' % x") == "{{ ('%s'|format(x))"
