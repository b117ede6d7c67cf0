"""The page at /docs in Debian's Chromium, over a fake engine: routes are found, read and tried."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("selenium.webdriver")

from selenium.webdriver.common.by import By

from deltic.server.app import ROUTES
from tests import browser
from tests.fake_engine import END, FakeEngineClient, make_app, served
from tests.waiting import wait_for

pytestmark = browser.needed


@pytest.fixture
def page(driver: Any) -> Iterator[Any]:
    engine = FakeEngineClient(lambda request, index: [*b"Forty-two.", END])
    with served(make_app(engine, api_key=("secret",), root_path="/llm")) as url:
        driver.get(f"{url}/llm/version")
        driver.execute_script("sessionStorage.clear(); sessionStorage['deltic.key'] = JSON.stringify('secret')")
        driver.get(f"{url}/llm/docs")
        wait_for(lambda: len(driver.find_elements(By.CSS_SELECTOR, "details.route")) == len(ROUTES))
        yield driver
        said = [line["message"] for line in driver.get_log("browser") if "favicon" not in line["message"]]
        assert not said, "the page breaks its policy, or something else"


def shown(page: Any, selector: str) -> list[Any]:
    return [found for found in page.find_elements(By.CSS_SELECTOR, selector) if found.is_displayed()]


def opened(page: Any, name: str) -> Any:
    """The box of a route, opened by its link."""
    page.find_element(By.CSS_SELECTOR, f"aside a[href='#{name}']").click()
    box = page.find_element(By.ID, name)
    wait_for(lambda: box.find_elements(By.CSS_SELECTOR, "form, p"))
    return box


def test_a_field_finds_its_routes(page: Any) -> None:
    find = page.find_element(By.ID, "find")
    find.send_keys("guided_regex")
    names = {box.get_attribute("id") for box in shown(page, "details.route")}
    assert {"chat_completions", "completions"} <= names and "health" not in names
    assert len(shown(page, "aside a")) == len(names)
    find.clear()
    find.send_keys("no such field")
    assert not shown(page, "details.route") and not shown(page, "aside a")


def test_a_route_tells_its_fields_to_any_depth(page: Any) -> None:
    box = opened(page, "chat_completions")
    assert "How random the answer is" in box.text and "text/event-stream" in box.text and "Forty" not in box.text
    names = [code.text for code in box.find_elements(By.CSS_SELECTOR, ".fields code")]
    assert {"messages", "temperature", "choices", "usage"} <= set(names) and "prompt_tokens" not in names
    usage = next(
        one for one in box.find_elements(By.CSS_SELECTOR, "summary") if one.text.startswith("usage AnswerUsage")
    )
    usage.click()
    wait_for(lambda: "Tokens of the prompt, cached ones too." in box.text)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_sent_and_its_answer_shown(page: Any, stream: bool) -> None:
    box = opened(page, "chat_completions")
    text = box.find_element(By.CSS_SELECTOR, "textarea")
    body = json.loads(text.get_attribute("value"))
    assert body["messages"][0]["role"] == "user", "the example of the document"
    page.execute_script("arguments[0].value = arguments[1]", text, json.dumps(body | {"stream": stream}))
    box.find_element(By.CSS_SELECTOR, "form button.main").click()
    wait_for(lambda: "Status 200" in box.find_element(By.CSS_SELECTOR, "form [role=status]").text)
    said = box.find_element(By.CSS_SELECTOR, "form pre").text
    assert "data: [DONE]" in said if stream else json.loads(said)["choices"][0]["message"]["content"] == "Forty-two."


def test_an_error_is_shown_with_its_status(page: Any) -> None:
    box = opened(page, "get_model")
    box.find_element(By.CSS_SELECTOR, "form input").send_keys("none")
    box.find_element(By.CSS_SELECTOR, "form button.main").click()
    wait_for(lambda: "Status 404" in box.text)
    assert "no model 'none'" in box.find_element(By.CSS_SELECTOR, "form pre").text
    page.get_log("browser")  # Chromium notes the 404


@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_its_window(page: Any, width: int) -> None:
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    opened(page, "create_response")
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
