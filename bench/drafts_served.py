"""What drafts bring over HTTP, with a model's own heads: `python -m bench.drafts_served [MODEL] [--out DIR]`.

Servers of a model, one without drafts, one with its draft head (MTP), and with --draft-model one with a block
drafter, answer stories, sums and calls of tools, one request after the other, greedy and at temperature 1.
They take turns, and must give the same answers. Told are the tokens a second of answers, by the server's own
clock, how many guesses were right, by their place in the draft, and how many a draft.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
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
TEMPERATURES = (0.0, 1.0)
PLAIN, MTP, BLOCK = "no drafts", "MTP", "block drafter"


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


def told(counts: Counter[str]) -> dict[str, Any]:
    """Parts of guesses that were right, by place, and how many a draft. counts: as of `drafted`."""
    n = {int(key.rpartition("_")[2]): n for key, n in counts.items() if key.startswith("all_") and n}
    right = {str(place): round(counts[f"accepted_{place}"] / n[place], 3) for place in sorted(n)}
    n_right = sum(counts[f"accepted_{place}"] for place in n)
    return {"right": right, "drafted": sum(n.values()), "right_a_draft": round(n_right / n[1], 2) if n else 0.0}


async def run(given: argparse.Namespace) -> list[dict[str, Any]]:
    args = [*([given.model] if given.model else []), *given.serve_args.split()]
    drafts = ["--max-drafts", str(given.max_drafts)]
    flags = {PLAIN: ["--max-drafts", "0"], MTP: drafts}
    if given.draft_model:
        flags[BLOCK] = [*drafts, "--draft-model", given.draft_model]
    servers = {name: LocalServer([*args, *own]) for name, own in flags.items()}
    try:
        endpoints = {name: await server.wait_ready() for name, server in servers.items()}
        model, rows = await model_name(endpoints[PLAIN]), []
        for (kind, make), temperature in itertools.product(WORK.items(), TEMPERATURES):
            before = {name: await drafted(endpoint) for name, endpoint in endpoints.items()}
            rates, n_tokens = {name: list[float]() for name in endpoints}, 0
            for i in range(given.requests):
                said, order = dict[str, Any](), [*endpoints]
                for name in order[i % len(order) :] + order[: i % len(order)]:
                    answer = await ask(endpoints[name], model, make(i), i, temperature)
                    usage = answer["usage"]
                    n = usage["completion_tokens"] - 1
                    rates[name].append(n / usage["timing"]["total_ms"] * 1e3)
                    message = answer["choices"][0]["message"]
                    calls = [call["function"] for call in message.get("tool_calls") or ()]
                    said[name] = message["content"], message.get("reasoning_content"), calls
                n_tokens += n
                assert all(one == said[PLAIN] for one in said.values()), f"drafts changed an answer: {said}"
            for name in [*endpoints][1:]:
                ratios = [b / a for a, b in zip(rates[PLAIN], rates[name], strict=True)]
                rows.append({
                    "what": kind, "temperature": temperature, "guesses": name, "answers": len(ratios), "tokens": n_tokens,
                    "plain_tok_s": round(statistics.median(rates[PLAIN]), 1),
                    "drafts_tok_s": round(statistics.median(rates[name]), 1),
                    "times": round(statistics.median(ratios), 3), "least": round(min(ratios), 3), "most": round(max(ratios), 3),
                } | told(await drafted(endpoints[name]) - before[name]))  # fmt: skip
                print(json.dumps(rows[-1]), flush=True)
        return rows
    finally:
        for server in servers.values():
            server.stop()


def parser(about: str | None, n_requests: int, max_drafts: int) -> argparse.ArgumentParser:
    """Makes the flags that benches of heads share, with these defaults."""
    flags = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("model", nargs="?", help="default: the built-in model")
    flags.add_argument("--draft-model", metavar="HEAD", help="a block drafter of the model, to compare as well")
    flags.add_argument("--requests", type=int, default=n_requests, help="of each kind and temperature")
    flags.add_argument("--max-drafts", type=int, default=max_drafts, metavar="TOKENS", help="where there are drafts")
    flags.add_argument("--out", type=Path, metavar="DIR", help="keep the result in this directory, as JSON")
    return flags


def keep(name: str, given: argparse.Namespace, measure: Callable[[argparse.Namespace], list[Any]]) -> None:
    """Measures rows, and keeps them in a file of this name where the flags ask for one."""
    found = {"bench": name.replace("-", " "), "date": now().isoformat(), "model": given.model or "built-in"}
    found |= {"machine": machine(), "code": code(), "max_drafts": given.max_drafts}
    rows = measure(given)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        found |= {"load": os.getloadavg()[0], "rows": rows}
        (given.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    flags = parser(__doc__, 24, 8)
    flags.add_argument("--serve-args", default="", help="more flags for deltic serve, in one string")
    keep("drafts-served", flags.parse_args(), lambda given: asyncio.run(run(given)))


if __name__ == "__main__":
    main()
