"""Score and sample the built-in model: `python -m training.evaluate --weights FILE [--device cuda] [--quick]`.

Prints samples of every kind of prompt (greedy and at temperature 0.7) and a table of scores; `--json FILE` keeps the
scores, `--card FILE` writes the model card with the table put between its two markers. Decoding is the plain
recurrence of `training.model`, not the engine.
"""

import argparse
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from training import chats
from training.animals import ANIMALS
from training.corpus import DEMO, MIX, Corpus, Template
from training.grammar import article
from training.model import Geometry, Hybrid, Projection
from training.rows import LONG_ROW, SHORT_ROW, encode, pack
from training.stories import write_story
from training.tools import Calculator, Weather
from training.train import to_device

MARKERS = ("<!-- scores -->", "<!-- /scores -->")
HELD_OUT_SEED = 9_000_011
SAMPLE_PROMPTS = (
    "Hello!",
    "Who are you?",
    "What can you do?",
    "Tell me a joke.",
    "Tell me a fact about an owl.",
    "What sound does a cow make?",
    "What is the opposite of hot?",
    "What day comes after Tuesday?",
    "What is the capital of France?",
    "Explain quantum physics.",
    "What is 17 + 25?",
    "What is 7 times 8?",
    "Anna has 12 apples and gives away 5. How many apples are left?",
    "Write a 60-word story about a fox.",
    "Tell me a short story about a robot named Bolt.",
    "Write a 200-word story about a penguin.",
)


class Subject:
    """The model under test with its tokenizer and template."""

    def __init__(self, weights: Path, device: torch.device):
        self.device = device
        self.model = Hybrid(Geometry())
        self.model.load_state_dict({n: t.float() for n, t in load_file(weights).items()})
        self.model.to(device).eval()
        self.tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
        self.template = Template()
        self.stops = {self.tokenizer.token_to_id("<|im_end|>"), self.tokenizer.token_to_id("<|endoftext|>")}

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def prompt(
        self, turns: list[chats.Turn], tools: list[dict[str, object]] | None = None, thinking: bool = False
    ) -> str:
        return self.template.render(turns, tools, True, thinking)

    def answers(
        self, prompts: list[str], max_new: int | list[int], temperature: float = 0.0, stop: bool = True
    ) -> list[str]:
        limits = [max_new] * len(prompts) if isinstance(max_new, int) else max_new
        ids = [self.ids(p) for p in prompts]
        out = self.model.generate(ids, limits, self.stops if stop else set(), temperature)
        return [self.tokenizer.decode(o, skip_special_tokens=True) for o in out]


def losses(subject: Subject, n_rows: int) -> dict[str, float]:
    """Mean loss a learned token, by kind, on documents of a seed that training does not use."""
    result = {}
    for kind in MIX:
        corpus = Corpus(HELD_OUT_SEED, 450)
        documents = (encode(corpus.draw(kind), subject.tokenizer) for _ in iter(int, 1))
        rows = pack(documents, SHORT_ROW, subject.tokenizer.token_to_id("<|endoftext|>"))
        batch, targets = to_device(np.stack([next(rows) for _ in range(n_rows)]), subject.device)
        with torch.no_grad():
            loss = subject.model.loss(batch, targets)
        result[kind] = (loss.sum() / (targets >= 0).sum()).item()
    return result


def loss_by_position(subject: Subject, n_stories: int) -> dict[str, float]:
    """Loss of very long plain stories by the position in them: does it rise beyond the trained lengths?"""
    rng, rows = Random(HELD_OUT_SEED), []
    for _ in range(n_stories):
        text = write_story(rng, rng.choice(ANIMALS).noun, 2600).text
        ids = np.array(subject.ids(text)[:LONG_ROW], dtype=np.uint16)
        rows.append(np.pad(ids, (0, LONG_ROW - len(ids)), constant_values=0) | 0x8000)
        rows[-1][0] = ids[0] | 0x4000
        rows[-1][len(ids) :] = 0
    batch, targets = to_device(np.stack(rows), subject.device)
    with torch.no_grad():
        loss = subject.model.loss(batch, targets).view(n_stories, LONG_ROW)
    known = (targets >= 0).view(n_stories, LONG_ROW)
    result = {}
    for a, b in ((0, 512), (512, 1024), (1024, 2048), (2048, 3072), (3072, 3968)):
        if known[:, a:b].any():
            result[f"{a}..{b}"] = (loss[:, a:b].sum() / known[:, a:b].sum()).item()
    return result


def arithmetic_score(subject: Subject, n: int, thinking: bool) -> tuple[float, list[str]]:
    """Share of right final numbers, and the wrong answers."""
    rng = Random(HELD_OUT_SEED)
    cases = [chats.sums(rng) for _ in range(n)]
    words = {"+": "plus", "-": "minus", "*": "times"}
    questions = [f"What is {a} {op if i % 2 else words[op]} {b}?" for i, (op, a, b, _) in enumerate(cases)]
    answers = subject.answers([subject.prompt([chats.ask(q)], thinking=thinking) for q in questions], 80)
    wrong = []
    for question, answer, (_, _, _, c) in zip(questions, answers, cases, strict=True):
        numbers = re.findall(r"-?\d+", answer.split("</think>")[-1])
        if not numbers or int(numbers[-1]) != c:
            wrong.append(f"{question} -> {answer!r}")
    return 1 - len(wrong) / n, wrong


def tool_score(subject: Subject, n: int) -> tuple[dict[str, float], list[str]]:
    """Exact calls (function and every argument), and results that are used in the answer."""
    rng = Random(HELD_OUT_SEED)
    prompts, expected, follow_ups, results = [], [], [], []
    for i in range(n):
        tool = (Weather if i % 2 else Calculator)(rng)
        other = (Calculator if i % 2 else Weather)(rng)
        turns = tool.exchange(rng)
        bare = [{k: v for k, v in t.items() if k != "reasoning_content"} for t in turns]
        bare[1]["content"] = ""
        tools = [tool.schema, other.schema][: 1 + i // 2 % 2]
        prompts.append(subject.prompt(bare[:1], tools))
        whole = subject.template.render(bare[:2], tools, generate=False)
        expected.append(whole[len(prompts[-1]) :].removesuffix("<|im_end|>\n"))
        follow_ups.append(subject.prompt(bare[:3], tools))
        results.append(re.findall(r"-?\d+", str(bare[2]["content"]))[-1])
    answers = subject.answers(prompts, 160)
    wrong = [f"expected {e!r}, got {a!r}" for a, e in zip(answers, expected, strict=True) if _calls(a) != e]
    used = subject.answers(follow_ups, 80)
    n_used = sum(r in re.findall(r"-?\d+", a) for a, r in zip(used, results, strict=True))
    return {"exact": 1 - len(wrong) / n, "used": n_used / n}, wrong


def _calls(answer: str) -> str:
    """The calls of an answer, without the words before them."""
    return answer[answer.index("<tool_call>") :].strip() if "<tool_call>" in answer else answer


def story_scores(subject: Subject, lengths: list[int], n_each: int) -> tuple[dict[int, dict[str, float]], list[str]]:
    """For each asked length: mean words, share that names the animal, share that came to an end, repeated sentences."""
    rng = Random(HELD_OUT_SEED)
    cases = [(n, rng.choice(ANIMALS).noun) for n in lengths for _ in range(n_each)]
    prompts = [subject.prompt([chats.ask(f"Write a {n}-word story about {article(a)}.")]) for n, a in cases]
    limits = [min(int(n * 2.2) + 150, 3300) for n, _ in cases]
    texts = subject.answers(prompts, limits, 0.7)
    scores: dict[int, dict[str, float]] = {}
    for n in lengths:
        mine = [(t, a, m) for t, (k, a), m in zip(texts, cases, limits, strict=True) if k == n]
        sentences = [re.split(r"(?<=[.!?])\s+", t) for t, _, _ in mine]
        scores[n] = {
            "words": sum(len(t.split()) for t, _, _ in mine) / len(mine),
            "on topic": sum(a in t.lower() for t, a, _ in mine) / len(mine),
            "ended": sum(len(subject.ids(t)) < m - 2 for t, _, m in mine) / len(mine),
            "repeated sentences": sum(1 - len(set(s)) / len(s) for s in sentences) / len(mine),
        }
    return scores, [f"[{n} words, {a}]\n{t}" for t, (n, a) in zip(texts, cases, strict=True)][::n_each]


def endurance(subject: Subject, n_tokens: int, n_sequences: int) -> float:
    """Share of known words in the last third of text that is made to go on for `n_tokens` whatever happens."""
    rng = Random(HELD_OUT_SEED + 1)
    known: set[str] = set()
    for _ in range(3000):
        known.update(re.findall(r"[A-Za-z]+", write_story(rng, rng.choice(ANIMALS).noun, 400).text))
    prompts = [
        subject.prompt([chats.ask(f"Write a 1500-word story about {article(a.noun)}.")])
        for a in rng.sample(ANIMALS, n_sequences)
    ]
    n_known = n_all = 0
    for text in subject.answers(prompts, n_tokens, 0.7, stop=False):
        words = re.findall(r"[A-Za-z]+", text[2 * len(text) // 3 :])[1:-1]
        n_known += sum(w in known for w in words)
        n_all += len(words)
    return n_known / max(1, n_all)


def samples(subject: Subject, prompts: tuple[str, ...], max_new: int) -> list[str]:
    rng = Random(3)
    weather, calculator = Weather(rng), Calculator(rng)
    jobs: list[tuple[str, str]] = [(p, subject.prompt([chats.ask(p)])) for p in prompts]
    jobs += [(f"(thinking) {p}", subject.prompt([chats.ask(p)], thinking=True)) for p in prompts[-6:]]
    exchange = weather.exchange(rng)
    calls = (exchange[:1], exchange[:3], calculator.exchange(rng)[:1], weather.pair(rng)[:1], [chats.ask("Hello!")])
    for turns in calls:
        for thinking in (False, True):
            text = str(turns[-1]["content"])
            label = f"(tools{', thinking' if thinking else ''}) {text}"
            jobs.append((label, subject.prompt(turns, [weather.schema, calculator.schema], thinking)))
    memory = [
        chats.ask("My name is Wilma."),
        chats.say("Hello, Wilma! How can I help you?", ""),
        chats.ask("What is my name?"),
    ]
    jobs.append(("My name is Wilma. … What is my name?", subject.prompt(memory)))
    named = [{"role": "system", "content": "You are Zip, a friendly helper."}, chats.ask("Who are you?")]
    jobs.append(("(system: You are Zip, a friendly helper.) Who are you?", subject.prompt(named)))
    jobs.append(("(plain text) Once upon a time, in", "Once upon a time, in"))
    lines = []
    for temperature in (0.0, 0.7):
        for (label, _), answer in zip(jobs, subject.answers([p for _, p in jobs], max_new, temperature), strict=True):
            lines.append(f"[temperature {temperature}] {label}\n    {answer.strip()}")
    return lines


def table(scores: dict[str, Any]) -> str:
    """The scores as a Markdown table."""
    rows = [
        ("sums right, no thinking", f"{scores['arithmetic']:.1%}"),
        ("sums right, thinking", f"{scores['arithmetic, thinking']:.1%}"),
        ("tool calls exact (function and arguments)", f"{scores['tools']['exact']:.1%}"),
        ("tool results used in the answer", f"{scores['tools']['used']:.1%}"),
    ]
    for n, s in scores["stories"].items():
        rows.append((
            f"stories of {n} words: words written · on topic · came to an end · sentences said twice",
            f"{s['words']:.0f} · {s['on topic']:.0%} · {s['ended']:.0%} · {s['repeated sentences']:.1%}",
        ))  # fmt: skip
    rows.append((f"known words in the last third of {scores['endurance tokens']} tokens", f"{scores['endurance']:.1%}"))
    rows += [(f"held-out loss: {kind}", f"{loss:.3f}") for kind, loss in scores["loss"].items()]
    rows += [
        (f"loss of long stories, tokens {span}", f"{loss:.3f}") for span, loss in scores["loss by position"].items()
    ]
    return "\n".join(["| score | value |", "| --- | --- |", *(f"| {a} | {b} |" for a, b in rows)])


def write_card(path: Path, scores: dict[str, Any]) -> None:
    """The card in deltic/demo with its table replaced, written to `path`."""
    card = (DEMO / "README.md").read_text(encoding="utf-8")
    before, _, rest = card.partition(MARKERS[0])
    _, found, after = rest.partition(MARKERS[1])
    if not found:
        raise SystemExit(f"{DEMO / 'README.md'} lacks the lines {MARKERS[0]} and {MARKERS[1]}; put them back")
    path.write_text(f"{before}{MARKERS[0]}\n{table(scores)}\n{MARKERS[1]}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=DEMO / "model.safetensors")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="few and short cases, for a CPU")
    parser.add_argument("--json", type=Path, help="write the scores here")
    parser.add_argument("--card", type=Path, help="write the model card with these scores here")
    given = parser.parse_args()
    start = time.monotonic()
    device = torch.device(given.device)
    Projection.compute_dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.backends.cuda.enable_cudnn_sdp(False)
    subject = Subject(given.weights, device)
    quick = given.quick
    scores: dict[str, Any] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        began = time.monotonic()
        result = work()
        print(f"# {name}: {time.monotonic() - began:.1f} s", flush=True)
        return result

    prompts = SAMPLE_PROMPTS[:: 3 if quick else 1]
    print("\n\n".join(timed("samples", lambda: samples(subject, prompts, 100 if quick else 420))), flush=True)
    n = 40 if quick else 400
    scores["arithmetic"], wrong = timed("sums", lambda: arithmetic_score(subject, n, False))
    scores["arithmetic, thinking"], more = timed("sums, thinking", lambda: arithmetic_score(subject, n, True))
    scores["tools"], bad_calls = timed("tools", lambda: tool_score(subject, 20 if quick else 200))
    lengths = [50, 100] if quick else [50, 100, 200, 400, 800, 1500]
    scores["stories"], texts = timed("stories", lambda: story_scores(subject, lengths, 2 if quick else 12))
    scores["endurance tokens"] = 200 if quick else 3000
    scores["endurance"] = timed("endurance", lambda: endurance(subject, scores["endurance tokens"], 2 if quick else 8))
    scores["loss"] = timed("losses", lambda: losses(subject, 2 if quick else 16))
    scores["loss by position"] = timed("long losses", lambda: loss_by_position(subject, 1 if quick else 8))
    print("\n\n".join(["", *texts]))
    print("\nwrong sums and calls:\n" + "\n".join([*wrong[:8], *more[:8], *bad_calls[:8]]))
    print(f"\n{table(scores)}\n\n{time.monotonic() - start:.0f} s")
    if given.json:
        given.json.write_text(json.dumps(scores, indent=1) + "\n", encoding="utf-8")
    if given.card:
        write_card(given.card, scores)


if __name__ == "__main__":
    main()
