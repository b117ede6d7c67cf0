"""Debian's Chromium, and the page in it: what tests of the page start."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from deltic.commands.endpoint import LocalServer
from deltic.server.page.files import FILES
from tests.waiting import wait_for

try:
    from selenium import webdriver
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
except ImportError:
    webdriver = None  # type: ignore[assignment]

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needed = pytest.mark.skipif(
    not (BROWSER and DRIVER and webdriver),
    reason="no chromium and chromedriver; on Debian: apt install chromium-driver",
)

IN_MODULES = """
    const script = document.querySelector("script[type=module]").src, [names, ...given] = arguments;
    globalThis.known ??= Promise.all(names.map(name => import(new URL(name, script)))).then(modules => Object.assign(globalThis, ...modules));
    return known.then(() => (function () { %s }).apply(null, given));
"""
"""Runs a script that knows what the page's modules export, and returns what it returns."""

FORGET = """
    localStorage.clear();
    sessionStorage.clear();
    return new Promise(done => {
      const deleting = indexedDB.deleteDatabase("deltic");
      deleting.onsuccess = deleting.onerror = deleting.onblocked = () => done();
    });
"""
"""Has the browser forget what the page keeps: run on another page of the same server."""


def modules() -> set[str]:
    """Names of the modules that the page loads: not those of other pages."""
    found, waiting = set[str](), {"main.js"}
    while waiting:
        found.add(name := waiting.pop())
        waiting |= set(re.findall(r'^import .*"\./([\w.]+)";$', FILES[name].decode(), re.MULTILINE)) - found
    return found


@contextmanager
def started(*arguments: str) -> Iterator[Any]:
    """A browser without a window. arguments: more of its command line."""
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", *arguments):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield running
    finally:
        running.quit()


class Page:
    """The page as somebody new to it finds it, but for the key."""

    def __init__(self, driver: Any, server: LocalServer) -> None:
        self.driver, self.server = driver, server
        self.size(1280, 800)
        driver.get(f"{server.url}/version")
        driver.execute_script(FORGET)
        driver.execute_script("sessionStorage['deltic.key'] = JSON.stringify(arguments[0])", server.api_key)
        self.go("")
        wait_for(lambda: self.one("#state").get_attribute("class") == "ready")
        # What the page sends, and each length that its newest answer had.
        self.run("""
            window.sent = []; window.lengths = [];
            const fetched = window.fetch;
            window.fetch = (path, options) => { if (options.body && String(path).startsWith("v1/chat")) sent.push(JSON.parse(options.body)); return fetched(path, options); };
            new MutationObserver(() => {
              const length = document.querySelector(".turn:last-child .md")?.textContent.length;
              if (length && lengths.at(-1) !== length) lengths.push(length);
            }).observe(document.querySelector("#log"), { subtree: true, childList: true, characterData: true });
        """)

    def size(self, width: int, height: int) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def go(self, path: str) -> None:
        self.driver.get(f"{self.server.url}/{path}")

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(IN_MODULES % script, [*modules()], *arguments)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)  # type: ignore[no-any-return]

    def one(self, selector: str) -> Any:
        (found,) = self.all(selector)
        return found

    def set(self, **settings: str) -> None:
        """Settings by name, in their panel, which is opened."""
        if not self.one("#settings").is_displayed():
            self.one("#settings-open").click()
        for name, text in settings.items():
            field = self.one(f"#settings [name={name}]")
            if field.tag_name != "select":
                field.send_keys(Keys.CONTROL, "a")
                field.send_keys(Keys.DELETE)
            field.send_keys(text)

    def type(self, *keys: str) -> None:
        """To whatever has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def begin(self, text: str) -> None:
        self.one("#prompt").send_keys(text, Keys.ENTER)

    def ask(self, text: str) -> Any:
        """The article of the answer, once it is whole."""
        self.begin(text)
        return self.answered()

    def answered(self) -> Any:
        wait_for(lambda: self.all(".turn:last-child[aria-busy=false] > .md:not([data-drawn=false])"))
        return self.all(".turn")[-1]

    def texts(self, selector: str) -> list[str]:
        """Texts of what is there, read at once: an element that the page has drawn anew meanwhile is no error."""
        script = "return [...document.querySelectorAll(arguments[0])].map(part => part.innerText.trim())"
        return self.run(script, selector)  # type: ignore[no-any-return]

    def answer(self) -> str:
        return self.texts(".turn > .md")[-1]

    def figures(self) -> str:
        return self.texts(".figures")[-1]

    def press(self, name: str) -> None:
        """Clicks the last button of that name."""
        self.run(
            "return [...document.querySelectorAll('button')].findLast(b => b.innerText === arguments[0])", name
        ).click()

    def live(self) -> dict[str, Any]:
        key = {"authorization": f"Bearer {self.server.api_key}"}
        told: dict[str, Any] = httpx.get(f"{self.server.url}/live", headers=key).json()
        return told

    def width(self) -> tuple[int, int]:
        """Of what is there, and of the window."""
        widths = "return [Math.max(...[...document.querySelectorAll('html, main, #log, #side, #settings')].map(e => e.scrollWidth)), innerWidth]"
        wide, window = self.run(widths)
        return wide, window
