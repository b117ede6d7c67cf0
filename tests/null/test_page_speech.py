"""The page of a model that speaks, in Debian's Chromium over a fake engine: a text is said, heard, kept as a file, stopped; voices are cloned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium.webdriver")
pytest.importorskip("soundfile")

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from deltic.config import ServerConfig
from deltic.server.app import create_app
from deltic.server.service import Server
from deltic.server.speech.audio import encode
from tests import browser
from tests.fake_engine import FakeEngineClient, served, service_of
from tests.fake_speech import FakeSpeechClient, make_speech_app, speech_service_of, wave
from tests.waiting import wait_for

pytestmark = browser.needed


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    with browser.started("--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream") as running:
        yield running


class SpeechPage:
    def __init__(self, driver: Any, url: str, downloads: Path | None = None) -> None:
        self.driver = driver
        self.downloads = downloads
        if downloads is not None:
            allowed = {"behavior": "allow", "downloadPath": str(downloads)}
            driver.execute_cdp_cmd("Browser.setDownloadBehavior", allowed)
        driver.get(f"{url}/version")
        driver.execute_script("localStorage.clear(); sessionStorage.clear()")
        driver.get(url)

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def one(self, selector: str) -> Any:
        (found,) = self.all(selector)
        return found

    def is_shown(self, selector: str) -> bool:
        return bool(self.one(selector).is_displayed())

    def text(self, selector: str) -> str:
        return str(self.one(selector).text)

    def error(self) -> str:
        return str(wait_for(lambda: self.text("#say-error")))

    def say(self, text: str) -> None:
        box = self.one("#say [name=text]")
        box.clear()
        box.send_keys(text, Keys.CONTROL, Keys.ENTER)

    def said(self, n: int = 1) -> Any:
        """The newest of `n` texts that were said to their ends."""
        wait_for(lambda: len(self.all("#said audio")) == n and self.is_shown("#say-start"))
        return self.all("#said article")[0]

    def file(self, form: str) -> bytes:
        """The newest, downloaded."""
        assert self.downloads is not None
        article = self.all("#said article")[0]
        Select(article.find_element(By.TAG_NAME, "select")).select_by_value(form)
        next(button for button in article.find_elements(By.TAG_NAME, "button") if button.text == "Download").click()
        wait_for(lambda: list(self.downloads.glob(f"*.{form}")))  # type: ignore[union-attr]
        (path,) = self.downloads.glob(f"*.{form}")
        wait_for(lambda: path.stat().st_size)
        return path.read_bytes()

    def log(self) -> list[Any]:
        return [entry for entry in self.driver.get_log("browser") if "favicon" not in entry["message"]]


def test_a_text_is_said_and_kept(driver: Any, tmp_path: Path) -> None:
    engine = FakeSpeechClient()
    engine.n_frames = 6
    with served(make_speech_app(engine)) as url:
        page = SpeechPage(driver, url, tmp_path)
        wait_for(lambda: page.is_shown("#speak") and len(page.all("#say [name=voice] option")))
        assert not page.is_shown("#chat") and not page.is_shown("nav [href='#chat']") and not page.is_shown("#voices")
        Select(page.one("#say [name=voice]")).select_by_value("ryan")
        Select(page.one("#say [name=language]")).select_by_value("english")
        page.one("#say [name=instructions]").send_keys("Cheerful")
        page.one("#say [name=seed]").send_keys("7")
        page.say("Hello there.")
        article = page.said()
        assert engine.requests[0].params.seed == 7
        assert page.file("wav") == encode(wave(6), "wav", 24000)
        assert page.file("flac") == encode(wave(6), "flac", 24000) and engine.requests[1].params.seed == 7
        assert "ryan · english · Cheerful" in article.text and "Hello there." in article.text
        assert "0.5 s" in article.text and "seed 7" in article.text and "first sound after" in article.text
        driver.refresh()
        wait_for(lambda: len(page.all("#say [name=voice] option")))
        assert page.one("#say [name=voice]").get_attribute("value") == "ryan", "settings are kept"
        page.one("nav [href='#live']").click()
        wait_for(lambda: page.is_shown("#live") and page.all("#tiles dt"))
    assert not page.log()


def test_it_is_heard_while_it_is_made_paused_and_stopped(driver: Any, tmp_path: Path) -> None:
    engine = FakeSpeechClient()
    engine.n_frames, engine.batch, engine.token_s = 150, 2, 0.05
    with served(make_speech_app(engine)) as url:
        page = SpeechPage(driver, url, tmp_path)
        wait_for(lambda: page.all("#say [name=voice] option"))
        page.say("A long story.")
        wait_for(lambda: "so far" in page.text("#say-now") and not page.text("#say-now").startswith("0.0"))
        page.one("#say-pause").click()
        wait_for(lambda: page.text("#say-pause") == "Go on")
        heard = page.text("#say-now").split()[0]
        wait_for(lambda: float(page.text("#say-now").split()[4]) > float(heard) + 0.5)
        assert float(page.text("#say-now").split()[0]) - float(heard) < 0.2
        driver.switch_to.active_element.send_keys(Keys.ESCAPE)
        article = page.said()
        assert "not all of it" in article.text and "seed" in article.text
        wait_for(lambda: engine.aborts)
        assert wave(150).startswith(page.file("wav")[44:])
    assert not page.log()


def test_what_goes_wrong_is_said_in_words(driver: Any) -> None:
    engine = FakeSpeechClient()
    engine.fail_after = 2
    with served(make_speech_app(engine)) as url:
        page = SpeechPage(driver, url)
        wait_for(lambda: page.all("#say [name=voice] option"))
        page.say("It fails.")
        assert "the step failed" in page.error()
        more = page.one("#say [name=more]")
        page.one("#say summary").click()
        more.send_keys('{"voice": "nobody"}')
        page.say("It is refused.")
        wait_for(lambda: "'nobody'" in page.text("#say-error"))
        more.clear()
        more.send_keys("{")
        page.say("It is not sent.")
        wait_for(lambda: page.text("#say-error").startswith("More fields of the request"))


def test_a_described_voice(driver: Any) -> None:
    engine = FakeSpeechClient("voice_design")
    with served(make_speech_app(engine)) as url:
        page = SpeechPage(driver, url)
        wait_for(lambda: "described" in page.text("#say"))
        assert not page.is_shown("#say [name=voice]")
        page.say("Hello.")
        assert not engine.requests, "the browser asks for a description first"
        page.one("#say [name=instructions]").send_keys("An old sailor")
        page.say("Hello.")
        assert "An old sailor" in page.said().text and len(engine.requests) == 1


def test_voices_are_cloned_with_consent(driver: Any, tmp_path: Path) -> None:
    recording = tmp_path / "ada.wav"
    recording.write_bytes(encode(wave(20), "wav", 24000))
    engine = FakeSpeechClient("base")
    with served(make_speech_app(engine)) as url:
        page = SpeechPage(driver, url)
        wait_for(lambda: page.is_shown("#no-voice"))
        assert not page.one("#say-start").is_enabled()
        page.one("#clone [name=name]").send_keys("ada")
        page.one("#clone [name=audio]").send_keys(str(recording))
        page.one("#clone [name=ref_text]").send_keys("What is said.")
        page.one("#clone-start").click()
        assert not engine.encoded, "the browser asks for the consent first"
        page.one("#clone [name=consent]").send_keys("I agree. Ada")
        page.one("#clone-start").click()
        wait_for(lambda: page.all("#voice-list li"))
        assert "ada" in page.text("#voice-list") and "I agree. Ada" in page.text("#voice-list")
        wait_for(lambda: page.one("#say-start").is_enabled())
        page.say("In my own voice.")
        assert "ada" in page.said().text and engine.requests[0].speech.voice  # type: ignore[union-attr]
        page.one("#clone [name=name]").send_keys("ada")
        page.one("#clone [name=consent]").send_keys("I agree. Ada")
        page.one("#clone-start").click()
        wait_for(lambda: "Choose a recording" in page.text("#clone-error"))
        decode = "OfflineAudioContext.prototype.decodeAudioData"
        driver.execute_script(f"window.decode = {decode}; {decode} = () => Promise.reject(new Error('nothing heard'))")
        driver.execute_script("const button = document.querySelector('#record'); button.click(); button.click()")
        wait_for(lambda: page.text("#record") == "Stop recording")
        page.one("#record").click()
        wait_for(lambda: page.text("#clone-error") == "nothing heard" and page.text("#record") == "Record")
        driver.execute_script(f"{decode} = window.decode")
        page.one("#record").click()
        wait_for(lambda: page.text("#record") == "Stop recording")
        driver.execute_async_script("setTimeout(arguments[0], 1500)")
        page.one("#record").click()
        wait_for(lambda: page.is_shown("#recorded"))
        page.one("#clone-start").click()
        wait_for(lambda: "there is a voice 'ada'" in page.text("#clone-error"))
        page.one("#clone [name=name]").send_keys("2")
        page.one("#clone-start").click()
        wait_for(lambda: len(page.all("#voice-list li")) == 2)
        assert 4 * 24000 <= len(engine.encoded[-1].samples) <= 40 * 24000, "float32, of about 1.5 s"
        page.all("#voice-list button")[1].click()
        driver.switch_to.alert.accept()
        wait_for(lambda: len(page.all("#voice-list li")) == 1)


def test_a_server_that_chats_and_speaks(driver: Any) -> None:
    server = Server(ServerConfig())
    writer, speaker = FakeEngineClient(), FakeSpeechClient()
    server.add(service_of(server, writer, "writer"))
    server.add(speech_service_of(server, speaker, "speaker"))
    with served(create_app(server)) as url:
        page = SpeechPage(driver, url)
        wait_for(lambda: page.is_shown("nav [href='#speak']"))
        assert page.is_shown("#chat")
        page.one("nav [href='#speak']").click()
        wait_for(lambda: page.is_shown("#speak") and page.all("#say [name=voice] option"))
        assert page.one("#models").get_attribute("value") == "speaker"
        page.say("Hello.")
        page.said()
        page.one("nav [href='#chat']").click()
        wait_for(lambda: page.is_shown("#chat"))
        assert page.one("#models").get_attribute("value") == "writer"
        page.one("#prompt").send_keys("Hi", Keys.ENTER)
        wait_for(lambda: writer.requests)
    assert len(speaker.requests) == 1


def test_with_a_key_on_a_phone(driver: Any) -> None:
    engine = FakeSpeechClient()
    with served(make_speech_app(engine, api_key=("secret",))) as url:
        page = SpeechPage(driver, url)
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", {"width": 375, "height": 700, "deviceScaleFactor": 1, "mobile": True}
        )
        wait_for(lambda: page.is_shown("#speak"))
        page.one("#say summary").click()
        page.one("#say-key").send_keys("secret", Keys.TAB)
        wait_for(lambda: page.all("#say [name=voice] option"))
        page.say("Hello.")
        page.said()
        widths = "return [...document.querySelectorAll('html, main')].map(part => part.scrollWidth)"
        assert max(driver.execute_script(widths)) <= 375
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
