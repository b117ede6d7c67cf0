"""The page in Chromium: what drawing a growing answer costs, and pictures of all its views to look at.

    python -m bench.page cost
    python -m bench.page screens DIRECTORY

`cost` streams an answer of 4,000 tokens with formulas, tables and code, as quick as a GPU would, and prints
the frames per second that the browser shows meanwhile, and the seconds of a processor of the server and of
the processes that draw. The engine is a fake, so all of the server's time is that of streaming and drawing;
the same stream to a client that draws nothing is beside it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx

from tests import browser
from tests.browser import Page
from tests.fake_engine import END, PICTURE_TEMPLATE, FakeEngineClient, make_app, saying, served
from tests.fake_speech import FakeSpeechClient, make_speech_app
from tests.null.test_page_library import Library, OnDemand
from tests.null.test_page_speech import SpeechPage
from tests.null.test_picture_doors import WIDE, seeing
from tests.waiting import wait_for

PARAGRAPH = r"""## Part {n}: the **energy** of an oscillator

The energy is \( E_{{{n}}} = \hbar\omega\left({n} + \frac{{1}}{{2}}\right) \), and $x^2 + y^2 = r^2$ holds, as [here](https://example.org/{n}).

\[
\begin{{aligned}}
\int_0^\infty e^{{-x^2}}\,dx &= \frac{{\sqrt{{\pi}}}}{{2}} \\
\sum_{{k=1}}^{{{n}}} k^2 &= \frac{{{n}({n}+1)(2 \cdot {n}+1)}}{{6}}
\end{{aligned}}
\]

- [x] derived *once*
- [ ] checked `twice`

| n | value | note |
|--:|---|---|
| {n} | $\alpha_{{{n}}}$ | a longer note on the value |

```python
def energy(n: int, omega: float = 1.0) -> float:
    # The energy of state n.
    return HBAR * omega * (n + 0.5)  # of part {n}
```

"""
N_TOKENS = 4000
LETTERS = 4
"""Letters of a token, about as many as a model's have."""
TOKENS_PER_S = 100


def long_text(n_letters: int) -> str:
    return "".join(PARAGRAPH.format(n=n) for n in range(1, 1 + n_letters // len(PARAGRAPH) + 1))[:n_letters]


def cpu_s(pids: list[int]) -> float:
    """Seconds of a processor that processes had, with the children that they waited for."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += sum(map(int, fields[11:15]))
    return total / 100


def drawers() -> list[int]:
    """The fork server of this process, if it was started."""
    from deltic.server.isolated import FORKS

    return [FORKS._process.pid] if FORKS._process else []


@contextmanager
def opened(driver: Any, engine: Any) -> Iterator[Page]:
    with served(make_app(engine, PICTURE_TEMPLATE)) as url:
        yield Page(driver, SimpleNamespace(url=url, api_key=""))  # type: ignore[arg-type]


PHONE = {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": False}
FRAMES = """
    window.frames_ = [];
    const note = at => { frames_.push(at); requestAnimationFrame(note); };
    requestAnimationFrame(note);
"""


def cost() -> None:
    text = long_text(N_TOKENS * LETTERS)
    engine = FakeEngineClient(lambda request, index: [*text.encode(), END], max_model_len=65_536, n_pages=1024)
    engine.batch, engine.token_s = LETTERS, 1 / TOKENS_PER_S

    def used_s() -> float:
        own = resource.getrusage(resource.RUSAGE_SELF)
        return own.ru_utime + own.ru_stime

    with browser.started() as driver, opened(driver, engine) as page:
        httpx.post(f"{page.server.url}/page/markdown", json={"texts": ["a"]})  # what draws is started once
        body = {"model": "fake", "messages": [{"role": "user", "content": "Write."}], "stream": True}
        begun_s, begun_cpu_s = time.monotonic(), used_s()
        with httpx.stream("POST", f"{page.server.url}/v1/chat/completions", json=body, timeout=600) as reply:
            for _ in reply.iter_raw():
                pass
        bare = (used_s() - begun_cpu_s) / (time.monotonic() - begun_s)
        page.run(FRAMES)
        begun_s, begun_cpu_s, begun_drawn_s = time.monotonic(), used_s(), cpu_s(drawers())
        page.begin("Write.")
        driver.set_script_timeout(600)
        while not driver.find_elements("css selector", ".turn:last-child[aria-busy=false]"):
            time.sleep(0.5)
        wall_s, server_s, drawn_s = time.monotonic() - begun_s, used_s() - begun_cpu_s, cpu_s(drawers()) - begun_drawn_s
        at = page.run("return frames_")
        gaps = sorted(b - a for a, b in itertools.pairwise(at))
        told = {
            "tokens": N_TOKENS,
            "seconds": round(wall_s, 1),
            "frames_per_s": round(len(gaps) / wall_s, 1),
            "gap_99_ms": round(gaps[int(0.99 * len(gaps))], 1),
            "gap_most_ms": round(gaps[-1], 1),
            "requests_to_draw": page.run(
                "return performance.getEntriesByType('resource').filter(e => e.name.endsWith('page/markdown')).length"
            ),
            "core_server_with_page": round(server_s / wall_s, 4),
            "core_server_bare_stream": round(bare, 4),
            "core_drawers": round(drawn_s / wall_s, 4),
            "formulas": page.run("return document.querySelectorAll('.md math').length"),
        }
    print(json.dumps(told, indent=1))


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = "<tool_call>\n<function=weather>\n<parameter=city>\nUppsala\n</parameter>\n</function>\n</tool_call>"


def screens(directory: Path) -> None:
    """Writes a picture of each view."""
    directory.mkdir(parents=True, exist_ok=True)
    with browser.started() as driver:

        def shot(name: str) -> None:
            time.sleep(0.4)
            assert driver.save_screenshot(str(directory / f"{name}.png"))

        def look(scheme: str) -> None:
            driver.execute_cdp_cmd(
                "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
            )

        with opened(driver, FakeEngineClient()):
            shot("empty")
        for scheme in ("light", "dark"):
            look(scheme)
            with opened(driver, FakeEngineClient(saying(long_text(3000)), max_model_len=16_384)) as page:
                page.ask("Derive the energy of an oscillator.")
                page.press("Regenerate")
                page.answered()
                shot(f"chat-{scheme}")
                page.one("#settings-open").click()
                shot(f"settings-{scheme}")
                page.one("#settings-close").click()
                page.one("nav [href='#live']").click()
                wait_for(lambda: page.all("#tree svg"))
                shot(f"live-{scheme}")
                page.one("nav [href='#chat']").click()
                if scheme == "light":
                    page.size(390, 800)
                    shot("phone")
                    page.one("#menu").click()
                    shot("phone-chats")
                    page.one("#menu").click()
                    page.one("#settings-open").click()
                    shot("phone-settings")
        look("light")
        with opened(driver, seeing()) as page:
            (directory / "a.png").write_bytes(WIDE)
            page.one("#files").send_keys(str(directory / "a.png"))
            wait_for(lambda: page.all("#pictures img"))
            page.ask("What is it?")
            shot("picture")
            (directory / "a.png").unlink()
        with opened(driver, FakeEngineClient(saying(CALL))) as page:
            page.set(more=json.dumps({"tools": [TOOL]}))
            page.one("#settings-close").click()
            page.ask("Will it rain in Uppsala?")
            shot("tool-call")
        _models(driver, shot)
        _speech(driver, shot)


def _models(driver: Any, shot: Callable[[str], None]) -> None:
    """Several models that are loaded on demand: one is fetched, one deleted."""
    app = OnDemand(make_app(FakeEngineClient()))
    with served(app) as url:
        Page(driver, SimpleNamespace(url=url, api_key=""))  # type: ignore[arg-type]
        app.status = {"value": "loading", "progress": {"stage": "weights", "done": 0.4}}
        library = Library(driver, url)
        shot("models")
        app.status = {"value": "unloaded", "deletable": True}
        library.one("#pull-name").send_keys("qwen3.5:4b")
        library.one("#pull-start").click()
        wait_for(lambda: "1.5 GB" in library.one("#pull-now").text and library.all("[aria-label='Delete small']"))
        shot("download")
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
        shot("phone-download")
        library.press("Delete small")
        shot("phone-delete")
        app.go_on = True


def _speech(driver: Any, shot: Callable[[str], None]) -> None:
    engine = FakeSpeechClient()
    engine.n_frames = 40
    with served(make_speech_app(engine)) as url:
        Page(driver, SimpleNamespace(url=url, api_key=""))  # type: ignore[arg-type]
        page = SpeechPage(driver, url)
        wait_for(lambda: page.is_shown("#speak") and page.all("#say [name=voice] option"))
        page.say("Every boat needs a captain.")
        page.said()
        shot("speech")
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", PHONE)
        shot("phone-speech")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cost", "screens"])
    parser.add_argument("directory", type=Path, nargs="?", default=Path("build/page"))
    asked = parser.parse_args()
    cost() if asked.what == "cost" else screens(asked.directory)


if __name__ == "__main__":
    main()
