"""Chats on the page, in Debian's Chromium over a fake engine: versions, what is kept and found, settings, and how quick it is."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("selenium.webdriver")

from selenium.webdriver.common.keys import Keys

from tests import browser
from tests.browser import Page
from tests.fake_engine import FakeEngineClient, make_app, saying, served
from tests.null.test_picture_doors import prompt_of
from tests.waiting import wait_for

pytestmark = browser.needed


class Counting(FakeEngineClient):
    """An engine whose n-th answer is `answer n`."""

    def __init__(self, **info: Any) -> None:
        super().__init__(lambda request, index: saying(f"answer {len(self.requests)}")(request, index), **info)


def opened(driver: Any, url: str) -> Page:
    return Page(driver, SimpleNamespace(url=url, api_key=""))  # type: ignore[arg-type]


def counter(page: Page) -> list[str]:
    return page.texts(".versions > span")


def click(page: Page, selector: str) -> None:
    page.run("document.querySelector(arguments[0]).click()", selector)


def edit(page: Page, selector: str, text: str) -> None:
    """Presses Edit in an article, and sends another text."""
    page.run(
        "[...document.querySelectorAll(arguments[0] + ' button')].find(button => button.innerText === 'Edit').click()",
        selector,
    )
    page.one("#prompt").send_keys(Keys.CONTROL, "a")
    page.one("#prompt").send_keys(text, Keys.ENTER)


def test_answers_and_messages_have_versions(driver: Any) -> None:
    engine = Counting()
    with served(make_app(engine)) as url:
        page = opened(driver, url)
        page.ask("one")
        page.press("Regenerate")
        wait_for(lambda: page.texts(".turn .md") == ["answer 2"])
        page.answered()
        wait_for(lambda: counter(page) == ["2/2"])
        page.ask("two")
        assert "answer 2" in prompt_of(engine.requests[-1]) and "answer 1" not in prompt_of(engine.requests[-1])
        click(page, "[aria-label='Earlier version of the answer']")
        wait_for(lambda: page.texts(".turn .md") == ["answer 1"])
        assert len(page.all(".turn")) == 2, "what was said behind the other version is with it"
        click(page, "[aria-label='Later version of the answer']")
        wait_for(lambda: page.texts(".turn .md") == ["answer 2", "answer 3"])
        edit(page, ".turn.user", "another one")
        wait_for(lambda: page.texts(".turn .md") == ["answer 4"])
        page.answered()
        assert page.texts(".turn.user .said") == ["another one"] and "two" not in prompt_of(engine.requests[-1])
        edit(page, ".turn:not(.user)", "as I would say it")
        wait_for(lambda: page.texts(".turn .md") == ["as I would say it"])
        assert len(engine.requests) == 4
        page.ask("three")
        assert "as I would say it" in prompt_of(engine.requests[-1])
        driver.refresh()
        wait_for(lambda: page.texts(".turn .md") == ["as I would say it", "answer 5"])
        click(page, "[aria-label='Earlier version of the message']")
        wait_for(lambda: page.texts(".turn.user .said") == ["one", "two"])


def test_chats_are_found_renamed_deleted_and_taken_back(driver: Any) -> None:
    with served(make_app(Counting())) as url:
        page = opened(driver, url)
        for text in ("The keel of a boat", "The mast of a ship"):
            page.press("New chat")
            page.ask(text)
        assert page.texts(".open-chat") == ["The mast of a ship", "The keel of a boat"]
        page.one("#search").send_keys("boat ANSWER")
        assert page.texts(".open-chat") == ["The keel of a boat"]
        page.one("#search").send_keys(" submarine")
        assert page.texts(".open-chat") == [] and page.one("#none-found").is_displayed()
        page.one("#search").clear()
        page.run("document.querySelector('#search').dispatchEvent(new Event('input'))")
        page.one("#title").clear()
        page.one("#title").send_keys("Masts", Keys.ENTER)
        wait_for(lambda: page.texts(".open-chat")[0] == "Masts")
        page.all("[aria-label^=Delete]")[0].click()
        wait_for(lambda: page.texts(".open-chat") == ["The keel of a boat"] and not page.all(".turn"))
        page.press("Undo")
        wait_for(lambda: page.texts(".open-chat") == ["Masts", "The keel of a boat"] and len(page.all(".turn")) == 2)
        driver.refresh()
        wait_for(lambda: page.texts(".open-chat") == ["Masts", "The keel of a boat"])
        driver.switch_to.new_window("tab")
        page.size(1280, 800)
        page.go("")
        wait_for(lambda: page.texts(".open-chat") == ["Masts", "The keel of a boat"])
        page.all("[aria-label^=Delete]")[1].click()
        wait_for(lambda: page.texts(".open-chat") == ["Masts"])
        driver.close()
        driver.switch_to.window(driver.window_handles[0])
        wait_for(lambda: page.texts(".open-chat") == ["Masts"])


def test_chats_go_into_files_and_come_back(driver: Any, tmp_path: Path) -> None:
    with served(make_app(Counting())) as url:
        page = opened(driver, url)
        page.set(system="Be brief.")
        page.ask("Question")
        page.press("Regenerate")
        wait_for(lambda: page.texts(".turn .md") == ["answer 2"])
        page.answered()
        whole, plain = page.run("return [asJson([state.chat]), asMarkdown(state.chat)]")
        assert json.loads(whole)["deltic_chats"] == 1 and plain.startswith(
            "# Question\n\n<!-- system -->\n**System prompt**\n\nBe brief.\n\n<!-- user -->\n**You**\n\nQuestion\n"
        )
        assert (
            page.run("""
            const content = [filePart("plan.pdf", "The keel.", "2 pages"), { type: "image_url", image_url: { url: "data:," } }, { type: "text", text: "What first?" }];
            return asMarkdown(threadOf([{ role: "user", content }], { title: "T" }));
        """)
            == "# T\n\n<!-- user -->\n**You**\n\n- plan.pdf · 2 pages\n- 1 picture\n\nWhat first?\n"
        )
        files = {
            "whole.json": whole,
            "plain.md": plain,
            "api.json": json.dumps(
                {
                    "messages": [
                        {"role": "system", "content": "S"},
                        {"role": "user", "content": "Q"},
                        {"role": "assistant", "content": "A"},
                    ]
                }
            ),
            "wrong.json": '{"a": 1}',
        }
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        page.one("#import-files").send_keys(str(tmp_path / "whole.json"))
        wait_for(lambda: page.texts(".open-chat") == ["Question", "Question"] and len(counter(page)) == 1)
        assert page.one("#settings [name=system]").get_attribute("value") == "Be brief."
        page.one("#import-files").send_keys(str(tmp_path / "plain.md"))
        wait_for(lambda: len(page.all(".open-chat")) == 3)
        wait_for(lambda: page.texts(".turn.user .said") == ["Question"] and not counter(page))
        assert page.one("#settings [name=system]").get_attribute("value") == "Be brief."
        page.one("#import-files").send_keys(str(tmp_path / "api.json"))
        wait_for(lambda: page.texts(".turn.user .said") == ["Q"])
        assert page.one("#settings [name=system]").get_attribute("value") == "S"
        page.one("#import-files").send_keys(str(tmp_path / "wrong.json"))
        wait_for(lambda: "wrong.json has no chats" in page.texts("#chats-error")[0])
        assert len(page.all(".open-chat")) == 4


def test_a_file_of_chats_breaks_and_starts_nothing(driver: Any, tmp_path: Path) -> None:
    question: Any = {"role": "user", "content": "Q"}
    answer: Any = {"role": "assistant", "content": "A"}
    loop = [question | {"id": "a", "up": "b"}, answer | {"id": "b", "up": "a"}]
    sound: dict[str, Any] = {
        "a loop": {"nodes": loop, "leaf": "a"},
        "one id": {"nodes": [node | {"id": "a", "up": "a"} for node in loop], "leaf": "a"},
        "no ids": {"nodes": [question, answer]},
        "figures": {"nodes": [question, answer | {"meta": {"thought_s": "long", "tokens": {}, "finish": 1}, "reasoning_content": 7}]},
        "unfinished": {"nodes": [question, answer | {"meta": {}}], "settings": {"more": 1, "system": "S"}},
        "parts": {"messages": [question, answer | {"content": [{"type": "text", "text": "A"}]}]},
        "a spy": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.org/spy.png"}}]}, answer]},
    }  # fmt: skip
    unsound: list[Any] = [
        {"nodes": [None]},
        {"nodes": [answer | {"tool_calls": [{}]}]},
        {"messages": [question | {"content": [{"type": "image_url", "text": "a"}]}]},
        {"chats": 1},
    ]
    with served(make_app(FakeEngineClient())) as url:
        page = Page(driver, SimpleNamespace(url=url, api_key=""))  # type: ignore[arg-type]
        for n, (title, chat) in enumerate(sound.items(), 1):
            (tmp_path / f"{n}.json").write_text(json.dumps({"title": title, **chat}))
            page.one("#import-files").send_keys(str(tmp_path / f"{n}.json"))
            wait_for(lambda title=title: page.one("#title").get_attribute("value") == title)
            wait_for(lambda: page.texts(".turn:last-child .md") == ["A"] or page.texts(".turn .said") == ["Q"])
        for chat in unsound:
            (tmp_path / "wrong.json").write_text(json.dumps(chat))
            page.run("document.querySelector('#chats-error').textContent = ''")
            page.one("#import-files").send_keys(str(tmp_path / "wrong.json"))
            wait_for(lambda: "wrong.json has no chats" in page.texts("#chats-error")[0])
        assert len(page.all(".open-chat")) == len(sound) and page.run("return sent.length") == 0
        driver.refresh()
        wait_for(lambda: len(page.all(".open-chat")) == len(sound))
    severe = [line["message"] for line in driver.get_log("browser") if line["level"] == "SEVERE"]
    assert not [line for line in severe if "spy.png" not in line and "favicon.ico" not in line]


BROKEN: dict[str, Any] = {
    "no messages": {"nodes": None},
    "a loop": {"nodes": [{"id": "a", "up": "b", "role": "user", "content": "Q"}, {"id": "b", "up": "a", "role": "assistant", "content": "A"}], "leaf": "b"},
    "its own parent": {"nodes": [{"id": "a", "up": "a", "role": "user", "content": "Q"}], "leaf": "a"},
    "a content that is none": {"nodes": [{"id": "a", "up": None, "role": "user", "content": {}}], "leaf": "a"},
    "no content": {"nodes": [{"id": "a", "up": None, "role": "user", "content": None}], "leaf": "a"},
    "no message": {"nodes": [7], "leaf": "a"},
    "no call": {"nodes": [{"id": "a", "up": None, "role": "assistant", "content": "", "tool_calls": [{}]}], "leaf": "a"},
    "a figure that is none": {"nodes": [{"id": "a", "up": None, "role": "assistant", "content": "A", "meta": {"thought_s": "long"}, "reasoning_content": "T"}], "leaf": "a"},
    "settings that are none": {"nodes": [], "settings": 7},
}  # fmt: skip
"""What the browser may keep of a chat that another version of the page has written, or half a disk."""

PUT = """
    const [title, chat] = arguments, opening = indexedDB.open("deltic", 1);
    return new Promise((ok, failed) => {
      opening.onsuccess = () => {
        const changing = opening.result.transaction(["heads", "chats"], "readwrite");
        changing.objectStore("heads").put({ id: title, title, at: 1, text: "kept" });
        changing.objectStore("chats").put({ id: title, title, ...chat });
        changing.oncomplete = () => { opening.result.close(); sessionStorage["deltic.open"] = JSON.stringify(title); ok(); };
        changing.onabort = failed;
      };
    });
"""


def test_a_chat_that_cannot_be_shown_stops_nothing(driver: Any) -> None:
    def is_told() -> bool:
        return "This chat cannot be shown" in page.texts("#log")[0]

    with served(make_app(FakeEngineClient())) as url:
        page = opened(driver, url)
        page.ask("sound")
        for title, chat in BROKEN.items():
            page.run(PUT, title, chat)
        driver.refresh()  # the last one was open
        wait_for(lambda: page.one("#state").get_attribute("class") == "ready")
        assert is_told() and page.texts("#chats .open .open-chat") == [title]
        for title in BROKEN:
            page.press("sound")
            wait_for(lambda: page.texts(".turn.user .said") == ["sound"])
            page.press(title)
            wait_for(is_told)
        page.run("""
            window.saved = [];
            URL.createObjectURL = blob => { blob.text().then(text => saved.push(text)); return "data:,"; };
        """)
        page.press("Export it as it is")
        wait_for(lambda: page.run("return saved.length"))
        assert json.loads(page.run("return saved[0]"))["chats"] == [{"id": title, "title": title, **BROKEN[title]}]
        page.press("Delete")
        wait_for(lambda: title not in page.texts(".open-chat") and "Ask something." in page.texts("#log")[0])
        page.one("#undo").click()
        wait_for(is_told)
        page.ask("goes on")
        assert page.texts(".turn.user .said") == ["goes on"]
        assert sorted(page.texts(".open-chat")) == sorted([*BROKEN, "sound", "goes on"]), (
            "it is kept beside the new one"
        )
    severe = [line["message"] for line in driver.get_log("browser") if line["level"] == "SEVERE"]
    assert not [line for line in severe if "favicon.ico" not in line]


def test_an_answer_that_was_left_is_found_again(driver: Any) -> None:
    engine = FakeEngineClient(saying("word " * 200), max_model_len=4096)
    engine.token_s = 0.005
    with served(make_app(engine)) as url:
        page = opened(driver, url)
        page.begin("Write.")
        wait_for(lambda: len(page.answer()) > 30)
        page.go("version")
        wait_for(lambda: engine.aborts)
        driver.execute_script("sessionStorage.clear()")  # as in another tab, later
        engine.token_s = 0.0
        page.go("")
        wait_for(lambda: page.texts(".mark-run") == ["unfinished"] and not page.all(".turn"))
        page.all(".open-chat")[0].click()
        page.answered()
        wait_for(lambda: not page.all(".mark-run"))
        assert "word word" in prompt_of(engine.requests[-1]), "it goes on where it was"
        assert page.run("return path(state.chat).at(-1).content").startswith("word word")


def test_settings_are_a_chat_s_own_and_have_presets(driver: Any) -> None:
    with served(make_app(Counting())) as url:
        page = opened(driver, url)
        page.set(system="First.", temperature="0.5")
        page.one("#settings [name=preset_name]").send_keys("Mine")
        page.press("Save as preset")
        page.ask("one")
        page.set(system="Changed.")
        page.press("New chat")
        assert page.one("#settings [name=system]").get_attribute("value") == "First.", "of an empty chat, for new chats"
        page.press("Clear all")
        page.ask("two")
        assert (
            page.run("return sent.at(-1).messages.length") == 1 and page.run("return sent.at(-1).temperature") is None
        )
        wait_for(lambda: len(page.all(".open-chat")) == 2)
        page.run("document.querySelectorAll('.open-chat')[1].click()")
        wait_for(lambda: page.one("#settings [name=system]").get_attribute("value") == "Changed.")
        page.run("const { preset } = settings; preset.value = 'Mine'; preset.dispatchEvent(new Event('change'))")
        page.ask("three")
        assert page.run("return sent.at(-1).messages[0].content") == "First."
        page.press("Delete the preset")
        assert page.texts("[name=preset] option") == ["none yet"]


def test_it_says_how_far_the_answer_is_and_how_full_the_context(driver: Any) -> None:
    engine = FakeEngineClient(saying("word " * 100), max_model_len=2048)
    engine.hold, engine.token_s = True, 2.0
    with served(make_app(engine)) as url:
        page = opened(driver, url)
        assert page.all(".examples button") and "deltic serve" in page.texts(".toy")[0]
        page.all(".examples button")[0].click()
        assert page.one("#prompt").get_attribute("value") == "What is 19 plus 23?"
        page.one("#prompt").send_keys(Keys.ENTER)
        wait_for(lambda: page.texts("#now") == ["Waiting for its turn"])
        wait_for(lambda: page.texts("#now") == ["Reading the prompt 100 %"])
        engine.token_s, engine.hold = 0.01, False
        wait_for(lambda: page.texts("#now")[0].startswith("Writing · "))
        page.answered()
        wait_for(lambda: page.texts("#now") == [""] and "of 2,048 tokens" in page.texts("#gauge")[0])
        page.one("#settings-open").click()
        card = dict(zip(page.texts("#card dt"), page.texts("#card dd"), strict=True))
        assert card["Model"] == "fake" and card["Context"] == "2,048 tokens" and card["Sees pictures"] == "no"
        told = {"total": 100, "cache": 20, "processed": 50, "time_ms": 30_000}
        page.run("""
            const fetched = window.fetch, told = arguments[0];
            window.fetch = (path, options) => {
              if (!String(path).startsWith("v1/chat")) return fetched(path, options);
              const line = `data: ${JSON.stringify({ choices: [{ index: 0, delta: {} }], prompt_progress: told })}\\n\\n`;
              return Promise.resolve(new Response(new ReadableStream({ start: out => out.enqueue(new TextEncoder().encode(line)) }), { status: 200 }));
            };
        """, told)  # fmt: skip
        page.begin("A long one.")
        wait_for(lambda: page.texts("#now") == ["Reading the prompt 38 %, about 50 s left"])


def test_keys_are_listed(driver: Any) -> None:
    with served(make_app(Counting())) as url:
        page = opened(driver, url)
        page.run("document.querySelector('#log').focus()")
        page.type("?")
        assert page.one("#keys").is_displayed()
        page.type(Keys.ESCAPE)
        assert not page.one("#keys").is_displayed()
        page.type(Keys.ALT, "s")
        wait_for(lambda: page.one("#settings").is_displayed())


def test_a_chat_of_300_messages_opens_at_once(driver: Any) -> None:
    with served(make_app(Counting())) as url:
        page = opened(driver, url)
        text = "Some **bold** words, `code` and \\( x^2 \\).\n\n- one\n- two\n\n```python\ndef f(): pass\n```\n"
        page.run("""
            const messages = Array.from({ length: 300 }, (_, i) => i % 2 ? { role: "assistant", content: `${i} ${arguments[0]}`, meta: { finish: "stop" } } : { role: "user", content: `Question ${i}` });
            return save(threadOf(messages, { title: "long" }));
        """, text)  # fmt: skip
        took = """
            const begun = performance.now();
            document.querySelector(".open-chat").click();
            return new Promise(done => {
              const look = () => document.querySelectorAll(".turn").length === 300 ? requestAnimationFrame(() => setTimeout(() => done(performance.now() - begun))) : setTimeout(look);
              look();
            });
        """
        first_ms = page.run(took)
        wait_for(lambda: page.all(".turn:last-child .md figure"))
        assert (
            page.run(
                "const log = document.querySelector('#log'); return log.scrollHeight - log.scrollTop - log.clientHeight"
            )
            < 60
        )
        drawn = page.run("return document.querySelectorAll('.md figure').length")
        assert drawn < 100, "what nobody sees is not drawn"
        page.press("New chat")
        again_ms = page.run(took)
        print(f"300 messages: {first_ms:.0f} ms, again {again_ms:.0f} ms")
        assert min(first_ms, again_ms) <= 300


AXE = """
    const done = arguments[arguments.length - 1];
    axe.run(document, { resultTypes: ["violations"] }).then(found => done(found.violations.map(each => [each.id, each.nodes.map(node => node.html.slice(0, 200))])));
"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(driver: Any, scheme: str) -> None:
    package = find_spec("axe_playwright_python")  # of which the script is wanted, and no browser
    if package is None or package.origin is None:
        pytest.skip("no axe-core; pip install --no-deps --group published")
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    text = "# A\n\nSome **bold** [link](https://example.org), `code`, \\( x^2 \\).\n\n- [ ] to do\n\n|a|b|\n|-|-|\n|1|2|\n\n```python\ndef f(): return 's', 1 # c\n```\n"
    try:
        with served(make_app(FakeEngineClient(saying(text)))) as url:
            page = opened(driver, url)
            driver.execute_script(Path(package.origin).with_name("axe.min.js").read_text())

            def violations() -> Any:
                return driver.execute_async_script(AXE)

            assert violations() == [], "empty"
            page.ask("Write.")
            page.press("Regenerate")
            wait_for(lambda: page.all(".turn .md figure") and page.texts(".versions")[-1])
            assert violations() == [], "a conversation"
            page.one("#settings-open").click()
            assert violations() == [], "its settings"
            click(page, "#keys-open")
            assert violations() == [], "its keys"
            page.type(Keys.ESCAPE)
            page.size(375, 700)
            assert violations() == [], "a conversation on a phone"
            page.run("location.hash = '#live'")
            wait_for(lambda: page.all("#tiles dd") and page.all("#tree svg"))
            assert page.one("#tree-line").text.startswith("1 checkpoint and 1 page on device, 3 evicted so far")
            assert not page.one("#live-error").is_displayed() and violations() == [], "live"
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
