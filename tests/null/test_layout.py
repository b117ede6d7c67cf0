"""The shape of the code: imports run one way, files and functions stay small, nobody is called utils.

The rules are the ones of ARCHITECTURE.md; raise a ceiling there and here, with the reason, or not at all.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import pytest

from deltic.config import EngineConfig, ModelConfig, ServerConfig
from tests.planted import FAULTS, Fault

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "deltic"
FILES = sorted(PACKAGE.rglob("*.py"))
REFERENCE = sorted((ROOT / "tests" / "reference").glob("*.py"))
TESTS = {file.name for file in (ROOT / "tests").rglob("test_*.py")}
SOURCES = FILES + sorted((PACKAGE / "csrc").iterdir()) + sorted(PACKAGE.rglob("*.cu"))

MAX_SOURCE_FILES = 313
MAX_FILE_LINES = 600
"""Lines of a file that are not empty: docstrings and comments count, too."""
MAX_FUNCTION_LINES = 80
MAX_PACKAGE_LINES = 67_087
"""What there is: a ceiling that comes down with it. A feature that needs more takes it from elsewhere, and says from where."""
MAX_METHODS = 30
MAX_PARAMETERS = 8
"""Parameters of a function: what belongs together is a record."""
MAX_ANY = 242
"""Types that nothing checks. `DeviceArray` is one of them, under a name that says what it is."""
SHARED_NAMES = """
AdapterBuffers AdapterRows Batch BatchParameters Columns Completion DraftHead Draws Frames Header Kind Linears
MoeScratch PictureTower Ring Rows Stored VisionBuffers Voice Workspace
"""
"""Names that several classes have: mostly the same thing on a CPU and on a GPU. The list only shrinks."""
MAX_PROSE_COLUMNS = 110
"""Lines of the package are lines of code: those with a token on them that is neither comment nor docstring."""

LAYERS = [{"commands", "bench", "verify", "ray"}, {"server"}, {"host"}, {"runtime"}, {"engine", "models"}, {"ops"}]
"""Folders, the topmost first. Each may import those below it; two that stand together do not know each other, but for the first."""
SHARED = {
    "aliases",
    "config",
    "machine",
    "text",
    "logs",
    "private",
    "roofs",
    "batch_lines",
    "config_sources",
    "llm",
    "llm_calls",
    "async_llm",
    "json_types",
    "__init__",
    "__main__",
}
"""The files at the top of the package."""
LEAVES = {
    "machine": set[str](),
    "config": {"machine", "json_types"},
    "aliases": {"config"},
    "logs": set(),
    "json_types": set(),
    "ops.geometry": set(),
    "ops.kv_formats": {"ops.geometry"},
    "ops.contract": set(),
    "ops.arrays": set(),
    "models.fields": set(),
    "engine.messages": set(),
    "engine.events": {"engine.messages"},
    "engine.step": {"engine.messages"},
    "server.metrics": {"__version__", "config", "engine.events", "engine.messages", "ops.geometry"},
}
"""Modules that import nothing of ours but what is named here."""
WITH_TORCH = (
    "ops.gpu.",
    "runtime.gpu.",
    "bench.gpu",
    "models.dflash.gpu",
    "models.qwen.gpu",
    "models.tts.gpu",
    "models.vision.gpu",
    "models.vocoder.gpu",
)
"""How the names begin of modules that import torch. Others may do so inside a function, where a GPU is in use."""
MAX_DEFERRED_IMPORTS = 28
"""Imports of ours inside functions: each keeps a start quick or a package optional, none hides a ring."""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@dataclass(frozen=True)
class Read:
    """What a file of Python says, read once."""

    imports: frozenset[str]
    """Names of modules, and of what is taken from them."""
    imports_at_top: frozenset[str]
    """Not those inside functions or for type checkers."""
    deferred: frozenset[str]
    """Imports of ours inside functions."""
    functions: tuple[tuple[str, int], ...]
    """Names and lines without the docstring; a kernel is none."""
    parameters: tuple[tuple[str, int], ...]
    """Names of functions that are no kernels, and numbers of their parameters without self and cls."""
    classes: tuple[tuple[str, int], ...]
    """Names, and numbers of methods."""
    prose: frozenset[int]
    """Numbers of the lines that hold docstrings or comments, but for those with an instruction to a checker."""
    docstrings: tuple[str, ...]
    """Docstrings of the module, its classes, functions, constants and fields."""
    n_any: int
    """How often a type is Any."""
    n_code: int
    """Lines that hold code."""


def names_of(node: ast.AST) -> set[str]:
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names}
    if isinstance(node, ast.ImportFrom) and node.module:
        assert node.level == 0, f"relative import of {node.module}"
        return {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return set()


def n_lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    docstring = ast.get_docstring(function, clean=False) or ""
    return (function.end_lineno or 0) - function.lineno + 1 - len(docstring.splitlines())


def n_parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    given = function.args
    names = {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)} - {"self", "cls"}
    return len(names) + (given.vararg is not None)


def n_methods_of(each: ast.ClassDef) -> int:
    return sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in each.body)


def is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list)


@cache
def read(path: Path) -> Read:
    return read_text(path.read_text())


def read_text(text: str) -> Read:
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    inside = {node for function in functions for node in ast.walk(function) if isinstance(node, ast.ImportFrom)}
    n_code, prose = lines_of(text)
    docstrings = list[str]()
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose.update(range(node.lineno, (node.end_lineno or 0) + 1))
            docstrings.append(node.value.value)
    return Read(
        imports=frozenset().union(*map(names_of, nodes)),
        imports_at_top=frozenset().union(*map(names_of, tree.body)),
        deferred=frozenset(ast.unparse(node) for node in inside if (node.module or "").startswith("deltic")),
        functions=tuple((each.name, n_lines_of(each)) for each in functions if not is_kernel(each)),
        parameters=tuple((each.name, n_parameters_of(each)) for each in functions if not is_kernel(each)),
        classes=tuple((each.name, n_methods_of(each)) for each in nodes if isinstance(each, ast.ClassDef)),
        prose=frozenset(prose),
        docstrings=tuple(docstrings),
        n_any=sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes),
        n_code=n_code,
    )


NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def lines_of(text: str) -> tuple[int, set[int]]:
    """How many lines hold code, and numbers of those with comments."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    code, comments = set[int](), set[int]()
    for before, token, after in zip([None, *tokens], tokens, [*tokens[1:], None], strict=False):
        if token.type == tokenize.COMMENT and not token.string.startswith(("# type:", "# noqa", "# fmt:")):
            comments.add(token.start[0])
        starts = before is None or before.type in NO_CODE
        ends = after is not None and after.type in (tokenize.NEWLINE, tokenize.NL)
        is_docstring = token.type == tokenize.STRING and starts and ends
        if token.type not in NO_CODE and not is_docstring:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code), comments


def ours(names: set[str]) -> set[str]:
    return {name.removeprefix("deltic.") for name in names if name.startswith("deltic.")}


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_run_one_way(path: Path) -> None:
    name, used = module_name(path), ours(read(path).imports)
    part = name.split(".")[0]
    if name in LEAVES:
        assert not used - LEAVES[name] - {f"{u}" for u in used if u.rpartition(".")[0] in LEAVES[name]}, (
            f"{name} is a leaf"
        )
    assert not any(u.split(".")[0] == "tests" for u in read(path).imports), "only tests import the reference"
    rank = next((i for i, layer in enumerate(LAYERS) if part in layer), None)
    if rank is None:
        assert part in SHARED, f"{name} belongs to no layer"
    else:
        beside = LAYERS[rank] - {part} if rank else set()
        above = set().union(*LAYERS[:rank]) | beside
        assert not {u for u in used if u.split(".")[0] in above}, f"{part} imports from above or beside"
    if not name.startswith(WITH_TORCH) and part != "reference":
        assert not {i for i in read(path).imports_at_top if i.split(".")[0] == "torch"}, f"{name} imports torch"


@pytest.mark.parametrize("path", REFERENCE, ids=lambda path: path.stem)
def test_the_reference_imports_nothing_of_ours(path: Path) -> None:
    parts = {name.split(".")[0] for name in read(path).imports if not name.startswith("tests.reference")}
    assert not parts & {"deltic", "tests", "bench", "training"}


def test_what_makes_prompts_and_answers_knows_no_api() -> None:
    """Each API converts its requests to a Chat; behind that, none is known."""
    for path in (PACKAGE / "server" / "chat").glob("*.py"):
        assert not {u for u in ours(read(path).imports) if u.startswith("server.api")}, module_name(path)


CYCLES: list[set[str]] = []
"""Modules that import each other, by way of an import inside a function: none may be added."""


def import_graph() -> dict[str, set[str]]:
    """For each module of the package those that it imports, in its functions and for type checkers, too."""
    modules = {module_name(path).removesuffix(".__init__"): path for path in FILES}

    def imported(path: Path) -> set[str]:
        found = set()
        for name in ours(read(path).imports):
            while name not in modules and "." in name:
                name = name.rpartition(".")[0]
            found |= {name} & modules.keys()
        return found

    return {name: imported(path) - {name} for name, path in modules.items()}


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    todo = [start]
    while todo:
        new = graph[todo.pop()] - found
        found |= new
        todo += new
    return found


def test_modules_do_not_import_each_other() -> None:
    graph = import_graph()
    ways = {name: reachable(graph, name) for name in graph}
    rings = {frozenset(other for other in ways[name] if name in ways[other]) for name in graph if name in ways[name]}
    assert sorted(map(sorted, rings)) == sorted(map(sorted, CYCLES))


def test_imports_inside_functions_are_counted() -> None:
    found = sorted(f"{module_name(path)}: {name}" for path in FILES for name in read(path).deferred)
    assert len(found) <= MAX_DEFERRED_IMPORTS, "\n".join(found)


def test_a_cpu_loads_no_torch() -> None:
    """Neither process, not even through somebody else's import: a second of start-up and 200 MB."""
    import subprocess

    modules = "server.app", "server.serve", "__main__", "host.process", "runtime.build", "llm", "commands.doctor"
    code = f"import {', '.join('deltic.' + name for name in modules)}, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def named_files(path: Path) -> set[str]:
    """Names of Python files in a file's texts."""
    return set(re.findall(r"(?<![\w./])([a-z_]+(?:/[a-z_]+)*\.py)\b", path.read_text()))


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_files_that_are_named_exist(path: Path) -> None:
    """Beside the file that names them, or by their way from the package, the tests or the repository; a test by its name alone."""
    for name in named_files(path) - TESTS:
        assert any((folder / name).exists() for folder in (path.parent, PACKAGE, ROOT / "tests", ROOT)), (
            f"there is no {name}"
        )


def n_code_lines(path: Path) -> int:
    """Lines of a file that hold code. C++ is read line by line: a line is code unless it is empty or begins with //."""
    if path.suffix == ".py":
        return read(path).n_code
    return sum(bool(line.strip()) and not line.strip().startswith("//") for line in path.read_text().splitlines())


def test_only_lines_of_code_are_counted() -> None:
    text = '"""Doc.\n\nMore."""\n\n# a comment\nx = (  # one\n    1\n)\n\n\ndef f():\n    """Doc."""\n    return """two\nlines"""\n'
    assert read_text(text).n_code == 6


def test_only_lines_of_prose_are_measured() -> None:
    text = (
        '"""Doc.\n\nMore."""\n\n# a comment\nx = 1  # one\ny = "text"  # type: ignore\n\n\nclass C:\n    """Doc."""\n'
    )
    assert read_text(text).prose == {1, 2, 3, 5, 6, 11}


BENCH = sorted(path for path in (ROOT / "bench").rglob("*.py") if ".peers-venv" not in path.parts)
"""Files of bench, without what `bench.peers --prepare` installs."""
PROSE = [*FILES, *REFERENCE, *BENCH]


@pytest.mark.parametrize("path", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_and_comments_are_narrow(path: Path) -> None:
    lines = path.read_text().splitlines()
    wide = [n for n in read(path).prose if len(lines[n - 1]) > MAX_PROSE_COLUMNS]
    assert not wide, f"{path.name}: lines {sorted(wide)} are over {MAX_PROSE_COLUMNS} columns"


def test_lines_of_kernels_are_narrow() -> None:
    """No formatter breaks them."""
    files = [file for file in SOURCES if file.parent == PACKAGE / "ops" / "gpu"]
    wide = {file.name: n for file in files if (n := max(map(len, file.read_text().splitlines()))) > 120}
    assert len(files) > 30 and not wide


LEANING = """
Of Those As Whose Behind What Who Where When Which Whether If In On At With Without By For From Not No
Nothing Nobody None Only All Any Each Both One Two It Its They Them Their That This These How Why So But
And Than Then There Here Also Another Other Else Such Up Down Out Over Under Before After While Until
Between Beside Beyond Above Below Once Twice Again Now Also Most More Less Least Few Many Much Same Like
Unlike Still Already Never Always Some Somebody
"""
"""Words that no docstring begins with, as it would lean on the line before."""


def leaning(path: Path) -> list[str]:
    first = [(re.match(r"\W*(\w+)", docstring), docstring) for docstring in read(path).docstrings]
    return [docstring for match, docstring in first if match and match[1] in LEANING.split()]


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_docstrings_stand_alone(path: Path) -> None:
    """They begin with a verb or a noun."""
    assert not leaning(path)


def test_size_ceilings() -> None:
    n_lines = {path: sum(map(bool, map(str.strip, path.read_text().splitlines()))) for path in SOURCES}
    long = {str(path.relative_to(ROOT)): n for path, n in n_lines.items() if n > MAX_FILE_LINES}
    assert not long, f"over {MAX_FILE_LINES} lines: {long}"
    assert len([path for path in FILES if path.name != "__init__.py"]) <= MAX_SOURCE_FILES
    assert (n := sum(map(n_code_lines, SOURCES))) <= MAX_PACKAGE_LINES, n
    assert (n := sum(read(path).n_any for path in FILES)) <= MAX_ANY, n


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_functions_are_short_and_names_say_something(path: Path) -> None:
    assert path.stem not in ("utils", "helpers", "common", "base")
    for name, length in read(path).functions:
        assert length <= MAX_FUNCTION_LINES, f"{path.name}: {name} has {length} lines"
    for name, n_methods in read(path).classes:
        assert n_methods <= MAX_METHODS, f"{path.name}: {name} has {n_methods} methods"
        assert not name.endswith(("Manager", "Handler", "Helper", "Wrapper")), name


def test_functions_take_few_parameters() -> None:
    many = {f"{path.stem}.{name}" for path in FILES for name, n in read(path).parameters if n > MAX_PARAMETERS}
    assert not many


def test_classes_have_names_of_their_own() -> None:
    names = [name for path in FILES for name, _ in read(path).classes]
    assert sorted({name for name in names if names.count(name) > 1}) == SHARED_NAMES.split()


MAX_SETTING_FILES, MAX_FIELD_FILES = 6, 4
"""Files of the package that name a setting, and a field of a request that is handed on as it is."""
WIDE_SETTINGS = {
    "a step, its buffers and the engine's limits are sized by it": (
        "max_model_len max_num_seqs n_pages max_step_tokens max_picture_tokens"
    ),
    "the engine says it of itself, and APIs and metrics show it": "kv_cache_dtype prefix_cache tensor_parallel",
    "whoever plans says what would fit": "memory_gb",
    "whoever looks for files asks for it": "download_dir cache_dir",
    "a file, a module or a field of requests has the same name": "generation_config chat_template kv_events",
    "each door bounds bodies and queues, and writes addresses": "max_body_mb root_path max_queue",
    "each command asks a server": "api_key",
}
"""Settings that more files name, by the reason. The list only shrinks."""
HANDED_ON = ("cache_salt", "cache_prompt", "bad_words", "allowed_token_ids")


def files_naming(name: str) -> int:
    """Files of the package in which a name stands as a word."""
    texts = (path.read_text() for path in [*FILES, *PACKAGE.rglob("*.toml")])
    return sum(re.search(rf"\b{name}\b", text) is not None for text in texts)


def test_a_setting_touches_few_files() -> None:
    """Names of one word are left out, as they are words of other things, too."""
    names = {field.name for kind in (EngineConfig, ModelConfig, ServerConfig) for field in fields(kind)}
    wide = {name for name in names if "_" in name and files_naming(name) > MAX_SETTING_FILES}
    assert wide == set(" ".join(WIDE_SETTINGS.values()).split())


def test_a_field_that_is_handed_on_touches_few_files() -> None:
    assert {name for name in HANDED_ON if files_naming(name) > MAX_FIELD_FILES} == set()


UNPICKLES = {
    "pickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "multiprocessing",
    "copyreg",
    "jsonpickle",
}
"""Modules that make objects of bytes, and one that sends such bytes between processes."""
RUNS_TEXT = {"eval", "exec", "__import__"}
UNPICKLING = {"recv_pyobj", "send_pyobj", "unsafe_load", "full_load", "ProcessPoolExecutor", "read_pickle"}


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_bytes_from_elsewhere_are_never_made_objects_or_code(path: Path) -> None:
    """Between our processes goes msgpack with declared types, and JSON; files are read by what has a schema."""
    tree = ast.parse(path.read_text())
    assert {name.split(".")[0] for name in read(path).imports} & UNPICKLES == set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            assert node.id not in RUNS_TEXT | UNPICKLING, f"line {node.lineno}"
        elif isinstance(node, ast.Attribute):
            of = ast.unparse(node.value)
            assert node.attr not in UNPICKLING, f"line {node.lineno}"
            assert (of, node.attr) not in {("torch", "load"), ("np", "load"), ("numpy", "load")}, f"line {node.lineno}"
        elif isinstance(node, ast.keyword):
            assert node.arg not in ("allow_pickle", "trust_remote_code", "weights_only"), f"line {node.lineno}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "yaml.load":
            assert [ast.unparse(argument) for argument in node.args[1:]] == ["Once"], "a SafeLoader"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_finds_its_line(fault: Fault) -> None:
    """`python -m tests.planted` is run by hand: a line that was changed since then would be planted nowhere."""
    assert (ROOT / fault.file).read_text().count(fault.old) == 1, f"{fault.file}: {fault.old!r}"
    assert all((ROOT / name).exists() for name in fault.first.split()), fault.first
