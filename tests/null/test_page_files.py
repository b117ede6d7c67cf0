"""Files in the composer, answers read aloud and messages dictated, in Debian's Chromium over fake engines."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium.webdriver")

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from deltic.config import ServerConfig
from deltic.server import pdf
from deltic.server.app import create_app
from deltic.server.isolated import ask
from deltic.server.service import Server
from tests import browser
from tests.fake_engine import FakeEngineClient, make_app, saying, served, service_of
from tests.fake_speech import FakeSpeechClient, speech_service_of
from tests.null.test_pdf import damaged, written
from tests.null.test_picture_doors import prompt_of
from tests.waiting import wait_for

pytestmark = browser.needed


NOTE_WHAT_IS_SENT = """
    window.sent = [];
    const fetched = window.fetch;
    window.fetch = (path, options) => { if (path.endsWith("speech")) sent.push(JSON.parse(options.body)); return fetched(path, options); };
"""


class Chat:
    def __init__(self, driver: Any, url: str) -> None:
        self.driver, self.url = driver, url
        driver.get(f"{url}/version")
        driver.execute_script("localStorage.clear(); sessionStorage.clear()")
        self.load()

    def load(self) -> None:
        self.driver.get(self.url)
        wait_for(lambda: self.one("#files").get_attribute("accept"))

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def one(self, selector: str) -> Any:
        (found,) = self.all(selector)
        return found

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map(part => part.innerText.trim())"
        return self.driver.execute_script(script, selector)  # type: ignore[no-any-return]

    def attach(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)
        self.one("#files").send_keys(str(path))

    def refusal(self, path: Path, data: bytes) -> str:
        self.attach(path, data)
        return str(wait_for(lambda: path.name in self.one("#file-error").text and self.one("#file-error").text))

    def answered(self, n: int) -> None:
        wait_for(lambda: len(self.all(".turn[aria-busy=false]")) == n and self.one("#send").is_displayed())

    def press(self, name: str) -> None:
        next(button for button in self.all("button") if button.text == name).click()

    def log(self) -> list[Any]:
        return [entry for entry in self.driver.get_log("browser") if "favicon" not in entry["message"]]


def test_text_and_pdf_go_along(driver: Any, tmp_path: Path) -> None:
    engine = FakeEngineClient()
    with served(make_app(engine)) as url:
        page = Chat(driver, url)
        page.attach(tmp_path / "notes.md", "# Café\r\nBuy milk.".encode())
        wait_for(lambda: page.texts("#pictures button") == ["notes.md · 16 characters ×"])
        page.attach(tmp_path / "plan.pdf", written("First the keel.", "Then the mast."))
        wait_for(lambda: page.texts("#pictures button")[1:] == ["plan.pdf · 2 pages ×"])
        page.attach(tmp_path / "torn.pdf", damaged(written("one", "two", "three"), 2))
        wait_for(lambda: page.texts("#pictures button")[2:] == ["torn.pdf · 3 pages; page 2 cannot be read ×"])
        page.all("#pictures button")[2].click()
        page.attach(tmp_path / "old.txt", "Stra\xdfe".encode("cp1252"))
        wait_for(lambda: len(page.all("#pictures button")) == 3)
        page.all("#pictures button")[0].click()
        page.one("#prompt").send_keys("What first?", Keys.ENTER)
        page.answered(1)
        prompt = prompt_of(engine.requests[0])
        first = (
            '<file name="plan.pdf" note="2 pages">\n[Page 1]\nFirst the keel.\n\n[Page 2]\nThen the mast.\n</file>\n\n'
        )
        assert f'user\n{first}<file name="old.txt">\nStraße\n</file>\n\nWhat first?<|im_end|>' in prompt
        assert page.texts(".turn.user summary") == ["plan.pdf · 2 pages", "old.txt · 6 characters"]
        page.all(".turn.user summary")[0].click()
        assert "First the keel." in page.all(".turn.user pre")[0].text
        page.load()
        assert page.texts(".turn.user summary") == ["plan.pdf · 2 pages", "old.txt · 6 characters"], "they are kept"
        page.press("Edit")
        assert page.one("#prompt").get_attribute("value") == "What first?"
        assert page.texts("#pictures button") == ["plan.pdf · 2 pages ×", "old.txt · 6 characters ×"]
        page.one("#prompt").send_keys("\n")
        wait_for(lambda: len(engine.requests) == 2)
        assert first in prompt_of(engine.requests[1])
    assert not page.log()


def test_files_that_cannot_be_read_are_told(driver: Any, tmp_path: Path) -> None:
    with served(make_app(FakeEngineClient())) as url:
        page = Chat(driver, url)
        assert "is no text" in page.refusal(tmp_path / "a.bin", b"\0\1\2")
        assert "is empty" in page.refusal(tmp_path / "b.txt", b" \n")
        assert "is larger than 2 MB" in page.refusal(tmp_path / "c.txt", b"x" * 2_000_001)
        assert "c.pdf was not read: is no PDF." in page.refusal(tmp_path / "c.pdf", b"GIF89a")
        assert "its pages are pictures" in page.refusal(tmp_path / "d.pdf", written(""))
        assert not page.all("#pictures button") and not page.one("#reading").is_displayed()
        page.attach(tmp_path / "e.txt", b"good")
        wait_for(lambda: page.all("#pictures button"))
        assert not page.one("#file-error").is_displayed()
        page.one("#prompt").send_keys(Keys.TAB)  # away from the field, whose Enter would make a line on a phone
        page.one("#send").click()
        page.answered(1)
        title = "return document.querySelector('#chats .open-chat').textContent"
        assert driver.execute_script(title) == "e.txt", "a chat is called as its file if nothing was said"


def test_a_message_waits_for_its_files_and_each_refusal_is_told(
    driver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    async def slow(*given: Any) -> bytes:
        await asyncio.to_thread(go_on.wait, 30)
        return await ask(*given)

    monkeypatch.setattr(pdf, "ask", slow)
    engine = FakeEngineClient()
    with served(make_app(engine)) as url:
        page = Chat(driver, url)
        files = {"a.bin": b"\0\1", "b.txt": b"good", "c.bin": b"\0", "d.pdf": written("Hello")}
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)
        page.one("#files").send_keys("\n".join(str(tmp_path / name) for name in files))
        page.one("#prompt").send_keys("Read.")
        wait_for(lambda: page.one("#reading").text == "Reading d.pdf")
        page.one("#send").click()
        assert page.one("#prompt").get_attribute("value") == "Read." and not engine.requests
        go_on.set()
        wait_for(lambda: page.texts("#pictures button") == ["b.txt · 4 characters ×", "d.pdf · 1 page ×"])
        told = wait_for(lambda: page.one("#file-error").text)
        assert "a.bin is no text" in told and "c.bin is no text" in told
        page.one("#send").click()
        page.answered(1)
        assert "Hello" in prompt_of(engine.requests[0])


def test_a_server_without_the_library_says_so(driver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf, "find_spec", lambda name: None)
    with served(make_app(FakeEngineClient())) as url:
        page = Chat(driver, url)
        assert "pip install 'deltic[pdf]'" in page.refusal(tmp_path / "a.pdf", written("Hello"))


def test_an_answer_is_read_aloud(driver: Any) -> None:
    server = Server(ServerConfig())
    writer = FakeEngineClient(saying("# Title\n\nOne `and` two.\n\n```\ncode\n```\n\n- three"))
    speaker = FakeSpeechClient()
    server.add(service_of(server, writer, "writer"))
    server.add(speech_service_of(server, speaker, "speaker"))
    with served(create_app(server)) as url:
        page = Chat(driver, url)
        page.one("#prompt").send_keys("Tell", Keys.ENTER)
        page.answered(1)
        wait_for(lambda: page.one(".aloud").is_displayed())
        driver.execute_script(NOTE_WHAT_IS_SENT)
        page.one(".aloud").click()
        wait_for(lambda: speaker.requests)
        wait_for(lambda: page.one(".aloud").text == "Read aloud")
        (sent,) = driver.execute_script("return sent")
        assert (sent["input"], sent["model"]) == ("Title One and two. three", "speaker") and sent["seed"] >= 0
        speaker.n_frames, speaker.token_s = 100, 0.05
        page.one(".aloud").click()
        wait_for(lambda: len(speaker.requests) == 2)
        page.press("Stop reading")
        wait_for(lambda: speaker.aborts and page.one(".aloud").text == "Read aloud")
        speaker.fail_after = 1
        page.one(".aloud").click()
        wait_for(lambda: page.texts(".aloud-error") == ["the step failed"])


def test_without_a_model_that_speaks_nothing_is_read(driver: Any) -> None:
    with served(make_app(FakeEngineClient())) as url:
        page = Chat(driver, url)
        page.one("#prompt").send_keys("Tell", Keys.ENTER)
        page.answered(1)
        assert not page.one(".aloud").is_displayed()


def test_a_message_is_dictated_to_the_browser(driver: Any) -> None:
    with served(make_app(FakeEngineClient())) as url:
        page = Chat(driver, url)
        driver.execute_script("""
            window.SpeechRecognition = class {
              start() { window.hearing = this; }
              stop() { this.onend(); }
              hear(...texts) { this.onresult({ results: texts.map(transcript => [{ transcript }]) }); }
            };
        """)
        page.one("#prompt").send_keys("Please:")
        page.one("#dictate").click()
        assert "may send the sound to its maker" in page.one("#dictation").text
        driver.execute_script("hearing.hear('tell me'); hearing.hear('tell me', ' a story')")
        assert page.one("#prompt").get_attribute("value") == "Please: tell me a story"
        page.one("#dictate").click()
        assert page.one("#dictate").text == "Dictate" and not page.one("#dictation").is_displayed()
        page.one("#dictate").click()
        driver.execute_script("hearing.onerror({ error: 'not-allowed' }); hearing.onend()")
        assert page.one("#dictation").text == "The browser was not allowed to use the microphone."
