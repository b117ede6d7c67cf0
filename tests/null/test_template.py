"""What a template may take: those that never end, or make what no memory holds, are refused in little time."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from deltic.models.checkpoint import DEMO
from deltic.server.chat import metered as template
from deltic.server.chat.constraint import NotInline
from deltic.server.chat.template import ChatTemplate
from deltic.server.errors import ApiError
from deltic.text import Tokenizer, TokenizerError
from tests.fake_engine import TEMPLATE, FakeEngineClient, byte_tokenizer, make_app, served

GROWTH = "{% set s = namespace(v='" + "a" * 1000 + "') %}{% for i in range(40) %}{% set s.v = @ %}{% endfor %}"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}@{% endfor %}{% endfor %}"
READS = "{% set s = 'a' * 30000000 %}{% set z = 'a' * 30000000 %}{% set l = [0] * 900000 %}{% for i in range(9999) %}{% set y = @ %}{% endfor %}"
HOSTILE = {
    "loops": LOOPS.replace("@", ""),
    "loops with text": LOOPS.replace("@", "x" * 10_000),
    "loops of a macro": "{% macro m() %}{% for i in range(99999) %}{% endfor %}{% endmacro %}{% for i in range(99999) %}{{ m() }}{% endfor %}",
    "recursion": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(40) }}",
    "recursive loop": "{% for i in range(99999) recursive %}{{ loop(range(99999)) if loop.depth < 3 }}{% endfor %}",
    "filtered loop": "{% for i in range(99999) %}{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "text times a number": "{{ 'a' * 3000000000 }}",
    "number times a text": "{{ 3000000000 * 'a' }}",
    "list times a number": "{{ [0] * 3000000000 }}",
    "power": "{{ 9 ** 999999999 }}",
    "products": "{% set n = namespace(v=9) %}{% for i in range(60) %}{% set n.v = n.v * n.v %}{% endfor %}",
    "sums": GROWTH.replace("@", "s.v + s.v"),
    "joins": GROWTH.replace("@", "s.v ~ s.v"),
    "joins of two": GROWTH.replace("@", "[s.v, s.v] | join"),
    "joins by a method": GROWTH.replace("@", "s.v.join([s.v, s.v])"),
    "replacements": GROWTH.replace("@", "s.v.replace('a', s.v)"),
    "replacements by a filter": GROWTH.replace("@", "s.v | replace('a', s.v)"),
    "formats": GROWTH.replace("@", "'%s%s' % (s.v, s.v)"),
    "formats by a filter": GROWTH.replace("@", "'%s%s' | format(s.v, s.v)"),
    "formats by a method": GROWTH.replace("@", "'{0}{0}'.format(s.v)"),
    "formats of a map": GROWTH.replace("@", "'{a}{a}'.format_map({'a': s.v})"),
    "blocks": "{% set s = namespace(v='" + "a" * 1000 + "') %}{% for i in range(40) %}{% set v %}{{ s.v }}{{ s.v }}{% endset %}{% set s.v = v %}{% endfor %}",
    "lists": "{% set s = namespace(v=[1, 2]) %}{% for i in range(40) %}{% set s.v = s.v + s.v %}{% endfor %}",
    "nested lists": "{% set s = namespace(v=['a' * 1000]) %}{% for i in range(60) %}{% set s.v = [s.v, s.v] %}{% endfor %}{{ s.v }}",
    "nested lists as JSON": "{% set s = namespace(v=['a']) %}{% for i in range(60) %}{% set s.v = [s.v, s.v] %}{% endfor %}{{ s.v | tojson }}",
    "nested lists in a name space": "{% set s = namespace(v=['a']) %}{% for i in range(60) %}{% set s.v = [s.v, s.v] %}{% endfor %}{{ s }}",
    "width": "{{ '%3000000000d' % 1 }}",
    "width behind a name with brackets": "{{ '%(a(b)c)300000d' % {'a(b)c': 1} }}",
    "width behind a long name": "{{ ('%(' ~ 'a' * 999 ~ ')300000d') % ({'a': 1}) }}",
    "width behind many colons": "{{ (':' * 900000 ~ '{:>3000000000}').format(1) }}",
    "names without end": "{{ ('%(' * 400000) % ({'a': 1}) }}",
    "width that is a value": "{{ '%*d' % (3000000000, 1) }}",
    "width of a filter": "{{ '%3000000000d' | format(1) }}",
    "width of a method": "{{ '{:>3000000000}'.format(1) }}",
    "width of a method that is a value": "{{ '{:>{}}'.format(1, 3000000000) }}",
    "center": "{{ 'a' | center(3000000000) }}",
    "ljust": "{{ 'a'.ljust(3000000000) }}",
    "tabs": "{{ ('\\t' * 1000000).expandtabs(1000000) }}",
    "indentation": "{{ ('a\\n' * 1000000) | indent(100000) }}",
    "JSON's indentation": "{{ [1] | tojson(indent=3000000000) }}",
    "batch": "{{ [1] | batch(3000000000, 0) | list }}",
    "slices": "{{ [1] | slice(3000000000) | list }}",
    "sum of lists": "{% set s = ([[1] * 1000] * 1000) %}{% for i in range(99999) %}{{ s | sum(start=[]) | length }}{% endfor %}",
    "filters": "{% for i in range(99999) %}{{ range(99999) | list | sort | length }}{% endfor %}",
    "maps": "{{ (['a' * 1000000] * 1000) | map('replace', 'a', 'aa') | list | length }}",
    "texts of a map": "{{ (['a' * 1000000] * 1000000) | map('upper') | join | length }}",
    "searches": READS.replace("@", "s.count('ab')"),
    "searches by an operator": READS.replace("@", "'b' in s"),
    "searches of a list": READS.replace("@", "'b' in l"),
    "searches by a test": READS.replace("@", "'b' is in(l)"),
    "many texts looked for": READS.replace("@", "'b'.startswith(('a',) * 900000)"),
    "comparisons": READS.replace("@", "s == z"),
    "comparisons by a filter": READS.replace("@", "[s] | select('eq', z) | list"),
    "comparisons of nested lists": "{% set s = namespace(v=[1], w=[1]) %}{% for i in range(60) %}{% set s.v = [s.v, s.v] %}{% set s.w = [s.w, s.w] %}{% endfor %}{{ s.v == s.w }}",
    "sorted nested lists": "{% set s = namespace(v=[1], w=[1]) %}{% for i in range(60) %}{% set s.v = [s.v, s.v] %}{% set s.w = [s.w, s.w] %}{% endfor %}{{ [s.v, s.w] | sort | length }}",
    "slices of a text": READS.replace("@", "s[1:]"),
    "slices of a list": READS.replace("@", "l[1:]"),
    "bytes times a number": "{{ ('a'.encode() * 3000000000) | length }}",
    "bytes of a number": "{{ (1).to_bytes(3000000000) | length }}",
    "rounding": "{{ 1 | round(-1000000000) }}",
    "translation": "{{ ('a' * 1000000).translate({97: 'a' * 1000000}) }}",
}  # fmt: skip
USER: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("what", HOSTILE)
def test_a_template_that_takes_too_much_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MOST_STEPS", 100_000)  # to be quick
    began_s = time.process_time()
    hostile = ChatTemplate({"default": HOSTILE[what]}, byte_tokenizer())
    with pytest.raises(ApiError, match="takes too much for them") as caught:
        hostile.render(USER)
    assert caught.value.status == 400 and time.process_time() - began_s < 15


@pytest.mark.parametrize("what", ["loops", "joins", "short searches"])
def test_it_is_not_tried_in_the_event_loop(what: str) -> None:
    async def go() -> None:
        searches = "{% set s = 'a' * 900000 %}{% for i in range(800) %}{{ s.count('ab') }}{% endfor %}"
        hostile = ChatTemplate({"default": HOSTILE.get(what, searches)}, byte_tokenizer())
        began_s = time.process_time()
        with pytest.raises(NotInline):
            hostile.render(USER)
        assert time.process_time() - began_s < 3

    asyncio.run(go())


def test_others_are_served_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "MOST_STEPS", 100_000)
    with served(
        make_app(FakeEngineClient(), TEMPLATE + "{% if x is defined %}" + HOSTILE["loops"] + "{% endif %}")
    ) as url:
        asked = {"messages": USER, "chat_template_kwargs": {"x": 1}}
        assert "takes too much" in httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60).text
        assert httpx.post(f"{url}/v1/chat/completions", json={"messages": USER}).status_code == 200


def test_a_request_s_own_template_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where requests may bring one, a hostile one is that request's error, and who asks meanwhile is answered."""
    monkeypatch.setattr(template, "MOST_STEPS", 100_000)
    with served(make_app(FakeEngineClient(), TEMPLATE, trust_request_chat_template=True)) as url:

        def ask(**more: Any) -> httpx.Response:
            return httpx.post(f"{url}/v1/chat/completions", json={"messages": USER} | more, timeout=60)

        for what in (
            "loops",
            "recursion",
            "text times a number",
            "power",
            "joins",
            "width",
            "nested lists as JSON",
            "searches",
        ):
            response = ask(chat_template=HOSTILE[what])
            assert response.status_code == 400 and "takes too much" in response.text, what
        for n in (10**9, 10**18, -(10**9), 10**400):
            response = ask(chat_template="{% for i in range(n) %}x{% endfor %}", chat_template_kwargs={"n": n})
            assert response.status_code in (200, 400), response.text
        assert ask().status_code == 200


def test_a_checkpoint_whose_template_takes_too_much_is_refused(tmp_path: Path) -> None:
    settings = {"chat_template": HOSTILE["text times a number"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(TokenizerError, match="takes too much even for a chat of one word"):
        ChatTemplate.load(tmp_path, byte_tokenizer())
    with pytest.raises(TokenizerError, match="more than 1000000 characters"):
        ChatTemplate({"default": "a" * 2_000_000}, byte_tokenizer())


def test_numbers_that_are_values_are_of_any_size() -> None:
    """Of macros, lists, mappings, tests and formats, as a time in milliseconds in a call of the history."""
    source = (
        "{% macro show(v) %}{{ v }}{% endmacro %}{% set t = messages[0].time %}"
        "{{ show(t) }} {{ show(v=t) }} {{ {t: 1}.get(t, t) }} {{ [t].index(t) }} {{ x | default(t) }} {{ '%d' % t }} "
        "{{ '{}'.format(t) }} {{ '%d' | format(t) }} {{ [t] | select('eq', t) | list }} {{ namespace(v=t).v }} {{ dict(v=t).v }} "
        "{{ t | string }} {{ t | tojson }} {{ [1] | join(t) }}{% generation %}{% set t = 1 %}{{ t }}{% endgeneration %} {{ t }}"
    )
    t = 1735689600000
    ids = ChatTemplate({"default": source}, byte_tokenizer()).render([USER[0] | {"time": t}]).ids
    assert byte_tokenizer().decode(ids) == f"{t} {t} 1 0 {t} {t} {t} {t} [{t}] {t} {t} {t} {t} 11 {t}"


def test_what_templates_do_stays() -> None:
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ ' last' if loop.last }} {% endfor %}"
        "{{ messages | map(attribute='role') | join(',') }} {{ messages[::-1] | length }} {{ 'a-b'.split('-') | list }} "
        "{{ '%s has %5d' % ('a', 3) }} {{ '{:>4}'.format('x') }} {{ {'a': [1, 'é']} | tojson }} {{ 'x' * 3 ~ (2 + 1) }} "
        "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% else %}none{% endfor %} "
        "{% for x in [1, [2, [3]]] recursive %}{{ loop(x) if x is not number else x }}{% endfor %} {{ 'a\\nb' | indent(2) }} "
        "{{ 1 < 2 < 3 }}{{ 1 < 2 > 3 }}{{ 'a' not in 'bc' }}{{ 'a' in {'a': 1} }}{{ 'abc'[1:] }}{{ [1, 2, 3][:-1] }}{{ 2 is in([2]) }}"
    )
    ids = ChatTemplate({"default": source}, byte_tokenizer()).render([*USER, {"role": "assistant", "content": "b"}]).ids
    assert byte_tokenizer().decode(ids) == (
        "1/2 2/2 last user,assistant 2 ['a', 'b'] a has     3    x {\"a\": [1, \"é\"]} xxx3 a1 123 a\n  b TrueFalseTrueTruebc[1, 2]True"
    )


def test_a_long_chat_is_no_hostile_one() -> None:
    """As many messages as a body may have, and the largest body."""
    chats = ChatTemplate.load(DEMO, Tokenizer.load(DEMO))
    assert chats
    compiled = chats._compiled["default"]
    for messages in (USER * 50_000, [{"role": "user", "content": "a " * 8_000_000}]):
        text = chats._text(compiled, {"messages": messages, "add_generation_prompt": True}, is_inline=False)
        assert len(text) > 100_000
