"""Words that this repository has given up for the field's: no identifier of the package has them again."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "deltic"
FILES = sorted(PACKAGE.rglob("*.py"))
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "design").glob("*.md")),
]
EVERYWHERE = re.compile(
    r"party|PieceStream|Piece|STRIP|part_logits|rows_place|place_table|PlaceState|PlaceParameters|n_owners|[Rr]esidency"
)
"""Now namespace, UpdateStream, Segment or Update, PANEL, shard_logits, rows_batch_slot, batch_table, BatchState,
BatchParameters, n_tenants, placement."""
N_OWNERS = {"engine/cache/tree.py", "engine/cache/cache.py", "engine/cache/placement.py"}
"""Files that count references: an index has as many owners."""
SLOT = re.compile(r"p_slot|slots?")
OTHER_SLOTS = re.compile(
    r"ops/(gpu/(all_reduce|expert_slots|moe|moe_decode|moe_prefill|lora)|cpu/lora)\.py|runtime/((cpu|gpu)/)?adapters\.py|models/hub\.py"
)
"""Slots of adapters, of a token's experts, of the flags of a rank, and of downloads."""
PLACE = re.compile(r"n_places|places?|p_place|token_place|row_place|Places")
STEPS = re.compile(
    r"engine/(?!drafts|pictures|scheduler)|models/(qwen|tts)/(cpu|gpu)|ops/cpu/(attention|gdn|sample)|runtime/(cpu|gpu)/"
)
"""Files of steps, where a place can only be a row of the batch; the scheduler has a verb, too."""


PARTY, OWNERS = re.compile(r"\b(?:part(?:y|ies)|doors?)\b", re.IGNORECASE), re.compile(r"\bowners\b", re.IGNORECASE)
"""The same in prose: namespaces, and APIs or endpoints; and in the package, tenants."""


def names_of(path: Path) -> set[str]:
    tokens = list(tokenize.generate_tokens(io.StringIO(path.read_text()).readline))
    pairs = zip(tokens, [*tokens[1:], None], strict=True)
    return {
        token.string
        for token, after in pairs
        if token.type == tokenize.NAME and not (token.string == "slots" and after and after.string == "=")
    }


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_words_that_were_given_up_do_not_return(path: Path) -> None:
    name, names = path.relative_to(PACKAGE).as_posix(), names_of(path)
    found = {word for word in names if EVERYWHERE.fullmatch(word)} - ({"n_owners"} if name in N_OWNERS else set())
    if not OTHER_SLOTS.fullmatch(name):
        found |= {word for word in names if SLOT.fullmatch(word)}
    if STEPS.match(name):
        found |= {word for word in names if PLACE.fullmatch(word)}
    assert not found, f"{name}: {sorted(found)}"


@pytest.mark.parametrize("path", FILES + DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_prose_has_the_same_words(path: Path) -> None:
    text, name = path.read_text(), path.relative_to(ROOT).as_posix()
    assert not PARTY.search(text), name
    if path in FILES and name.removeprefix("deltic/") not in N_OWNERS:
        assert not OWNERS.search(text), name


REFUSING = [
    path for room in ("api", "chat", "speech", "batch") for path in sorted((PACKAGE / "server" / room).glob("*.py"))
]
REFUSING += [
    PACKAGE / "server" / f"{name}.py" for name in ("access", "adapters", "errors", "limits", "service", "urls")
]


@pytest.mark.parametrize("path", REFUSING, ids=lambda path: path.name)
def test_messages_of_the_server_are_sentences(path: Path) -> None:
    """One says what is wrong, another what to do. Descriptions are for the model, docstrings for people, patterns for texts of
    libraries."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "re.compile":
            prose |= {id(argument) for argument in node.args}
        if isinstance(node, ast.Dict):
            prose |= {
                id(value)
                for key, value in zip(node.keys, node.values, strict=True)
                if key and ast.unparse(key) == "'description'"
            }
    texts = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in prose]
    assert not [node.lineno for node in texts if isinstance(node.value, str) and "; " in node.value]
