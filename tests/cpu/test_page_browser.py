"""The page in a browser: Debian's Chromium against `deltic serve` with the built-in model.

PAGE_SCREENSHOTS=1 writes the pictures of the documents, docs/page-*.png; otherwise they go to a temporary directory.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from deltic.commands.endpoint import LocalServer
from tests import browser
from tests.browser import Page
from tests.golden import make
from tests.served import Served
from tests.tiny_speech import tiny_speech
from tests.waiting import wait_for

pytest.importorskip("selenium.webdriver")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

pytestmark = browser.needed

STORY = "Write a 300-word story about a fox."
SUM = "What is 19 plus 23?"
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    running = Served("--n-pages", "256")
    yield running
    running.close()


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser.started() as running:
        yield running


@pytest.fixture
def page(driver: Any, server: LocalServer) -> Iterator[Page]:
    opened = Page(driver, server)
    yield opened
    said = [entry["message"] for entry in driver.get_log("browser")]
    errors = [text for text in said if "status of 40" not in text]
    assert not errors, "the console, or the page's policy, complains"


def test_an_answer_streams_with_its_thoughts_folded(page: Page) -> None:
    page.set(thinking="on")
    turn = page.ask(SUM)
    assert "42" in page.answer()
    thinking = turn.find_element(By.CLASS_NAME, "thinking")
    assert thinking.get_attribute("open") is None and "Thought for" in thinking.text
    order = page.run("return [...arguments[0].children].map(part => part.classList[0] ?? part.tagName)", turn)
    assert order == ["H2", "thinking", "md", "calls", "foot"]
    thinking.find_element(By.TAG_NAME, "summary").click()
    assert "19" in thinking.find_element(By.TAG_NAME, "div").text
    page.set(thinking="off")
    page.ask(STORY)
    assert len(page.run("return lengths")) > 1, "it came in one piece"
    assert "finish: stop" in page.figures() and "tokens/s" in page.figures() and "first after" in page.figures()
    page.ask(STORY)
    page.ask(SUM)
    prompt, cached = page.figures().split(" · prompt ")[1].removesuffix(" cached").split(", ")
    n_prompt, n_cached = (int(told.replace(",", "")) for told in (prompt, cached))
    assert n_prompt > 300 and n_cached > 200 and n_cached % 64 == 0


def test_settings_are_sent_and_kept_and_the_key_is_not(page: Page) -> None:
    page.set(
        system="Be brief.",
        temperature="0.5",
        top_p="0.9",
        top_k="30",
        max_tokens="7",
        seed="11",
        more='{"min_p": 0.01}',
    )
    page.ask(STORY)
    (body,) = page.run("return sent")
    assert body.pop("messages") == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": STORY}]
    assert body == {
        "model": "built-in", "temperature": 0.5, "top_p": 0.9, "top_k": 30, "max_tokens": 7, "seed": 11, "min_p": 0.01,
        "stream": True, "stream_options": {"include_usage": True}, "return_progress": True,
    }  # fmt: skip
    assert "finish: length" in page.figures() and " 7 tokens" in page.figures()
    first = page.answer()
    page.press("Regenerate")
    page.answered()
    assert page.answer() == first and len(page.all(".turn")) == 2, "a seed repeats its answer"
    page.set(thinking="low", max_tokens="9")
    page.press("Regenerate")
    page.answered()
    assert page.run("return sent.at(-1).reasoning_effort") == "low"
    page.driver.refresh()
    wait_for(lambda: page.all(".turn"))
    assert page.one("#settings [name=seed]").get_attribute("value") == "11" and len(page.all(".turn")) == 2
    kept = page.run("return JSON.stringify(localStorage)")
    assert "Be brief." in kept and page.server.api_key not in kept


def test_stop_ends_the_answer_here_and_there(page: Page) -> None:
    page.set(more='{"ignore_eos": true, "max_tokens": 12000}')
    for stop in (lambda: page.type(Keys.ESCAPE), lambda: page.one("#stop").click()):
        page.begin(STORY)
        wait_for(lambda: len(page.answer()) > 40)
        assert page.live()["stats"]["n_running"] == 1
        stop()
        page.answered()
        wait_for(lambda: page.live()["stats"]["n_running"] == 0, 2.0)
        assert "finish: stopped" in page.figures() and len(page.answer()) > 40
        assert page.one("#send").is_displayed() and not page.one("#stop").is_displayed()


def test_the_servers_errors_are_shown(page: Page) -> None:
    page.set(key="wrong")
    page.begin(SUM)
    wait_for(lambda: page.all(".turn .error[role=alert]"))
    assert "a valid API key is needed" in page.texts(".turn .error")[0]
    assert page.run("return document.activeElement.name") == "key"
    page.set(key=page.server.api_key)
    page.press("Try again")
    page.answered()
    assert "42" in page.answer() and not page.all(".turn .error")
    page.set(more='{"no_such_field": 1}')
    page.ask(SUM)
    assert "no_such_field" in page.texts(".turn .error")[0]
    page.set(more="{")
    page.press("Try again")
    wait_for(lambda: "More fields" in page.texts(".turn .error")[0])


def test_a_tool_is_called_and_its_result_goes_back(page: Page) -> None:
    page.set(more=json.dumps({"tools": [make.WEATHER], "temperature": 0}))
    turn = page.ask(make.QUESTION["content"])
    assert turn.find_element(By.CSS_SELECTOR, ".call h3").text.endswith("get_weather")
    assert json.loads(turn.find_element(By.CSS_SELECTOR, ".call pre").text) == {"city": "Rome"}
    assert "finish: tool_calls" in page.figures()
    turn.find_element(By.CSS_SELECTOR, ".call textarea").send_keys(make.RESULT["content"])
    page.press("Send result")
    page.answered()
    assert "Rome" in page.answer() and page.texts(".call .result")[0] == make.RESULT["content"]


LONG = '{"ignore_eos": true, "max_tokens": 400, "temperature": 0}'


def test_an_answer_goes_on_behind_another_chat(page: Page) -> None:
    page.set(more=LONG)
    page.begin(STORY)
    wait_for(lambda: len(page.answer()) > 20)
    page.press("New chat")
    assert not page.all(".turn") and page.one("#send").is_displayed()
    page.set(more='{"max_tokens": 5}')
    page.ask(SUM)
    wait_for(lambda: page.live()["stats"]["n_running"] == 0, 60)
    next(chat for chat in page.all(".open-chat") if chat.text == STORY).click()
    # a chat comes from a database, which takes its time
    wait_for(lambda: " 400 tokens" in "".join(page.texts(".figures")))
    assert "finish: length" in page.figures()
    page.press("New chat")
    page.set(more=LONG.replace("400", "9000"))
    page.begin("Another story.")
    wait_for(lambda: len(page.answer()) > 20)
    page.press("New chat")
    page.all(".open-chat")[0].click()
    wait_for(lambda: page.one("#stop").is_displayed() and page.all(".turn[aria-busy=true]"))
    page.all("[aria-label^=Delete]")[0].click()
    wait_for(lambda: page.live()["stats"]["n_running"] == 0, 5)
    wait_for(lambda: "Another story." not in page.texts(".open-chat"))


def test_an_answer_goes_on_behind_a_reload(page: Page) -> None:
    page.set(more=LONG.replace("400", "9000"))
    page.begin(STORY)
    wait_for(lambda: len(page.answer()) > 20)
    before = page.run("return path(state.chat).at(-1).content")
    page.driver.refresh()
    told = "return [...document.querySelectorAll('.figures')].at(-1)?.textContent ?? ''"
    wait_for(lambda: "finish: length" in page.run(told), 60)
    assert len(page.all(".turn")) == 2
    whole = page.run("return path(state.chat).at(-1).content")
    assert len(before) > 20 and whole.startswith(before) and len(whole) > len(before)


def test_an_answer_keeps_the_name_of_its_model(page: Page) -> None:
    page.ask(SUM)
    page.run("state.model = 'another'; showChat()")
    assert page.texts(".turn:last-child > h2")[0] == "built-in"
    page.driver.refresh()
    wait_for(lambda: page.all(".turn"))
    assert page.texts(".turn:last-child > h2")[0] == "built-in"


def test_a_new_line_can_be_typed_on_a_phone(page: Page) -> None:
    page.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "pointer", "value": "coarse"}]})
    try:
        page.driver.refresh()
        wait_for(lambda: page.one("#state").get_attribute("class") == "ready")
        assert page.run("return touched.matches") and page.one("#prompt").get_attribute("enterkeyhint") == "enter"
        page.one("#prompt").send_keys("What is", Keys.ENTER, "19 plus 23?")
        assert page.one("#prompt").get_attribute("value") == "What is\n19 plus 23?" and not page.all(".turn")
        page.one("#send").click()
        page.answered()
    finally:
        page.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_keys_are_enough(page: Page) -> None:
    page.run("document.activeElement.blur()")
    stops = []
    for _ in range(40):
        page.type(Keys.TAB)
        stops.append(page.run("const e = document.activeElement; return e.id || e.name || e.hash || e.textContent"))
        if stops[-1] == "prompt":
            break
        assert page.run("return getComputedStyle(document.activeElement).outlineStyle") != "none", stops
    assert stops[0] == "#prompt" and {"#chat", "#live", "new", "import", "keys-open", "log", "pick"} <= set(stops)
    page.type("What is", Keys.SHIFT + Keys.ENTER + Keys.NULL, "19 plus 23?")
    assert page.one("#prompt").get_attribute("value") == "What is\n19 plus 23?" and not page.all(".turn")
    page.type(Keys.ENTER)
    page.answered()
    page.type(Keys.ARROW_UP)
    assert page.one("#editing").is_displayed() and "19 plus" in page.one("#prompt").get_attribute("value")
    page.type(Keys.ESCAPE)
    assert not page.one("#editing").is_displayed() and page.one("#prompt").get_attribute("value") == ""
    assert all(
        page.run("return [...document.querySelectorAll('input, select, textarea')].map(e => e.labels.length > 0)")
    )
    assert page.one("#log").get_attribute("aria-live") == "polite"


def test_a_phone(page: Page) -> None:
    page.size(320, 640)
    page.ask(STORY)
    page.run(
        "openChat(threadOf([{ role: 'user', content: 'x' }, { role: 'assistant', content: arguments[0], meta: { finish: 'stop' } }]))",
        "```\n" + "long " * 60 + "\n```\n" + "x" * 300 + "\n\n|" + "cell|" * 30 + "\n|" + "-|" * 30,
    )
    assert page.width() == (320, 320)
    page.one("#menu").click()
    assert page.one("#side").is_displayed() and not page.one("#talk").is_displayed() and page.width() == (320, 320)
    page.type(Keys.ESCAPE)
    assert page.one("#talk").is_displayed()
    page.one("#settings-open").click()
    assert page.one("#settings").is_displayed() and not page.one("#talk").is_displayed() and page.width() == (320, 320)
    page.type(Keys.ESCAPE)
    assert page.one("#talk").is_displayed()
    page.driver.find_element(By.LINK_TEXT, "Live").click()
    wait_for(lambda: page.all("#tree rect"))
    assert page.width() == (320, 320)


SYSTEM = """You tell short stories to children at bedtime. Every story has an animal who lives in a forest or near a river, a small
worry, and a friend who helps. Use plain words and short sentences. Nobody is hurt, nobody is left alone, and the story ends with
everybody at home. If a child asks for a sum, a fact or a joke, give it in one sentence. If you do not know something, say so."""


def load(server: LocalServer) -> None:
    """Some conversations that share a beginning, of several turns each, four at a time."""
    client = httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {server.api_key}"}, timeout=60)

    def talk(animal: str) -> None:
        messages = [{"role": "system", "content": SYSTEM}]
        for question in (
            f"Write a 150-word story about a {animal}.",
            "What is 2 plus 3?",
            f"Write a 100-word story about a {animal}.",
        )[: 1 + len(animal) % 3]:
            messages.append({"role": "user", "content": question})
            body = {"messages": messages, "seed": len(animal)}
            said = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": said})

    with client, ThreadPoolExecutor(4) as pool:
        list(pool.map(talk, ("fox", "rabbit", "owl", "badger", "mouse", "hedgehog", "frog", "squirrel")))


def test_live_shows_the_engine_while_it_is_looked_at(page: Page) -> None:
    load(page.server)
    page.driver.find_element(By.LINK_TEXT, "Live").click()
    wait_for(lambda: len(page.all("#tree rect")) > 8)
    shown = dict(zip(page.texts("#tiles dt"), page.texts("#tiles dd"), strict=True))
    assert shown["Answers at work"] == "0 of 8" and shown["Waiting for room"] == "0"
    assert int(shown["From the cache"].split()[0]) > 20 and float(shown["Step, median"].split()[0]) > 0
    assert [bar.get_attribute("aria-label") for bar in page.all("[role=meter]")] == ["Texts", "States", "Host memory"]
    assert all(path.get_attribute("d") for path in page.all("#steps path.prefill")[:2])
    page.one("#tree-table summary").click()
    wait_for(lambda: len(page.all("#tree-table tbody tr")) == len(page.all("#tree rect")))
    deep = max(page.run("return seen.tree.checkpoints.map(node => node.tokens)"))
    assert f"{deep:,}" in page.texts("#tree-table")[0]
    polls = "return performance.getEntriesByType('resource').filter(e => e.name.endsWith('/live')).length"
    before = page.run(polls)
    wait_for(lambda: page.run(polls) > before, 5.0)
    trees = page.run(polls.replace("/live", "/cache"))
    assert trees <= 2, "the tree is asked for although nothing changed"
    page.driver.find_element(By.LINK_TEXT, "Chat").click()
    time.sleep(0.2)
    before = page.run(polls)
    time.sleep(1.5)
    assert page.run(polls) == before, "it polls while nobody looks"
    page.set(key="wrong")
    page.driver.find_element(By.LINK_TEXT, "Live").click()
    wait_for(lambda: "valid API key" in page.texts("#live-error")[0])


def test_a_key_that_may_not_see_the_others_has_a_chat_and_no_live_view(driver: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkey = "secret"\n')
    running = Served("--api-key-file", str(keys))
    operator, running.process.api_key = running.process.api_key, "secret"
    try:
        page = Page(driver, running.process)
        wait_for(lambda: not page.one("nav").is_displayed())
        page.ask(SUM)
        assert page.answer()
        page.run("location.hash = '#live'")
        page.driver.refresh()
        wait_for(lambda: page.run("return location.hash") == "#chat" and page.one("#prompt").is_displayed())
        page.set(key=operator)
        page.type(Keys.TAB)
        wait_for(lambda: page.one("nav").is_displayed())
    finally:
        running.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures(page: Page, scheme: str, tmp_path: Path) -> None:
    wanted = bool(os.environ.get("PAGE_SCREENSHOTS"))
    directory = DOCS if wanted and scheme == "light" else tmp_path
    directory.mkdir(exist_ok=True)
    media = [{"name": "prefers-color-scheme", "value": scheme}]
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
    ground = page.run("return getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(14, 21, 23)") == (scheme == "dark")
    page.size(1280, 980)
    page.set(system=SYSTEM, thinking="on", temperature="0.6", seed="7", more=json.dumps({"tools": [make.WEATHER]}))
    page.ask("Write a 50-word story about a rabbit.")
    page.ask(make.QUESTION["content"]).find_element(By.TAG_NAME, "textarea").send_keys(make.RESULT["content"])
    page.press("Send result")
    page.answered()
    page.run("settings.system.scrollTop = settings.more.scrollTop = 0")
    assert page.driver.save_screenshot(str(directory / "page-chat.png"))
    with ThreadPoolExecutor(1) as pool:
        page.driver.find_element(By.LINK_TEXT, "Live").click()
        loading = [pool.submit(load, page.server) for _ in range(4 if wanted else 0)]
        if wanted:
            page.size(1280, 1120)
            wait_for(
                lambda: page.run("return seen.told && seen.told.stats.n_steps > 2000 && seen.told.stats.n_running > 2")
            )
        assert page.driver.save_screenshot(str(directory / "page-live.png"))
        for each in loading:
            each.result()
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_of_several_models_one_is_chosen(driver: Any) -> None:
    """Chats are with those that write; the live view shows any."""
    speech = str(tiny_speech("custom_voice"))
    running = Served(
        "--served-model-name", "first", "--and", "built-in", "--served-model-name", "second", "--and", speech
    )
    try:
        page = Page(driver, running.process)
        choice = Select(page.one("#models"))
        names = ["first", "second", Path(speech).name]
        assert [option.text for option in choice.options] == names
        assert [option.is_enabled() for option in choice.options] == [True, True, False]
        choice.select_by_visible_text("second")
        assert page.one("#prompt").get_attribute("placeholder") == "Message second"
        page.ask(SUM)
        assert page.run("return sent.at(-1).model") == "second"
        page.go("#live")
        wait_for(lambda: page.all("#tiles dd"))
        choice.select_by_visible_text(names[2])
        running.http.post("/v1/audio/speech", json={"input": "hello", "voice": "vivian", "max_new_tokens": 5})
        n_steps = running.http.get("/live", params={"model": names[2]}).json()["stats"]["n_steps"]
        wait_for(lambda: f"of {n_steps} steps" in page.texts("#step-line")[0])
        page.go("#chat")
        wait_for(lambda: page.one("#models").get_attribute("value") == "first")
        two_that_speak = "{a: {kind: 'speech'}, b: {kind: 'speech'}}"
        assert page.run(f"listModels({two_that_speak}); return state.model") == "a", "where none has chats"
    finally:
        running.close()
