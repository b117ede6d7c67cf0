"""A model's text on the page: what the server makes of Markdown, what a stranger's text costs, and what Chromium shows of it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from deltic.server.isolated import Refused, ask
from deltic.server.page import markdown
from deltic.server.page.drawing import blocks
from tests import browser
from tests.browser import Page
from tests.fake_engine import FakeEngineClient, make_app, n_held, saying, served
from tests.null.test_http import error_of
from tests.waiting import until, wait_for

TEXT = r"""## Head <img src=x onerror="document.title='no'">
A *b* **c `d<i>`** snake_case_name 2 * 3 * 4 ~~old~~ [no](javascript:alert(1)) [yes](https://example.org/a_(b)) https://example.org/bare
![a picture](https://example.org/spy.png)

- one
  - below
    1. deep
- [ ] to do
- [x] done

  ```sh
  # in a list
  ```
1. first
2. second

| a | b |
|---|--:|
| 1 | `2` |

> said <script>document.title='no'</script>
```python
def f(x):  # <b>
    return "s"
```
The area is \( \pi r^2 \) and $a_1 * b_2$, not $5 or $6. \*escaped\* and `\( code \)`

\[
\begin{aligned}
x &= \{ y_1 \\

z &= \frac{1}{2} \}
\end{aligned}
\]

$$
a * b
$$

~~~
open **end**"""


def kinds(node: Any) -> Iterator[str]:
    """Tags of a node and of those in it."""
    if isinstance(node, list):
        yield node[0]
        for below in node[2:]:
            yield from kinds(below)


def said(node: Any) -> str:
    return node if isinstance(node, str) else "".join(map(said, node[2:]))


def drawn(text: str) -> list[Any]:
    return [node for _, node in blocks(text)]


def test_blocks_have_the_line_that_they_begin_in() -> None:
    found = blocks("# A\n\nb\nc\n\n- d\n\n  e\n\n```\nf\n\ng\n```\n\n$$\nx\n\ny\n$$\nz")
    assert [(line, node[0]) for line, node in found] == [
        (0, "h1"), (2, "p"), (5, "ul"), (9, "figure"), (15, "math"), (20, "p"),
    ]  # fmt: skip


def test_what_models_write_is_there() -> None:
    nodes = drawn(TEXT)
    tags = {tag for node in nodes for tag in kinds(node)}
    assert tags >= {
        "h2",
        "em",
        "strong",
        "s",
        "a",
        "ul",
        "ol",
        "li",
        "input",
        "table",
        "th",
        "td",
        "blockquote",
        "figure",
        "math",
        "mfrac",
        "mtr",
    }
    assert not tags & {"img", "script", "i", "b"}
    links = [node for node in nodes[1] if isinstance(node, list) and node[0] == "a"]
    assert [link[1]["href"] for link in links] == [
        "https://example.org/a_(b)", "https://example.org/bare", "https://example.org/spy.png",
    ]  # fmt: skip
    assert "[no](javascript:alert(1))" in said(nodes[1])
    tasks = [item[1] for item in nodes[2][2:]]
    assert [task.get("class") for task in tasks] == [None, "task", "task"]
    assert ["th", {"class": "right"}, "b"] in nodes[4][2][2]
    code = next(node for node in nodes if node[1].get("title") == "python")
    assert said(code) == 'def f(x):  # <b>\n    return "s"' and ["span", {"class": "k"}, "def"] in code
    assert said(nodes[-1]) == "open **end**"


def test_the_bounds_of_a_sum_stand_above_and_below_it_where_it_has_a_line_of_its_own() -> None:
    assert "munderover" in str(drawn(r"\[\sum_{k=1}^{n} k\]")) and "msubsup" in str(drawn(r"so \(\sum_{k=1}^{n} k\)"))


def test_formulas_are_drawn_or_stay_as_they_were_written() -> None:
    (sentence,) = drawn("Costs $5 or $6, \\(x\\) and $y$ and $$z$$, \\[w\\].")
    assert [node[1]["alttext"] for node in sentence if isinstance(node, list)] == ["x", "y", "z", "w"]
    assert sentence[2].startswith("Costs $5 or $6, ")
    (unknown,) = drawn(r"\( \frac{1} \)")
    assert unknown[2][0] in ("code", "math")
    assert drawn("$$\n\\frac{a")[0] == ["code", {"class": "formula"}, "$$\\frac{a"]
    (table,) = drawn("\\[ \\begin{aligned} a &= b \\\\ c &= d \\end{aligned} \\]")
    assert [*kinds(table)].count("mtr") == 2 and "&" not in said(table)
    (spaced,) = drawn("$$\\begin{aligned} a \\\\[4pt] b \\\\ [-1.5em] \\arg\\max_x \\end{aligned}$$")
    assert said(spaced) == "abargmaxx" and [*kinds(spaced)].count("mtr") == 3
    assert (
        said(drawn("$$\\begin{alignedat}{2} a &= b \\end{alignedat}\\begin{aligned}[t] c \\end{aligned}$$")[0])
        == "a=bc"
    )
    assert [*kinds(drawn("> $$\n> a\n> $$\n\n- \\[\n  b\n  \\]\n")[0])][:2] == ["blockquote", "math"]


def test_no_text_is_left_out_or_ends_the_others() -> None:
    deep = "\n".join(f"{'  ' * i}- level {i}" for i in range(40))
    for text, last in ((deep, "level 39"), (">" * 90 + " end", "end"), ("- " * 90 + "end", "end")):
        assert "".join(map(said, drawn(text))).endswith(last)
    for text in ("- #", "1. ###\n2. a", "* \u00a0", "- \u2028\n"):
        assert drawn(text)[0][0] in ("ul", "ol")


@pytest.mark.parametrize(
    "text",
    [
        ">" * 9000,
        "- " * 9000,
        "**a " * 9000,
        "`" * 9000,
        "[" * 9000,
        "|-" * 9000,
        "# " + " #" * 9000,
        "_a" * 9000,
        "\\( " * 9000,
        "$a " * 9000,
        "\\[ " * 9000,
        "$$" * 9000,
        "\\(" + "{" * 4000,
        "```python\n" + "(" * 50_000,
        "$$\n" + "\\frac" * 900 + "\n$$",
    ],
    ids=lambda text: text[:3].strip(),
)
def test_the_strangest_text_is_drawn_or_refused_and_harms_nobody(text: str) -> None:
    with served(make_app(FakeEngineClient())) as url:
        started_s = time.monotonic()
        reply = httpx.post(f"{url}/page/markdown", json={"texts": [text]}, timeout=30)
        assert reply.status_code in (200, 400), reply.text
        assert time.monotonic() - started_s < 12 and httpx.get(f"{url}/health").status_code == 200


def test_the_route_draws_for_who_has_a_key() -> None:
    with served(make_app(FakeEngineClient(), api_key=("secret",))) as url:
        assert httpx.post(f"{url}/page/markdown", json={"texts": ["a"]}).status_code == 401
        key = {"authorization": "Bearer secret"}
        told = httpx.post(f"{url}/page/markdown", json={"texts": ["*a*", ""]}, headers=key).json()
        assert told["drawn"] == [[[0, ["p", {}, ["em", {}, "a"]]]], []] and 0 < told["ms"] < 1000
        for texts in (["a"] * 101, ["a" * 2_000_001], "a", [1]):
            refused = httpx.post(f"{url}/page/markdown", json={"texts": texts}, headers=key)
            assert refused.status_code == 400 and error_of(refused)["param"].startswith("texts")


def test_texts_that_wait_count_as_their_key_s(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    async def waits(*_: object) -> bytes:
        await asyncio.to_thread(go_on.wait, 30)
        return b"{}"

    async def go(url: str) -> None:
        async with httpx.AsyncClient(timeout=30) as client:
            body = {"texts": ["a" * 900_000]}
            sent = [asyncio.create_task(client.post(f"{url}/page/markdown", json=body)) for _ in range(2)]
            await until(lambda: n_held(app) == 2)
            for _ in range(3):
                assert (await client.post(f"{url}/page/markdown", json=body)).status_code == 429
            go_on.set()
            assert [(await reply).status_code for reply in sent] == [200, 200]

    monkeypatch.setattr(markdown, "ask", waits)
    app = make_app(FakeEngineClient(), max_body_mb=1)
    with served(app) as url:
        asyncio.run(go(url))


def test_without_its_libraries_a_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def dies(*_: object) -> bytes:
        raise Refused("cannot be drawn. Show them as they are.")

    monkeypatch.setattr(markdown, "ask", dies)
    with served(make_app(FakeEngineClient())) as url:
        refused = httpx.post(f"{url}/page/markdown", json={"texts": ["a"]})
        assert refused.status_code == 400 and error_of(refused)["code"] == "cannot_be_drawn"


ANSWER = "return document.querySelector('.turn:last-child .md')"
WHOLE = (
    f"{ANSWER}.querySelectorAll('.raw').length === 0 && document.querySelector('.turn:last-child').ariaBusy === 'false'"
)


@browser.needed
def test_an_answer_is_drawn_while_it_grows_and_never_becomes_markup(driver: Any) -> None:
    engine = FakeEngineClient(saying(TEXT), max_model_len=8192)
    engine.token_s = 0.001
    with served(make_app(engine)) as url:
        page = Page(driver, SimpleNamespace(url=url, api_key=""))  # type: ignore[arg-type]
        page.run(
            "window.seen = new Set(); new MutationObserver(() => { for (const each of document.querySelectorAll('.md > *')) seen.add(each.tagName); }).observe(document.querySelector('#log'), { subtree: true, childList: true })"
        )
        page.begin("Write it.")
        wait_for(lambda: page.all(".md h4"))
        assert page.all(".turn[aria-busy=true]"), "it is drawn before it is whole"
        wait_for(lambda: page.run(WHOLE))
        wait_for(lambda: page.all(".md math[display=block]"))
        text = page.all(".turn")[-1].find_element("class name", "md")
        assert not text.find_elements("css selector", "img, script, i, b") and driver.title == "Deltic"
        assert page.texts(".md h4") == ["""Head <img src=x onerror="document.title='no'">"""]
        assert page.texts(".md pre") == ["# in a list", 'def f(x):  # <b>\n    return "s"', "open **end**"]
        assert page.texts(".md figcaption span") == ["sh", "python", ""]
        links = page.run("return [...document.querySelectorAll('.md a')].map(a => [a.href, a.rel, a.target])")
        assert [link[0] for link in links] == [
            "https://example.org/a_(b)",
            "https://example.org/bare",
            "https://example.org/spy.png",
        ]
        assert all(link[1:] == ["noopener noreferrer", "_blank"] for link in links)
        assert page.run(
            "return [...document.querySelectorAll('.md input')].map(box => [box.checked, box.disabled])"
        ) == [[False, True], [True, True]]
        assert page.run("return document.querySelector('.md mfrac').getBoundingClientRect().height") > 10
        colours = page.run(
            "return [...document.querySelectorAll('.md .k, .md .s, .md .c')].map(word => getComputedStyle(word).color)"
        )
        assert len(set(colours)) >= 3
        # However it was cut while it grew, it is what it is when it is drawn at once.
        grown = page.run(f"{ANSWER}.innerHTML")
        page.run("showChat()")
        driver.refresh()
        wait_for(lambda: page.all(".md") and page.run(WHOLE) and page.all(".md h4"))
        assert page.run(f"{ANSWER}.innerHTML") == grown
        page.run("document.querySelector('.md figcaption button').click()")
        wait_for(lambda: page.texts(".md figcaption button")[0] != "Copy")


@browser.needed
def test_without_the_server_a_text_stays_readable(driver: Any) -> None:
    engine = FakeEngineClient(saying("**bold** and *soft*"))
    with served(make_app(engine)) as url:
        page = Page(driver, SimpleNamespace(url=url, api_key=""))  # type: ignore[arg-type]
        page.run(
            "const fetched = window.fetch; window.fetch = (path, options) => String(path).endsWith('page/markdown') ? Promise.reject(new TypeError('gone')) : fetched(path, options)"
        )
        page.ask("Write it.")
        wait_for(lambda: page.texts(".md") == ["**bold** and *soft*"])
    driver.get_log("browser")


@browser.needed
def test_a_text_that_cannot_be_drawn_harms_no_other(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def draw(program: tuple[str, ...], data: bytes, *rest: Any) -> bytes:
        if b"bad" in data:
            raise Refused("cannot be drawn. Show them as they are.")
        return await ask(program, data, *rest)

    monkeypatch.setattr(markdown, "ask", draw)
    with served(make_app(FakeEngineClient())) as url:
        page = Page(driver, SimpleNamespace(url=url, api_key=""))  # type: ignore[arg-type]
        made = "document.querySelector('#log').replaceChildren(...arguments[0].map(() => document.createElement('div'))); arguments[0].forEach((text, i) => markdown(document.querySelector('#log').children[i], text))"
        page.run(made, ["*a*", "*bad*", "*b*"])
        wait_for(lambda: page.texts("#log em") == ["a", "b"])
        assert page.texts("#log > div") == ["a", "*bad*", "b"]
        # A part that could not be drawn says nothing of the whole.
        grow = "window.into = document.querySelector('#log > div'); markdown(into, 'a *bad*', true); setTimeout(() => markdown(into, 'a *good*'), 1000)"
        page.run(grow)
        wait_for(lambda: page.texts("#log em")[0] == "good")
        shown = "const shown = document.createElement('div'), begun = performance.now(); shown.textContent = '.'.repeat(200000) + 'a'"
        assert page.run(f"{shown}; pieces(shown); return performance.now() - begun") < 3000, "read aloud, it is cut"
    with served(make_app(FakeEngineClient(), max_body_mb=0.002)) as url:  # which both together are over
        page = Page(driver, SimpleNamespace(url=url, api_key=""))  # type: ignore[arg-type]
        page.run(made, ["*a* " + "x" * 1500, "*b* " + "y" * 1500])
        wait_for(lambda: page.texts("#log em") == ["a", "b"])
    driver.get_log("browser")
