"""Pictures in the page: picked, pasted, dropped, shown and sent, in Debian's Chromium over a fake engine."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")
pytest.importorskip("selenium.webdriver")

from selenium.webdriver.common.by import By

from tests import browser
from tests.fake_engine import PICTURE_TEMPLATE, TEMPLATE, FakeEngineClient, make_app, served
from tests.null.test_picture_doors import SEEN, SMALL, WIDE, prompt_of, seeing
from tests.waiting import wait_for

pytestmark = browser.needed

GIVE = """
    const [kind, id, encoded] = arguments;
    const data = new DataTransfer();
    data.items.add(new File([Uint8Array.from(atob(encoded), c => c.charCodeAt(0))], "a.png", { type: "image/png" }));
    const more = { bubbles: true, cancelable: true };
    const event = kind === "paste" ? new ClipboardEvent(kind, { clipboardData: data, ...more }) : new DragEvent(kind, { dataTransfer: data, ...more });
    document.getElementById(id).dispatchEvent(event);
    return event.defaultPrevented;
"""


def test_pictures(driver: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(WIDE)
    engine = seeing()

    def of(selector: str) -> list[Any]:
        return list(driver.find_elements(By.CSS_SELECTOR, selector))

    def give(kind: str, place: str) -> bool:
        return bool(driver.execute_script(GIVE, kind, place, base64.b64encode(SMALL).decode()))

    with served(make_app(engine, PICTURE_TEMPLATE)) as url:
        driver.get(url)
        wait_for(lambda: "image/*" in of("#files")[0].get_attribute("accept"))
        of("#files")[0].send_keys(str(file))
        wait_for(lambda: len(of("#pictures img")) == 1)
        assert give("paste", "prompt") and give("dragover", "log") and give("drop", "log")
        wait_for(lambda: len(of("#pictures img")) == 3)
        of("#pictures button")[1].click()
        assert len(of("#pictures img")) == 2
        of("#prompt")[0].send_keys("What is it?\n")
        wait_for(lambda: "Hello" in of("#log")[0].text and of("#send")[0].is_displayed())
        assert f"user\n{SEEN.format('2x5')}{SEEN.format('2x2')}What is it?<|im_end|>" in prompt_of(engine.requests[0])
        widths = driver.execute_script(
            "return [...document.querySelectorAll('.said img')].map(one => one.naturalWidth)"
        )
        assert widths == [160, 64] and not of("#pictures img"), "they are shown in the chat, and no more to be sent"
        next(one for one in of(".turn.user button") if one.text == "Edit").click()
        assert len(of("#pictures img")) == 2 and of("#prompt")[0].get_attribute("value") == "What is it?"
        of("#cancel")[0].click()
        assert not of("#pictures img")
        driver.refresh()
        wait_for(lambda: len(of(".said img")) == 2)
        wait_for(lambda: "ready" in of("#state")[0].get_attribute("class"))
        assert give("paste", "prompt")
        wait_for(lambda: len(of("#pictures img")) == 1)
        of("#send")[0].click()
        wait_for(lambda: len(engine.requests) == 2)
        assert len(engine.requests[1].pictures) == 3, "without a text, too, behind those that were kept"
        wait_for(lambda: len(of(".turn[aria-busy=false]")) == 2 and of("#log")[0].text.count("Hello") == 2)
    assert not [entry for entry in driver.get_log("browser") if "favicon" not in entry["message"]]


def test_a_model_that_reads_text_is_given_none(driver: Any) -> None:
    with served(make_app(FakeEngineClient(), TEMPLATE)) as url:
        driver.get(url)
        wait_for(lambda: driver.find_element(By.ID, "files").get_attribute("accept"))
        assert "image" not in driver.find_element(By.ID, "files").get_attribute("accept")
        driver.execute_script(GIVE, "drop", "log", base64.b64encode(SMALL).decode())
        told = wait_for(lambda: driver.find_element(By.ID, "file-error").text)
        assert told == "a.png is a picture, and this model reads text only."
        assert not driver.find_elements(By.CSS_SELECTOR, "#pictures img")
