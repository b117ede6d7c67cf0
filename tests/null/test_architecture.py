"""The documents about the code can be read and are true: short lines and paragraphs; files, classes and methods that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAPS = [ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/design/*.md"))]
"""The documents about the code."""
MAX_COLUMNS = 140
MAX_WORDS = 80
MAX_LINES = 180


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def without_code(text: str) -> str:
    """The text without what stands between fences."""
    return re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)


def paragraphs(text: str) -> Iterator[str]:
    """Paragraphs and items of lists; no headings, tables or code."""
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", without_code(text)):
        if paragraph.strip() and not re.match(r"\s*[|#]|    ", paragraph):
            yield paragraph.strip()


def expanded(name: str) -> Iterator[str]:
    """The names that `a/{b,c}` stands for."""
    if found := re.fullmatch(r"(.*?)\{([^{}]*)\}(.*)", name):
        for choice in found[2].split(","):
            yield from expanded(found[1] + choice + found[3])
    else:
        yield name


def named_files(text: str) -> Iterator[str]:
    """What stands between backticks and is the name of a file or a folder, by its slash or its ending."""
    for name in re.findall(r"`([\w./*{},-]+)`", without_code(text)):
        if re.search(r"\w/|\.(?:py|md|cpp|h|html)$", name) and not name.startswith(("/", "-")):
            yield from expanded(name)


def is_there(name: str) -> bool:
    """Whether there is such a file or folder in the repository or in the package, or, of a bare name, anywhere in them."""
    roots, ways = (ROOT, ROOT / "deltic"), (name, f"{name}.py")
    if "/" in name:
        return any(any(root.glob(way)) for root in roots for way in ways)
    folders = (ROOT / "deltic", ROOT / "tests", ROOT / "bench")
    return (ROOT / name).exists() or any(any(folder.rglob(name)) for folder in folders)


@pytest.mark.parametrize("path", [*MAPS, *sorted(ROOT.glob("docs/log/*.md"))], ids=relative)
def test_lines_fit_a_screen(path: Path) -> None:
    lines = without_code(path.read_text()).splitlines()
    long = [line for line in lines if len(line) > MAX_COLUMNS and (path in MAPS or not line.startswith("|"))]
    assert not long, f"{path.name}: over {MAX_COLUMNS} columns: {long[:3]}"


@pytest.mark.parametrize("path", MAPS, ids=relative)
def test_paragraphs_are_short(path: Path) -> None:
    long = [p[:60] for p in paragraphs(path.read_text()) if len(p.split()) > MAX_WORDS]
    assert not long, f"{path.name}: paragraphs over {MAX_WORDS} words: {long}"


def test_the_map_is_one_page() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text().splitlines()) <= MAX_LINES


PLACES = {
    "the chat template": ("`server/chat/template.py`", "server/chat/template.py", "class ChatTemplate"),
    "the rule of eviction": ("`Tier.victim` (`tree.py`)", "engine/cache/tree.py", "def victim"),
    "attention on a GPU": (
        "`ops/gpu/` (a file an operator: `attention_decode.py`)",
        "ops/gpu/attention_decode.py",
        "softmax",
    ),
    "a metric": (
        "A number of `/metrics`? | `config.py`; `flags.toml`; `engine/events.py`",
        "engine/events.py",
        "counter(",
    ),
    "a flag": ("Is it a flag?", "config.py", "knob("),
    "the name of a tensor": ("the name of a tensor", "models/qwen/weights.py", "linear_attn."),
    "the memory of the vocoder": ("`vocoder.py` of a device has the memory", "runtime/cpu/vocoder.py", "state"),
    "the order of API keys": (
        "`engine/admission.py` has the order of API keys",
        "engine/admission.py",
        "def take_turn",
    ),
    "the order of an answer's keys": ("A schema's grammar?", "server/chat/grammar.py", "def json_rule"),
    "where a draft model is refused": ("refuse a draft model? |", "runtime/build.py", "def find_drafter"),
    "the name of a tensor in GGUF": ("(GGUF: `gguf_tensors.py`)", "models/gguf_tensors.py", "ssm_"),
    "a flag of a command": ("Of a command alone?", "commands/flags.toml", "--"),
    "where a draft is refused": ("(`Chunk.accepted`, `engine/step.py`)", "engine/step.py", "def accepted"),
    "the bound on a picture": ("Does it bound one picture", "server/chat/pictures.py", "MAX_PICTURE_BYTES ="),
}
"""What a new reader looks for: what the map says of it, the file that this means, and what stands there."""


@pytest.mark.parametrize("what", PLACES)
def test_the_map_leads_there(what: str) -> None:
    said, file, there = PLACES[what]
    assert said in " ".join((ROOT / "ARCHITECTURE.md").read_text().split())
    assert there in (ROOT / "deltic" / file).read_text()


def test_the_glossary_is_short() -> None:
    """A word of the house is one that a reader has to learn."""
    rows = (ROOT / "ARCHITECTURE.md").read_text().partition("## Words\n")[2].partition("##")[0].strip().splitlines()[2:]
    words = [word for row in rows for word in row.split("|")[1::2] if word.strip()]
    assert 0 < len(words) <= 20, words


@pytest.mark.parametrize("path", MAPS, ids=relative)
def test_named_files_exist(path: Path) -> None:
    missing = sorted({name for name in named_files(path.read_text()) if not is_there(name)})
    assert not missing, f"{path.name}: no such files: {missing}"


@cache
def classes() -> dict[str, tuple[set[str], set[str]]]:
    """The names of the bases and of the members of each class of the package; of those that share a name, of all."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for path in sorted((ROOT / "deltic").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef):
                continue
            bases, members = found.setdefault(node.name, (set(), set()))
            bases |= {name.id for base in node.bases for name in ast.walk(base) if isinstance(name, ast.Name)}
            members |= {n.name for n in ast.walk(node) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
            members |= {
                n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
            }
            members |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    return found


def has_member(owner: str, name: str) -> bool:
    bases, members = classes().get(owner, (set(), set()))
    return name in members or any(has_member(base, name) for base in bases)


@pytest.mark.parametrize("path", MAPS, ids=relative)
def test_named_classes_and_methods_exist(path: Path) -> None:
    """`Class.name`, also in a chain of them: there is such a class, and it or a base of it has such a method or field."""
    spans = " ".join(re.findall(r"`([^`\n]+)`", without_code(path.read_text())))
    for owner, name in re.findall(r"(?<![\w.])([A-Z][a-z]\w+)\.([a-z_]\w*)(?!\.?\w)", spans):
        assert has_member(owner, name), f"{path.name}: no {owner}.{name}"


@cache
def names_in_the_code() -> set[str]:
    """The words of all sources, and the names of their files."""
    paths = [path for top in ("deltic", "bench", "training", "tests") for path in (ROOT / top).rglob("*")]
    files = [path for path in paths if path.suffix in (".py", ".cpp", ".h")]
    texts = [path.read_text() for path in (*files, ROOT / "Makefile", ROOT / "CMakeLists.txt", ROOT / "pyproject.toml")]
    return {path.stem for path in paths} | {word for text in texts for word in re.findall(r"[A-Za-z]\w*", text)}


@pytest.mark.parametrize("path", MAPS, ids=relative)
def test_names_in_the_map_are_those_of_the_code(path: Path) -> None:
    spans = re.findall(r"`([^`\n]+)`", without_code(path.read_text()))
    named = " ".join(span for span in spans if not span.startswith(".") and not set(span) & set("*<"))
    gone = set(re.findall(r"[A-Za-z]\w*", named)) - names_in_the_code()
    assert not gone, f"{path.name}: nothing has these names: {sorted(gone)}"


@pytest.mark.parametrize("path", MAPS, ids=relative)
def test_names_are_in_the_files_that_are_named_with_them(path: Path) -> None:
    """A name with a file behind it, "`name` (`file.py`" or "`name` in `file.py`", is in that file."""
    pairs = re.findall(r"`([\w.]+)`,?\s+(?:\(|in )`([\w/]+\.py)`", without_code(path.read_text()))
    for name, file in [(name, file) for name, file in pairs if not name.endswith(".py")]:
        found = [each for top in ("deltic", "tests", "bench") for each in (ROOT / top).rglob(Path(file).name)]
        texts = [each.read_text() for each in found if each.as_posix().endswith(f"/{file}")]
        assert any(re.search(rf"\b{name.rpartition('.')[2]}\b", text) for text in texts), f"{name} is not in {file}"


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/design/*.md")), ids=relative)
def test_a_page_of_the_design_names_its_files_and_tests(path: Path) -> None:
    text = path.read_text()
    assert re.search(r"^\*\*Files[:.]\*\*", text, re.M) and re.search(r"^\*\*Tests[:.]\*\*", text, re.M)


# Who knows of speech.

SPEECH = re.compile(
    r"deltic\.(models\.(tts|vocoder)|server\.speech|engine\.stage|runtime\.(speaking|voices|encoded|\wpu\.(speech\w*|vocoder))"
    r"|ops\.(cpu\.(speech|vocoder)|gpu\.(conv|frames|vocode))|commands\.say|bench\.speech)\b"
)
"""Modules that serve speech alone."""
KNOW_SPEECH = {
    "commands/plan.py",
    "engine/engine.py",
    "models/checkpoint.py",
    "runtime/build.py",
    "runtime/cpu/buffers.py",
    "runtime/cpu/device.py",
    "runtime/gpu/buffers.py",
    "runtime/gpu/collect.py",
    "runtime/gpu/device.py",
    "runtime/model.py",
    "runtime/plan.py",
    "server/app.py",
    "server/serve.py",
    "server/service.py",
}
"""Files that import them and serve texts, too. docs/design/speech.md says why; the set only shrinks."""


def modules_in(tree: ast.Module) -> Iterator[str]:
    """The full names of what a file imports, inside functions as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_few_files_know_of_speech() -> None:
    knowing = set()
    for path in (ROOT / "deltic").rglob("*.py"):
        name = path.relative_to(ROOT / "deltic")
        if not SPEECH.match(".".join(("deltic", *name.with_suffix("").parts))):
            knowing |= {str(name) for module in modules_in(ast.parse(path.read_text())) if SPEECH.match(module)}
    assert knowing <= KNOW_SPEECH, f"these are to ask a Kind, or `SpeechParts`: {sorted(knowing - KNOW_SPEECH)}"
    assert knowing >= KNOW_SPEECH, f"no longer needed in KNOW_SPEECH: {sorted(KNOW_SPEECH - knowing)}"


def test_an_import_of_speech_is_found() -> None:
    text = """
def late():
    from deltic.server.speech import routes
import deltic.models.tts.shape
from deltic.runtime.cpu import speech_batch
from deltic.server import service
"""
    found = [name for name in modules_in(ast.parse(text)) if SPEECH.match(name)]
    assert sorted(found) == [
        "deltic.models.tts.shape",
        "deltic.runtime.cpu.speech_batch",
        "deltic.server.speech.routes",
    ]


# What keys share.

KEEPERS = ("server", "host", "engine", "runtime", "text.py")
"""What runs while requests come. Of a GPU's runtime all is planned before the server is ready."""
KEPT = {"Semaphore", "BoundedSemaphore", "Queue", "SimpleQueue", "PriorityQueue", "ThreadPoolExecutor", "FairThread", "Counter",
    "OrderedDict", "deque", "defaultdict", "dict", "list", "set"}  # fmt: skip
"""What a pool, a queue or a store is made of; of asyncio a Lock, too, and each literal, and what fills one."""
OF_ONE = {
    # Of a request, its answer, a batch or a socket.
    "AnswerStream", "AnswerJson", "AskedPrompt", "BatchRecord", "ChatAnswer", "CompletionAnswer", "ContextManagement",
    "AnswerDelta", "EchoStream", "EventStream", "Generation", "Import", "IncrementalEncoder", "Item", "Items",
    "LinesAnswer", "Message", "MessageAnswer", "Messages", "OpenText", "CallParser", "OutputParser",
    "RequestStream", "Update", "Prompt", "QuestionScores", "ResponseAnswer", "Scores", "Sent", "SpeechStream", "Splitter",
    "StoredResponse", "Usage", "_Answer", "_Appended", "_Bytes", "_Conversation", "_Form", "Results", "_Counts",
    "CallRules", "Output", "PromptLogprobs", "Request", "SamplingParams", "TokenLogprob", "CacheLocated", "Chat",
    "Completion", "Sampling", "Shown", "Ticket",
    # Of a sequence, or a step.
    "Chunk", "Drafter", "Guide", "Lexicon", "Prefix", "Repeats", "Sequence", "Step", "StepResult", "_Entry", "_Guess", "DraftHead", "BlockDrafter",
    "Pools", "Reading",
    "Drafting", "ServedModel", "Trace",
    # Numbers of a fixed kind: what is measured, and how long things take.
    "CacheStats", "EngineInfo", "Pace", "Stats", "StepCost", "Times", "_Known",
    # Between machines: what they were asked for together.
    "Answer", "AskedMoves", "Errand", "Stages", "StageTasks",
    # Made at the start.
    "_Generation", "_Start",
    "Accounts", "Arena", "ChatTemplate", "MeteredEnvironment", "Service", "StopSignals", "Tokenizer",
}  # fmt: skip
"""Classes whose objects share nothing between keys."""
FOR_ALL = {
    "Server.models",
    "SpeechParts.aliases",
    "Hosts._names",
    "Hosts._networks",
    "_document",
    "_client_tools",
    "docstrings",
    "_named_fields",
    "_texts",
    "answers",
    "examples",
    "Schemas",
    "_trust",
    "_bytes_only",
    "build",
    "model_files",
    "metrics_of",
    "parser",
    "_lexer",
}
"""Made at the start, or once for whoever comes first, and the same for everybody."""


def is_kept(value: ast.expr | None) -> bool:
    """Whether a value is something that things are kept in, or wait in."""
    if isinstance(value, ast.Lambda):
        value = value.body
    if isinstance(value, ast.Dict | ast.List | ast.Set | ast.DictComp):
        return True
    if not isinstance(value, ast.Call):
        return False
    made = value.func.value if isinstance(value.func, ast.Subscript) else value.func
    name = ast.unparse(made).rpartition(".")[2]
    if name == "field":
        factory = next((k.value for k in value.keywords if k.arg == "default_factory"), None)
        is_plain = isinstance(factory, ast.Name | ast.Attribute | ast.Subscript)
        return is_kept(ast.Call(factory, [], []) if is_plain else factory)  # type: ignore[arg-type]
    return name in KEPT or ast.unparse(made) == "asyncio.Lock"


def stores_in(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Class and name of each store; of a function that keeps its results only the name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and any(
            re.search(r"(?<!cached_property)\bcache\b|lru_cache", ast.unparse(decorator))
            for decorator in node.decorator_list
        ):
            yield "", node.name
        if not isinstance(node, ast.ClassDef):
            continue
        for part in ast.walk(node):
            if not isinstance(part, ast.Assign | ast.AnnAssign):
                continue
            for target in part.targets if isinstance(part, ast.Assign) else [part.target]:
                several = isinstance(target, ast.Tuple) and isinstance(part.value, ast.Tuple)
                pairs = zip(target.elts, part.value.elts, strict=False) if several else [(target, part.value)]  # type: ignore[union-attr]
                for one, value in pairs:
                    if not is_kept(value):
                        continue
                    if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self":
                        yield node.name, one.attr
                    elif isinstance(one, ast.Name) and part in node.body:
                        yield node.name, one.id


def stores() -> set[tuple[str, str]]:
    files = [
        path
        for top in KEEPERS
        for path in [ROOT / "deltic" / top, *(ROOT / "deltic" / top).rglob("*.py")]
        if path.is_file()
    ]
    return {store for path in files if "gpu" not in path.parts for store in stores_in(ast.parse(path.read_text()))}


def shared_rows() -> list[tuple[str, str]]:
    """Of each row of the table of what keys share its name and all that it says."""
    section = (ROOT / "docs/design/limits.md").read_text().partition("## Who may use how much")[2].partition("\n## ")[0]
    rows: list[tuple[str, str]] = []
    for name, said in re.findall(r"^\| ?(.*?) ?\| (.*) \|$", section, re.M)[2:]:
        if not name:
            name, before = rows.pop()
            said = f"{before} {said}"
        rows.append((name, said))
    return rows


def test_what_keys_share_is_in_the_table() -> None:
    named = set(re.findall(r"`([A-Za-z_.]+)`", " ".join(said for _, said in shared_rows()))) | FOR_ALL
    missing = sorted(
        f"{owner}.{name}" if owner else name
        for owner, name in stores()
        if owner not in OF_ONE and not {owner, f"{owner}.{name}" if owner else name} & named
    )
    assert not missing, f"neither in docs/design/limits.md, 'Who may use how much', nor of one request: {missing}"


def test_rows_of_what_keys_share_name_tests_and_stores_that_there_are() -> None:
    tests = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.M)
    }
    known = (
        {name for owner, name in stores() if not owner}
        | {f"{o}.{n}" for o, n in stores()}
        | {owner for owner, _ in stores()}
    )
    rows = shared_rows()
    assert len(rows) > 20
    for name, said in rows:
        shown = re.findall(r"`(test_\w+)`", said)
        assert shown and set(shown) <= tests, f"{name}: no such tests: {sorted(set(shown) - tests)}"
        kept = set(re.findall(r"`(_?[A-Z][a-z]\w+(?:\.\w+)?)`", said))
        assert kept <= known, f"{name}: nothing is kept in {sorted(kept - known)}"


def test_a_store_that_nobody_named_is_found() -> None:
    text = """
class New:
    names: dict[str, int] = field(default_factory=dict)
    most = 3

    def __init__(self):
        self._waiting: deque[int] = deque(maxlen=self.most)
        self._places, self.n = asyncio.Semaphore(2), 0
        self._turns = defaultdict[str, asyncio.Lock](asyncio.Lock)
        here = {}

@functools.cache
def known(name): ...
"""
    found = set(stores_in(ast.parse(text)))
    assert found == {("New", "names"), ("New", "_waiting"), ("New", "_places"), ("New", "_turns"), ("", "known")}
