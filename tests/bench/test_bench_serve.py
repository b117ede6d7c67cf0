"""The load generator against a fake endpoint: what it sends, what it computes, how it fails."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import io
import json
import random
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.soak.soak import Soak
from deltic.__main__ import main
from deltic.bench import load as loads
from deltic.bench.gauges import gauges
from deltic.bench.load import Prompts, Sample, Workload, percentile, summary
from deltic.commands.endpoint import Endpoint, EndpointError, EventSplitter
from tests.fake_openai import FakeOpenAI

pytest.importorskip("msgspec")


@given(st.lists(st.text("ab{}:", max_size=9), max_size=6), st.lists(st.integers(1, 9), max_size=30), st.booleans())
def test_events_do_not_depend_on_where_the_bytes_are_cut(payloads, cuts, crlf):
    end = "\r\n" if crlf else "\n"
    body = "".join(f": comment{end}{end}event: x{end}data: {p}{end}{end}" for p in payloads).encode()
    splitter, got, at = EventSplitter(), [], 0
    for cut in [*cuts, len(body)]:
        got += splitter.feed(body[at : at + cut])
        at += cut
    assert got == [p.encode() for p in payloads]


def test_pictures_of_a_load() -> None:
    pytest.importorskip("PIL")
    from PIL import Image

    load = Workload("fake", kind="chat", images=2, image_size="70x50")
    prompts = Prompts(load)
    first, second = prompts.images(), prompts.images()
    assert len({*first, *second}) == 4
    with Image.open(io.BytesIO(base64.b64decode(first[0].partition(",")[2]))) as image:
        assert image.size == (70, 50)
    same = Prompts(dataclasses.replace(load, same_images=True))
    assert same.images() == same.images()
    (message,) = loads.Dialect().body(load, "what?", 4, first)["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url", "image_url", "text"]
    assert loads.Dialect().body(load, "what?", 4)["messages"] == [{"role": "user", "content": "what?"}]
    for wrong in ("70", "70x", "x50", "0x50", "7.0x5"):
        with pytest.raises(ValueError, match="expected WxH"):
            loads.sides_of(wrong)


def test_percentiles_are_linear_between_ranks():
    assert percentile([], 50) is None
    assert percentile([7.0], 99) == 7.0
    assert percentile([3, 1, 2, 4], 50) == 2.5
    assert percentile(range(101), 95) == 95


def test_summary_counts_failed_requests_but_not_their_times():
    good = Sample(0.0, e2e_s=1.1, ttft_s=0.1, itl_ms=[100.0] * 10, n_prompt=20, n_output=11)
    row = summary([good, Sample(0.0, e2e_s=9.0, error="HTTP 500")], seconds=2.0)
    assert (row["requests"], row["errors"]) == (2, 1)
    assert row["decode_tok_s"] == pytest.approx(10.0)
    assert (row["output_tok_s"], row["prompt_tok_s"]) == (5.5, 10.0)
    assert row["ttft_ms"]["p99"] == 100.0
    assert row["e2e_s"]["p99"] == 1.1


def test_sweep_keeps_n_in_flight_and_writes_what_it_saw(tmp_path: Path, capsys):
    with FakeOpenAI(token_s=0.002) as server:
        arguments = f"bench serve --url {server.url}/v1 --n 1,4 --requests-per-n 8 --prompt-tokens 40".split()
        status = main([*arguments, "--output-tokens", "6", "--label", "a b", "--out", str(tmp_path)])
    assert status == 0
    assert server.max_open == 4
    out = capsys.readouterr().out
    last = json.loads(out.splitlines()[-1])
    result = json.loads(Path(last["file"]).read_text())
    assert "ITL is the time between events" in out and result["itl"] in out
    assert [row["value"] for row in result["rows"]] == [1, 4]
    for row in result["rows"]:
        assert (row["requests"], row["errors"], len(row["samples"])) == (8, 0, 8)
        assert row["mean_output_tokens"] == 6
        assert row["mean_prompt_tokens"] == pytest.approx(40, abs=1)
        assert all(len(sample["itl_ms"]) == 5 for sample in row["samples"])
        assert row["itl_ms"]["p50"] >= 1.5
    assert result["machine"]["cores"] >= 1
    assert Path(last["plot"]).stat().st_size > 10_000
    measured = [body for body in server.bodies if body.get("max_tokens") == 6]
    assert len({body["prompt"] for body in measured}) == 16 + 5, "warm-ups too: every prompt is its own"
    assert all(body["ignore_eos"] and body["temperature"] == 1.0 for body in measured)


def test_the_same_seed_asks_the_same_and_prefixes_are_shared():
    async def prompts(seed: int) -> list[str]:
        with FakeOpenAI() as server:
            source = Prompts(Workload("fake", prompt_tokens=60, shared_prefix_tokens=40, kind="chat", seed=seed))
            await source.calibrate(Endpoint(server.url))
            return [source.text() for _ in range(3)]

    one, again, other = (asyncio.run(prompts(seed)) for seed in (1, 1, 2))
    assert one == again != other
    assert len({tuple(text.split()[:40]) for text in one}) == 1
    assert len({tuple(text.split()[40:]) for text in one}) == 3
    assert all(len(text.split()) == 55 for text in one), "the template's five tokens are counted in"


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_a_server_that_refuses_extensions_is_measured_without_them(kind):
    async def run() -> Sample:
        endpoint, load = Endpoint(server.url), Workload("fake", kind=kind)
        dialect = await loads.find_dialect(endpoint, load)
        assert (dialect.ignore_eos, dialect.include_usage, dialect.limit) == (False, False, "max_completion_tokens")
        return await loads.measure(endpoint, load, dialect.body(load, "hi", 7), 0.0)

    with FakeOpenAI(refused=("ignore_eos", "stream_options", "max_tokens")) as server:
        sample = asyncio.run(run())
    assert (sample.error, sample.n_output, sample.finish_reason) == (None, 7, "length")


def test_failures_are_rows_not_crashes(tmp_path: Path, capsys):
    with FakeOpenAI() as server:
        arguments = f"bench serve --url {server.url} --n 1 --requests-per-n 4 --warmup 0".split()
        server.statuses = [200] * 8 + [500, -1, -1, 429]  # a dropped kept connection is tried once more
        status = main([*arguments, "--output-tokens", "3", "--no-plot", "--out", str(tmp_path)])
    assert status == 1
    row = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][0]
    assert (row["requests"], row["errors"]) == (4, 3)


def test_an_answer_of_another_length_is_no_measurement():
    load = Workload("fake", output_tokens=8)

    async def error(ignore_eos: bool, include_usage: bool = True) -> str | None:
        with FakeOpenAI(most_words=5) as server:
            body = loads.Dialect(ignore_eos, include_usage).body(load, "hello", load.output_tokens)
            return (await loads.measure(Endpoint(server.url), load, body, 0.0)).error

    assert asyncio.run(error(True)) == "an answer of 8 tokens ended after 5, as 'stop'"
    assert asyncio.run(error(True, include_usage=False)) is not None
    assert asyncio.run(error(False)) is None, "it may end by itself"


def test_a_request_ends_at_done():
    """The finish chunk, the usage and [DONE] come after the last text, each 0.05 s after the one before."""

    async def run() -> Sample:
        endpoint, load = Endpoint(server.url), Workload("fake")
        return await loads.measure(endpoint, load, loads.Dialect().body(load, "hi", 2), 0.0)

    with FakeOpenAI(token_s=0.05) as server:
        sample = asyncio.run(run())
    assert sample.ttft_s is not None
    assert sample.e2e_s >= sample.ttft_s + sum(sample.itl_ms) / 1e3 + 3 * 0.045


def soak(n_rows: int, bytes_per_request: float, requests_per_row: int = 2000) -> Soak:
    """A soak of an hour that is over, with memory that wavers by 2 MB and grows with the requests."""
    noise = random.Random(1)
    run = Soak.__new__(Soak)
    run.begin, run.violations, run.memory = time.monotonic() - 3600, [], []
    for i in range(n_rows):
        n = i * requests_per_row
        size = int(1e8 + noise.uniform(0, 2e6))
        row = {"server": size + int(bytes_per_request * n), "engine": size, "engine_pid": 7, "requests": n}
        run.memory.append(row)
    return run


def test_a_leak_of_a_kilobyte_a_request_breaks_the_soak():
    leaky, flat = soak(20, 1000.0), soak(20, 0.0)
    growth = leaky.check_memory()
    assert growth["server"]["mb_per_1000_requests"] == pytest.approx(1.0, abs=0.2)
    assert len(leaky.violations) >= 1
    assert all("server" in violation for violation in leaky.violations)
    assert flat.check_memory()["server"]["mb_per_1000_requests"] == pytest.approx(0.0, abs=0.2)
    assert flat.violations == []
    few = soak(20, 1000.0, requests_per_row=10)
    few.check_memory()
    assert few.violations == [], "200 requests show nothing beside the noise"


@pytest.mark.parametrize(("n_restarts", "n_violations"), [(2.0, 0), (1.0, 1), (3.0, 1)])
def test_restarts_that_are_no_kills_break_the_soak(n_restarts, n_violations):
    run = soak(0, 0.0)
    run.recoveries_s, run.gauges = ([0.4, 0.5], gauges(f'deltic_engine_restarts_total{{model="m"}} {n_restarts}\n'))
    run.check_restarts()
    assert len(run.violations) == n_violations


def test_an_unreachable_server_is_one_line(capsys, tmp_path: Path):
    assert main(["bench", "serve", "--url", "127.0.0.1:1", "--out", str(tmp_path)]) == 1
    assert "cannot connect" in capsys.readouterr().err
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1", "--n", "1,x"]) == 2
    assert "--n '1,x'" in capsys.readouterr().err


def test_poisson_arrivals_do_not_wait_for_answers(tmp_path: Path, capsys):
    with FakeOpenAI(token_s=0.05) as server:
        arguments = f"bench serve --url {server.url} --poisson 40 --duration 0.5 --warmup 0".split()
        assert main([*arguments, "--output-tokens", "4", "--no-plot", "--out", str(tmp_path)]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"][0]
    assert row["mode"] == "open"
    assert 8 <= row["requests"] <= 40
    assert server.max_open > 4


def test_a_reader_that_goes_away_closes_the_connection():
    async def run() -> None:
        endpoint = Endpoint(server.url)
        reply = await endpoint.open("POST", "/v1/completions", {"prompt": "x", "stream": True, "max_tokens": 10_000})
        async for _ in reply.events():
            break
        reply.close()
        for _ in range(100):
            await asyncio.sleep(0.01)
            if server.n_disconnects:
                return

    with FakeOpenAI(token_s=0.001) as server:
        asyncio.run(run())
        assert server.n_disconnects == 1


def test_a_kept_connection_the_server_closed_is_replaced():
    async def run() -> None:
        endpoint = Endpoint(server.url)
        await endpoint.json("GET", "/v1/models")
        server.statuses = [-1, 200]
        status, _ = await endpoint.json("POST", "/v1/completions", {"prompt": "x"})
        assert status == 200
        server.statuses = [-1, -1, 200]
        with pytest.raises(EndpointError, match="without an answer"):
            await endpoint.json("POST", "/v1/completions", {"prompt": "x"})

    with FakeOpenAI() as server:
        asyncio.run(run())


def test_the_generator_keeps_up_with_a_fast_server():
    """At least 5,000 events a second; the fake server shares the core."""

    async def run() -> tuple[int, float]:
        endpoint, load = Endpoint(server.url), Workload("fake", kind="chat")
        body = loads.Dialect().body(load, "hi", 4000)
        begin = time.process_time()
        samples = await asyncio.gather(*(loads.measure(endpoint, load, body, 0.0) for _ in range(4)))
        assert all(s.error is None and s.n_output == 4000 for s in samples)
        return sum(len(s.itl_ms) for s in samples), time.process_time() - begin

    with FakeOpenAI() as server:
        n_events, cpu_s = asyncio.run(run())
    print(f"{n_events / cpu_s:.0f} events a CPU second, the fake server's work counted in")
    assert n_events / cpu_s > 5000
