"""Models on the page: listed, chosen, loaded, fetched with progress; in Debian's Chromium over fake engines."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("selenium.webdriver")

from selenium.webdriver.common.by import By
from starlette.types import Receive, Scope, Send

from deltic.config import ServerConfig
from deltic.server.app import create_app
from deltic.server.service import Server
from tests import browser
from tests.fake_engine import FakeEngineClient, make_app, served, service_of
from tests.fake_speech import FakeSpeechClient, speech_service_of
from tests.waiting import wait_for

pytestmark = browser.needed


class Library:
    def __init__(self, driver: Any, url: str) -> None:
        self.driver = driver
        driver.get(f"{url}/version")
        driver.execute_script("localStorage.clear(); sessionStorage.clear()")
        driver.get(url)
        wait_for(lambda: self.is_shown("nav [href='#library']"))
        self.one("nav [href='#library']").click()
        wait_for(lambda: self.all("#library-list li"))

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def one(self, selector: str) -> Any:
        (found,) = self.all(selector)
        return found

    def is_shown(self, selector: str) -> bool:
        return bool(self.one(selector).is_displayed())

    def rows(self) -> list[str]:
        script = "return [...document.querySelectorAll('#library-list li')].map(row => row.innerText)"
        return list(self.driver.execute_script(script))

    def press(self, name: str) -> None:
        """Clicks it once it is shown: a view comes a moment behind its link."""
        selector = f"[aria-label='{name}']"
        wait_for(lambda: self.all(selector) and self.is_shown(selector))
        self.one(selector).click()


def test_models_are_listed_and_chosen(driver: Any) -> None:
    server = Server(ServerConfig())
    server.add(service_of(server, FakeEngineClient(), "first"))
    server.add(service_of(server, FakeEngineClient(max_model_len=2048), "second"))
    server.add(speech_service_of(server, FakeSpeechClient(), "speaker"))
    with served(create_app(server)) as url:
        page = Library(driver, url)
        rows = page.rows()
        assert rows[0].startswith("first") and "context of 1,024 tokens" in rows[0] and "loaded" in rows[0]
        assert "context of 2,048 tokens" in rows[1] and "speaks, CustomVoice" in rows[2]
        assert not page.is_shown("#pull") and "deltic serve --models-from" in page.one("#library-fixed").text
        page.press("Use second")
        wait_for(lambda: page.is_shown("#chat") and page.one("#models").get_attribute("value") == "second")
        page.one("nav [href='#library']").click()
        page.press("Use speaker")
        wait_for(lambda: page.is_shown("#speak") and page.one("#models").get_attribute("value") == "speaker")


def test_one_model_that_stays_has_no_list(driver: Any) -> None:
    with served(make_app(FakeEngineClient())) as url:
        driver.get(url)
        wait_for(lambda: driver.find_element(By.ID, "files").get_attribute("accept"))
        assert not driver.find_element(By.CSS_SELECTOR, "nav [href='#library']").is_displayed()


class OnDemand:
    """The application, whose models come and go: what the page sees of that."""

    def __init__(self, app: Any) -> None:
        self.app, self.state = app, app.state
        self.status: dict[str, Any] = {"value": "unloaded"}
        self.asked: list[dict[str, Any]] = []
        self.go_on = False
        self.error = ""
        self.is_refusing = False
        self.left = 0
        self.may_pull = True
        self.deleted: list[dict[str, Any]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path")
        if path == "/v1/models":
            cards = [{"id": name, "max_model_len": 1024, "status": self.status} for name in ("small", "other")]
            await self._answer(send, {"data": cards[len(self.deleted) :], "may_pull": self.may_pull})
        elif path == "/api/delete" and self.is_refusing:
            await self._answer(send, {"error": "'small' loads or answers"}, 409)
        elif path == "/api/delete":
            assert scope["method"] == "DELETE"
            self.deleted.append(json.loads((await receive())["body"]))
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        elif path == "/api/tags":
            about = {"name": "small:latest", "size": 3_200_000_000, "details": {"quantization_level": "Q4_K_M"}}
            await self._answer(send, {"models": [about]})
        elif path in ("/v1/models/load", "/v1/models/unload"):
            self.asked.append(json.loads((await receive())["body"]))
            self.status = {"value": path.rpartition("/")[2] + "ed"}
            await self._answer(send, {"success": True})
        elif path == "/api/pull" and self.is_refusing:
            await self._answer(send, {"error": "this server fetches none"}, 404)
        elif path == "/api/pull":
            self.asked.append(json.loads((await receive())["body"]))
            await self._pull(receive, send)
        else:
            await self.app(scope, receive, send)

    async def _pull(self, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        line: dict[str, Any] = {"status": "pulling manifest"}
        await send({"type": "http.response.body", "body": json.dumps(line).encode() + b"\n", "more_body": True})
        line = {"status": "pulling small.gguf", "total": 3_000_000_000, "completed": 1_500_000_000}
        halves = json.dumps(line).encode() + b"\n"
        for half in (halves[:20], halves[20:]):
            await send({"type": "http.response.body", "body": half, "more_body": True})
        leaving = asyncio.create_task(receive())
        while not self.go_on and not leaving.done():
            await asyncio.sleep(0.01)
        self.left += leaving.done()
        leaving.cancel()
        line = {"error": self.error} if self.error else {"status": "success"}
        await send({"type": "http.response.body", "body": json.dumps(line).encode() + b"\n"})

    async def _answer(self, send: Send, fields: dict[str, Any], status: int = 200) -> None:
        await send(
            {"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]}
        )
        await send({"type": "http.response.body", "body": json.dumps(fields).encode()})


def test_models_are_loaded_and_fetched(driver: Any) -> None:
    app = OnDemand(make_app(FakeEngineClient()))
    with served(app) as url:
        page = Library(driver, url)
        assert "3.2 GB · Q4_K_M · context of 1,024 tokens" in page.rows()[0] and "on the disk" in page.rows()[0]
        page.press("Load small")
        wait_for(lambda: "loaded" in page.rows()[0])
        page.press("Unload small")
        wait_for(lambda: "on the disk" in page.rows()[0])
        assert app.asked == [{"model": "small"}, {"model": "small"}]
        app.status = {"value": "loading", "progress": {"stage": "weights", "done": 0.4}}
        wait_for(lambda: "loading, weights 40 %" in page.rows()[0])
        app.status = {"value": "unloaded", "failed": True, "message": "it has no head"}
        wait_for(lambda: "could not be loaded: it has no head" in page.rows()[0])

        page.one("#pull-name").send_keys("qwen3.5:4b")
        page.one("#pull-start").click()
        wait_for(lambda: "1.5 GB of 3 GB" in page.one("#pull-now").text)
        assert float(page.one("#pull-bar").get_property("value")) == 0.5
        page.one("nav [href='#chat']").click()
        page.one("nav [href='#library']").click()
        assert page.is_shown("#pull-bar"), "it goes on"
        page.one("#pull-stop").click()
        wait_for(lambda: "it goes on where it stopped" in page.one("#pull-now").text and app.left)
        driver.refresh()
        wait_for(lambda: page.is_shown("#pull"))
        assert page.one("#pull-name").get_attribute("value") == "qwen3.5:4b"
        app.error = "the disk is full"
        app.go_on = True
        page.one("#pull-start").click()
        wait_for(lambda: page.one("#library-failed").text == "the disk is full")
        app.error, app.is_refusing = "", True
        page.one("#pull-start").click()
        wait_for(lambda: page.one("#library-failed").text == "this server fetches none")
        app.is_refusing = False
        page.one("#pull-start").click()
        wait_for(lambda: page.one("#pull-now").text == "qwen3.5:4b is there.")
        assert page.one("#pull-name").get_attribute("value") == "" and app.asked[-1] == {"model": "qwen3.5:4b"}


def test_a_model_is_deleted_once_that_is_confirmed_and_where_the_server_lets_one(driver: Any) -> None:
    app = OnDemand(make_app(FakeEngineClient()))
    app.may_pull = False
    with served(app) as url:
        page = Library(driver, url)
        assert "--allow-pull" in page.one("#library-closed").text and not page.is_shown("#pull")
        assert not page.all("[aria-label='Delete small']")
        app.may_pull, app.status = True, {"value": "unloaded", "deletable": True}
        page.press("Delete small")
        words = page.one("#doomed").text
        assert "small, 3.2 GB, goes from the disk" in words and not page.is_shown("#library-closed")
        page.one("#doomed-no").click()
        assert not page.is_shown("#doomed") and not app.deleted
        app.is_refusing = True
        page.press("Delete small")
        page.one("#doomed-yes").click()
        wait_for(lambda: page.one("#library-failed").text == "'small' loads or answers")
        app.is_refusing = False
        page.press("Delete small")
        page.one("#doomed-yes").click()
        wait_for(lambda: app.deleted == [{"model": "small"}] and len(page.rows()) == 1)
        assert not page.is_shown("#library-failed")
