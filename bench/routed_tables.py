"""The tables of docs/many-machines.md, from the runs that are kept."""

from __future__ import annotations

from itertools import groupby
from statistics import median

from bench.kept import Run, Runs, grid, missing, ranged, source

NAMES = {"sglang": "SGLang's gateway", "ray": "Ray Serve", "nginx": "nginx", "haproxy": "HAProxy"}


MODELS = ("built-in", "qwen3.5-0.8b")


def _of_each(runs: Runs, what: str) -> list[Run]:
    """The newest of each router and model, with the others of its directory and commit."""
    of = [(router, model) for model in MODELS for router in NAMES]
    return [run for router, model in of for run in runs.newest(f"routed-{what}-{router}-{model}-*.json")]


def trace(runs: Runs) -> str:
    """How much of an agent trace is reused behind a router."""
    again = "python -m bench.routed trace --router sglang --sessions 8 --turns 20 --rounds 3"
    found, rows = _of_each(runs, "trace"), []
    if not found:
        return missing(again)
    for run in found:
        data = run.data
        one, routed = ([r for r in data["runs"] if bool(r["router"]) == is_routed] for is_routed in (False, True))
        model = data["dummy"] + (f", {data['quantize']}" if data["quantize"] else "") if data["dummy"] else "built-in"
        cells = [f"{100 * median(r['reuse'] for r in of):.1f} %" for of in (one, routed)]
        cells += [f"{100 * median(r['of_one'] for r in routed):.1f} %"]
        cells += [ranged([1e3 * r["ttft_p50_s"] for r in of]) for of in (one, routed)]
        rows.append([NAMES[data["router"]], str(data["replicas"]), model, *cells])
    header = ["router", "servers", "model", "one server reuses", "the servers reuse", "of that"]
    header += ["time to first token, p50, ms, one server", "behind the router"]
    return "\n\n".join((grid(header, rows), source(found, again)))


def overhead(runs: Runs) -> str:
    """What a router costs."""
    again = "python -m bench.routed overhead --router sglang --rounds 5"
    found, rows = _of_each(runs, "overhead"), []
    if not found:
        return missing(again)
    for run in found:
        by_n = groupby(sorted(run.data["rows"], key=lambda row: row["n"]), key=lambda row: row["n"])
        for n, of in ((n, list(of)) for n, of in by_n):
            ways = {way: [row for row in of if row["way"] == way] for way in ("direct", "routed")}
            rates = {way: [row["output_tok_s"] for row in rows] for way, rows in ways.items()}
            first = {way: [row["ttft_ms"]["p50"] for row in rows] for way, rows in ways.items()}
            ratio = [routed / direct for direct, routed in zip(rates["direct"], rates["routed"], strict=True)]
            cells = [ranged(rates["direct"]), ranged(rates["routed"]), ranged(ratio)]
            rows.append([NAMES[run.data["router"]], str(n), *cells, ranged(first["direct"]), ranged(first["routed"])])
    header = ["router", "requests at once", "tokens/s directly", "through it", "ratio of a round"]
    header += ["time to first token, p50, ms, directly", "through it"]
    data = found[-1].data
    text = (
        f"The built-in model, {data['replicas']} servers with a thread each; prompts of {data['prompt']} tokens, answers of "
        f"{data['output']}. Router, servers and clients share the same cores, so what a router computes is taken from the servers."
    )
    return "\n\n".join((grid(header, rows), text, source(found, again)))


def soak(runs: Runs) -> str:
    """What a soak through a router saw."""
    again = "python -m bench.routed soak --router sglang --minutes 30"
    found = _of_each(runs, "soak")
    if not found:
        return missing(again)
    rows = []
    for run in found:
        data = run.data
        lost = ", ".join(f"{n} {how}" for how, n in data["lost"].items()) or "none"
        kills = [sum(kill["what"] == what for kill in data["kills"]) for what in ("replica", "engine")]
        used = ranged([kill["used_s"] for kill in data["kills"] if kill["used_s"] is not None])
        cells = [f"{data['minutes']:.0f}", f"{data['requests']:,}", f"{kills[0]}, {kills[1]}", lost]
        rows.append(
            [NAMES[data["router"]], *cells, str(len(data["rolling_restarts"])), str(len(data["violations"])), used]
        )
    header = ["router", "minutes", "requests", "servers killed, engines killed", "requests lost to kills"]
    header += [
        "rolling restarts",
        "requests lost to them, and other broken promises",
        "s until a server was used again",
    ]
    return "\n\n".join((grid(header, rows), source(found, again)))


def shared(runs: Runs) -> str:
    """What servers that share a disk saw."""
    again = "python -m bench.shared_tier"
    found = [run for model in MODELS for run in runs.newest(f"shared-tier-{model}.json")]
    if not found:
        return missing(again)
    rows: list[list[str]] = []
    for run in found:
        model = run.data["arguments"]["dummy"] or "built-in"
        if (same := run.data.get("same")) is not None:
            tokens = f"{same['cached_tokens']:,} of {same['prompt_tokens']:,}; one server alone {same['cached_tokens_alone']:,}"
            rows.append(
                [f"{model}: tokens cached, {same['requests']} requests to {same['servers']} servers in turn", tokens]
            )
            fewer = f"{same['requests_with_fewer']} with fewer than one server alone, {same['requests_with_more']} with more"
            rows.append([f"{model}: of these requests", f"{fewer}, {same['other_answers']} with another answer"])
        if (killed := run.data.get("killed")) is not None:
            what = f"{model}: {killed['requests']:,} requests, {killed['kills']} servers killed while they wrote"
            seen = f"{killed['damaged_files']} damaged files, {killed['other_answers']} other answers"
            rows.append([what, f"{seen}, {killed['found_pages']:,} pages of other servers used"])
            most = f"at most {killed['most_bytes'] / 1e6:.0f} MB, {killed['bytes_at_the_end'] / 1e6:.0f} MB at the end"
            rows.append([f"{model}: on disk, with a budget of {killed['disk_bytes'] / 1e6:.0f} MB", most])
        if (first := run.data.get("first")) is not None:
            times = first["seconds"]
            told = ", ".join(f"{name} {ranged(times[key])} s" for key, name in FIRST.items())
            rows.append([f"{model}: first token of a prompt of {first['tokens']:,} tokens", told])
    return "\n\n".join((grid(["", ""], rows), source(found, again)))


FIRST = {"computed": "computed", "found": "found by another server", "own disk": "from the server's own disk"}


def events(runs: Runs) -> str:
    """What a router predicts by cache events, and what they cost."""
    predict = "python -m bench.agent --kv-events --memory-share 1,0.25,0.1 --cold-rounds 0"
    cost = "python -m bench.kv_events"
    told = runs.newest("agent-built-in-*.json", where=lambda data: bool(data.get("kv_events")))
    spent = [found[-1] for model in MODELS if (found := runs.newest(f"cache-events-{model}-*.json"))]
    if not told or not spent:
        return missing(predict, cost)
    rows = []
    for run in told[-1].data["runs"]:
        of = run["predictions"]
        over = f"{of['n_over']} ({of['over_tokens']:,} tokens)"
        rows.append([run["label"], str(run["n_requests"]), str(of["n_exact"]), over, str(of["n_under"])])
    header = ["memory", "requests", "predicted exactly", "too much", "too little"]
    costs = []
    for data in (run.data for run in spent):
        share = data["tell_us_a_step"] / data["step_ms"] / 10
        low, _, high = data["ratio_quartiles"]
        costs.append(
            f"{data.get('dummy') or 'the built-in model'}: {data['tell_us_a_step']:.1f} us of the engine's thread in a step of "
            f"{data['step_ms']:.2f} ms ({share:.2f} %); CPU time of all steps with events over without {data['ratio']:.3f}, "
            f"quartiles {low:.3f} and {high:.3f}"
        )
    block = spent[-1].data["block"]
    text = (
        "A replica of llm-d's index reads the events of the agent trace and predicts what each request will find. "
        f"The cost: {'; '.join(costs)}. A block that comes and goes takes the engine's thread {block['events_us']:.1f} us and the "
        f"publisher's {block['encode_us']:.1f}."
    )
    return "\n\n".join((grid(header, rows), text, source([told[-1], *spent], predict, cost)))


def stages(runs: Runs) -> str:
    """One model on two machines beside one."""
    again = "python -m bench.stages --quantize int8"
    found = runs.newest("stages-*.json")
    if not found:
        return missing(again)
    rows, data = [], found[-1].data
    for (n, prompt, answer), of in groupby(data["rows"], lambda row: (row["n"], row["prompt"], row["answer"])):
        each, kind = list(of), "step" if answer > 1 else "prompt"
        what = f"a token of each of {n}" if answer > 1 else f"a prompt of {prompt} tokens"
        alone, staged = ([row[side][f"{kind}_ms"] for row in each] for side in ("alone", "staged"))
        more = [two - one for one, two in zip(alone, staged, strict=True)]
        n_bytes = median(row["staged"][f"{kind}_bytes"] for row in each) / (n if answer > 1 else prompt)
        rows.append([what, ranged(alone), ranged(staged), ranged(more), f"{n_bytes:,.0f}"])
    header = ["", "one machine, ms", "two, ms", "more, ms, of a pair", "bytes a token"]
    text = (
        f"{data['shape']} in {data['quantize'] or 'bfloat16'}, a thread a machine; machines are network namespaces of one, joined by a "
        f"link. It was not quiet: load {data['load']:.1f} at the end. Both drew the same tokens."
    )
    return "\n\n".join((grid(header, rows), text, source([found[-1]], again)))
