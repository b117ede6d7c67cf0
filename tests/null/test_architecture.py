"""The documents about the code can be read and are true: short lines and paragraphs; files, classes and methods that exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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


@pytest.mark.parametrize("path", [*MAPS, ROOT / "LOG.md"], ids=relative)
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


@pytest.mark.parametrize("path", MAPS, ids=relative)
def test_named_files_exist(path: Path) -> None:
    missing = sorted({name for name in named_files(path.read_text()) if not is_there(name)})
    assert not missing, f"{path.name}: no such files: {missing}"


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


CLASSES = classes()


def has_member(owner: str, name: str) -> bool:
    bases, members = CLASSES.get(owner, (set(), set()))
    return name in members or any(has_member(base, name) for base in bases)


@pytest.mark.parametrize("path", MAPS, ids=relative)
def test_named_classes_and_methods_exist(path: Path) -> None:
    """`Class.name`, also in a chain of them: there is such a class, and it or a base of it has such a method or field."""
    spans = " ".join(re.findall(r"`([^`\n]+)`", without_code(path.read_text())))
    for owner, name in re.findall(r"(?<![\w.])([A-Z][a-z]\w+)\.([a-z_]\w*)(?!\.?\w)", spans):
        assert has_member(owner, name), f"{path.name}: no {owner}.{name}"


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/design/*.md")), ids=relative)
def test_a_page_of_the_design_names_its_files_and_tests(path: Path) -> None:
    text = path.read_text()
    assert re.search(r"^\*\*Files[:.]\*\*", text, re.M) and re.search(r"^\*\*Tests[:.]\*\*", text, re.M)
