"""The page as bytes: what is sent, to whom, and what it may not contain. What it does is in tests/cpu/test_page_browser.py."""

from __future__ import annotations

import re
import time
from graphlib import TopologicalSorter
from typing import Any

import httpx
import pytest

from deltic.config import EngineConfig, ServerConfig
from deltic.engine.events import CacheStats, Stats, StepOutputs
from deltic.host.client import N_RECENT_STEPS, EngineClient
from deltic.server.api import protocol
from deltic.server.page.files import DOCS, FILES, INDEX, VERSION
from deltic.server.speech.protocol import SpeechRequest
from tests.fake_engine import FakeEngineClient
from tests.null.test_http import error_of, get

TEXT = b"".join([INDEX, DOCS, *FILES.values()]).decode()
KEY = {"authorization": "Bearer secret"}


def fetch(path: str, headers: dict[str, str] | None = None, **config: Any) -> httpx.Response:
    return get(FakeEngineClient(), path, headers, **config)


def test_the_page_is_open_and_what_it_asks_for_is_not() -> None:
    response = fetch("/", api_key=("secret",))
    assert response.status_code == 200 and response.content == INDEX
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert fetch("/live", api_key=("secret",)).status_code == 401
    assert fetch("/live", KEY, api_key=("secret",)).status_code == 200


def test_a_rebound_name_does_not_get_it() -> None:
    refused = fetch("/", {"host": "rebound.example"})
    assert refused.status_code == 403 and error_of(refused)["code"] == "host_not_allowed"


def test_it_is_asked_for_again_and_sent_when_it_changed() -> None:
    first = fetch("/")
    assert first.headers["cache-control"] == "no-cache"
    for tag in (first.headers["etag"], f"W/{first.headers['etag']}"):
        again = fetch("/", {"if-none-match": tag})
        assert again.status_code == 304 and not again.content and again.headers["etag"] == first.headers["etag"]
    assert fetch("/", {"if-none-match": '"older"'}).content == INDEX


def test_the_api_can_be_read_in_a_browser() -> None:
    sent = fetch("/docs", api_key=("secret",))
    assert sent.content == DOCS and sent.headers["content-type"] == "text/html; charset=utf-8"
    assert sent.headers["content-security-policy"] == fetch("/").headers["content-security-policy"]
    assert set(re.findall(r"page/([0-9a-f]{32})/", DOCS.decode())) == {VERSION}
    slashed = fetch("/docs/", root_path="/llm")
    assert (slashed.status_code, slashed.headers["location"]) == (307, "../docs")


def test_policy_allows_files_of_this_server_only() -> None:
    policy = dict(part.strip().split(" ", 1) for part in fetch("/").headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["trusted-types"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'" and policy["img-src"] == "data:"


def test_its_files_are_kept_for_good_and_those_of_another_version_are_not() -> None:
    assert set(re.findall(r"page/([0-9a-f]{32})/", INDEX.decode())) == {VERSION}
    for name, media_type in (("main.js", "text/javascript"), ("page.css", "text/css")):
        sent = fetch(f"/page/{VERSION}/{name}", api_key=("secret",))
        assert sent.content == FILES[name] and sent.headers["content-type"] == f"{media_type}; charset=utf-8"
        assert "immutable" in sent.headers["cache-control"] and sent.headers["x-content-type-options"] == "nosniff"
        older = fetch(f"/page/older/{name}")
        assert older.content == FILES[name] and older.headers["cache-control"] == "no-store"
    for name in ("files.py", "index.html", "..%2ffiles.py", "nothing.js"):
        assert fetch(f"/page/{VERSION}/{name}").status_code == 404


def test_modules_load_what_is_there_and_do_not_load_each_other() -> None:
    loads = {
        n: set(re.findall(r'^import .*"\./([\w.]+)";$', FILES[n].decode(), re.M)) for n in FILES if n.endswith(".js")
    }
    assert set(loads) - set().union(*loads.values()) == {"main.js", "docs.js"}, "a module that nobody loads"
    assert {*TopologicalSorter(loads).static_order()} == set(loads), "a module that is not there"


def test_nothing_comes_from_elsewhere_and_no_text_becomes_markup() -> None:
    assert set(re.findall(r"\w+://[\w./-]+", TEXT)) == {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1998/Math/MathML",
    }
    assert set(re.findall(r"<(?:link|script)[^>]* (?:href|src)=\"([^\"]{5})", TEXT)) == {"data:", "page/"}
    assert not re.search(r"@import|url\(", TEXT)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc", TEXT)
    assert not re.search(r"<[^>]*\s(?:on\w+|style)=", TEXT), "an attribute that the policy would block"


def test_fields_of_its_settings_are_the_requests() -> None:
    def assigned(name: str) -> set[str]:
        return set(re.findall(r"body\.(\w+) =", FILES[name].decode()))

    (names,) = re.findall(r"const NUMBERS = \[(.*?)\]", TEXT)
    sent = {*re.findall(r'"(\w+)"', names), *assigned("settings.js"), "stream", "stream_options"}
    assert sent > {"temperature", "seed", "messages", "reasoning_effort"}
    assert sent <= set(protocol.ChatRequest.__struct_fields__)
    assert {"voice", "seed"} < assigned("speak.js") <= set(SpeechRequest.__struct_fields__)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(scheme: str) -> None:
    """WCAG AA: 4.5 to 1."""
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]+)", rule)) for rule in re.findall(r":root \{(.*?)\}", TEXT, re.S)
    )
    colours = light if scheme == "light" else light | dark

    def luminance(name: str) -> float:
        digits = colours[name][1:]
        digits = digits if len(digits) == 6 else "".join(2 * digit for digit in digits)
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    def contrast(text: str, ground: str) -> float:
        dim, bright = sorted((luminance(text), luminance(ground)))
        return (bright + 0.05) / (dim + 0.05)

    pairs = [(text, ground) for text in ("ink", "soft", "accent") for ground in ("bg", "card", "tint", "code")]
    pairs += [(word, "code") for word in ("green", "violet", "brown", "bad")]
    for text, ground in [*pairs, ("on-accent", "accent"), ("bad", "card"), ("bad", "bg")]:
        assert contrast(text, ground) >= 4.5, (text, ground, contrast(text, ground))


def test_live_tells_what_the_server_knows() -> None:
    engine = FakeEngineClient()
    engine.stats = Stats(n_running=2, n_pages=64, n_steps=9, cache=CacheStats(n_hits=3, read_bytes={"host": 5}))
    engine.recent_steps.append((time.monotonic() - 1.5, 7.5, 2, 10, 3))
    response = get(engine, "/live")
    told = response.json()
    assert response.headers["cache-control"] == "no-store"
    assert (told["model"], told["status"], told["engine"]["max_num_seqs"]) == ("fake", "ready", 16)
    assert told["stats"]["n_running"] == 2 and told["stats"]["n_steps"] == 9
    assert told["stats"]["cache"]["n_hits"] == 3 and told["stats"]["cache"]["read_bytes"] == {"host": 5}
    ((ago_s, *rest),) = told["steps"]
    assert 1.5 <= ago_s < 10 and rest == [7.5, 2, 10, 3]
    engine.state, engine.info = "starting", None
    told = get(engine, "/live").json()
    assert told["status"] == "starting" and told["engine"] is None


def test_client_keeps_the_last_steps() -> None:
    client = EngineClient(EngineConfig(), ServerConfig().max_queue)
    for n in range(1, N_RECENT_STEPS + 11):
        said = Stats(n_running=1, n_steps=n, n_prompt_tokens=20 * n, n_generated_tokens=2 * n, last_step_ms=n)
        client._take(StepOutputs([], said), [])
        client._take(StepOutputs([], said), [])  # as before a cache report: no step
    assert len(client.recent_steps) == N_RECENT_STEPS
    assert [list(step[1:]) for step in client.recent_steps][-1] == [N_RECENT_STEPS + 10, 1, 20, 2]
