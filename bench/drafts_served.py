"""What drafts bring over HTTP, with a model's own head: `python -m bench.drafts_served [MODEL] [--out DIR]`.

Two servers of a model, one without drafts, answer stories, sums and calls of tools, one request after the
other, greedy and at temperature 0.8. They take turns, and must give the same answers. Told are the tokens a
second of decoding, by the server's own clock, and how many guesses were right, by their place in the draft.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deltic.bench.provenance import code, machine, now
from deltic.commands.endpoint import Endpoint, LocalServer, model_name

ANIMALS = ("fox", "hedgehog", "owl", "otter", "badger", "mouse")
CITIES = ("Paris", "Oslo", "Rome", "Berlin", "Madrid", "Lisbon")
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
WORK: dict[str, Callable[[int], dict[str, Any]]] = {
    "stories": lambda i: {"content": f"Write a {200 + i}-word story about a {ANIMALS[i % 6]}."},
    "sums": lambda i: {"content": f"What is {11 + 7 * i % 43} plus {13 + 5 * i % 41}?", "enable_thinking": True},
    "tools": lambda i: {"content": f"Tell me the weather in {CITIES[i % 6]}" + "!" * (i // 6), "tools": [WEATHER]},
}
"""What is asked, by its number: another prompt each time, so that no answer comes from the prefix cache."""
TEMPERATURES = (0.0, 0.8)


async def ask(endpoint: Endpoint, model: str, work: dict[str, Any], seed: int, temperature: float) -> dict[str, Any]:
    """One answer."""
    body = {key: value for key, value in work.items() if key != "content"}
    body |= {"model": model, "messages": [{"role": "user", "content": work["content"]}], "max_tokens": 600}
    status, answer = await endpoint.json(
        "POST", "/v1/chat/completions", body | {"seed": seed, "temperature": temperature}
    )
    if status != 200:
        raise SystemExit(f"{status}: {answer}")
    found: dict[str, Any] = answer
    return found


async def drafted(endpoint: Endpoint) -> Counter[str]:
    """The server's counters of drafts, by what and position."""
    text = (await (await endpoint.open("GET", "/metrics")).read()).decode()
    found = re.findall(
        r'^deltic_(accepted_)?draft_tokens_total{model="[^"]*",position="(\d+)"} (\S+)$', text, re.MULTILINE
    )
    return Counter({f"{kind or 'all_'}{position}": int(float(n)) for kind, position, n in found})


async def run(given: argparse.Namespace) -> list[dict[str, Any]]:
    model = [given.model] if given.model else []
    servers = [
        LocalServer([*model, *given.serve_args.split(), "--max-drafts", str(most)]) for most in (0, given.max_drafts)
    ]
    try:
        plain, drafting = [await server.wait_ready() for server in servers]
        name, rows = await model_name(plain), []
        for kind, make in WORK.items():
            for temperature in TEMPERATURES:
                before, rates, n_tokens = await drafted(drafting), dict[Endpoint, list[float]](), 0
                for i in range(given.requests):
                    work, said, order = make(i), dict[Endpoint, Any](), [plain, drafting]
                    for endpoint in order[:: 1 - 2 * (i % 2)]:
                        answer = await ask(endpoint, name, work, i, temperature)
                        usage = answer["usage"]
                        n = usage["completion_tokens"] - 1
                        rates.setdefault(endpoint, []).append(n / max(1e-4, usage["timing"]["decode_ms"] / 1e3))
                        message = answer["choices"][0]["message"]
                        calls = [call["function"] for call in message.get("tool_calls") or ()]
                        said[endpoint] = message["content"], message.get("reasoning_content"), calls
                    n_tokens += n
                    assert said[plain] == said[drafting], f"drafts changed an answer: {said}"
                after = await drafted(drafting) - before
                places = sorted({int(key.rpartition("_")[2]) for key in after})
                right = {
                    str(p): round(after[f"accepted_{p}"] / after[f"all_{p}"], 3) for p in places if after[f"all_{p}"]
                }
                ratios = [b / a for a, b in zip(rates[plain], rates[drafting], strict=True)]
                rows.append({
                    "what": kind, "temperature": temperature, "answers": len(ratios), "tokens": n_tokens,
                    "plain_tok_s": round(statistics.median(rates[plain]), 1),
                    "drafts_tok_s": round(statistics.median(rates[drafting]), 1),
                    "times": round(statistics.median(ratios), 3), "least": round(min(ratios), 3), "most": round(max(ratios), 3),
                    "right": right, "drafted": sum(n for key, n in after.items() if key.startswith("all_")),
                })  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
        return rows
    finally:
        for server in servers:
            server.stop()


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("model", nargs="?", help="what to serve (default: the built-in model)")
    flags.add_argument("--requests", type=int, default=24, help="of each kind and temperature")
    flags.add_argument("--max-drafts", type=int, default=8, metavar="TOKENS", help="of the server with drafts")
    flags.add_argument("--serve-args", default="", help="more flags for deltic serve, in one string")
    flags.add_argument("--out", type=Path, metavar="DIR", help="keep the result in this directory, as JSON")
    given = flags.parse_args()
    made_by = {"date": now().isoformat(), "model": given.model or "built-in", "machine": machine(), "code": code()}
    rows = asyncio.run(run(given))
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        found = {"bench": "drafts served", **made_by, "max_drafts": given.max_drafts, "rows": rows}
        (given.out / "drafts-served.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
