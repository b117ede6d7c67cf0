"""Models on the page of a server that loads them on demand: engine processes with the fake runner, in Debian's Chromium."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("selenium.webdriver")

from selenium.webdriver.common.keys import Keys

from tests import browser
from tests.null.test_on_demand import serving
from tests.null.test_page_library import Library
from tests.waiting import wait_for

pytestmark = browser.needed


def test_models_come_and_go(driver: Any, tmp_path: Path) -> None:
    (tmp_path / "load").touch()
    with serving(tmp_path) as (_, url):
        page = Library(driver, url)
        wait_for(lambda: len(page.rows()) == 3)
        assert all("on the disk" in row for row in page.rows())
        assert not page.is_shown("#pull") and "--allow-pull" in page.one("#library-closed").text
        page.press("Load b")
        wait_for(lambda: "loading" in page.rows()[1])
        (tmp_path / "load").unlink()
        wait_for(lambda: "\nloaded" in page.rows()[1])
        (tmp_path / "load").touch()
        page.press("Use c")
        wait_for(lambda: page.is_shown("#chat") and page.one("#models").get_attribute("value") == "c")
        page.one("#prompt").send_keys("Hi", Keys.ENTER)
        wait_for(lambda: page.one("#now").text.startswith("c loads ("))
        (tmp_path / "load").unlink()
        wait_for(lambda: not page.one("#now").text.startswith("c loads ("))
        page.one("nav [href='#library']").click()
        wait_for(lambda: "on the disk" in page.rows()[1])  # it has made way
        page.press("Unload c")
        wait_for(lambda: "on the disk" in page.rows()[2])
