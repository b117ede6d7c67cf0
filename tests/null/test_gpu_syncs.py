"""Nothing in a step on a GPU waits for it, but where that is said: a look at the code, where no GPU is needed.

What is looked at: the functions of `runtime/gpu`, of the models' `gpu*.py` and of `ops/gpu`, but for kernels and for what runs at the
start only. A call that makes the host wait (`.item()`, a blocking copy, `torch.cuda.synchronize`) or a tensor that Python asks for its
value (`if`, `int`, `for`) is a fault, unless it stands in ALLOWED with the reason. tests/gpu has the check of what really runs
(`without_syncs`), where there is a GPU.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "deltic"
AT_START = {
    "runtime/gpu": {"buffers", "collect", "compile", "device"},
    "ops/gpu": {"chip", "formats", "launch", "operands", "quantise", "roofs", "weight"},
}
"""Files of which nothing runs in a step: what loads, plans, compiles and measures."""
FILES = sorted(
    path
    for folder in ("runtime/gpu", "ops/gpu", "models/qwen", "models/tts", "models/vision", "models/vocoder")
    for path in (PACKAGE / folder).glob("*.py" if folder.endswith("gpu") else "gpu*.py")
    if path.stem not in AT_START.get(folder, ())
)

HOST = "the tensor is in the host's memory; an event says that it is filled"
AFTER_EVENT = "waits for one event, behind which the results of a step are there"
ON_DEVICE = "both are on the device: the copy is put on the stream"
START = "runs before the engine is ready"
SELDOM = "log-probabilities of a prompt, which wait: its docstring says so"
BENCH = "for tests and benches"

ALLOWED = {
    "runtime/gpu/adapters.py:_wait": AFTER_EVENT,
    "runtime/gpu/ahead.py:wait": AFTER_EVENT,
    "runtime/gpu/ahead.py:keep": ON_DEVICE,
    "runtime/gpu/copies.py:end": "in the mover's thread",
    "runtime/gpu/copies.py:_wait": "for rows on their way from and to other machines",
    "runtime/gpu/block_drafter.py:__init__": START,
    "runtime/gpu/block_drafter.py:read": HOST,
    "runtime/gpu/draft_head.py:__init__": START,
    "runtime/gpu/draft_head.py:read": HOST,
    "runtime/gpu/pictures.py:_put": ON_DEVICE,
    "runtime/gpu/batch_slots.py:take": "a buffer whose copy is three steps old",
    "models/qwen/gpu_experts.py:seen": HOST,
    "models/qwen/gpu_streams.py:hashed_table": START,
    "runtime/gpu/record.py:record_all": START,
    "runtime/gpu/record.py:wait": "between two pieces of a picture, on which the next one's size depends",
    "runtime/gpu/runner.py:_copy": ON_DEVICE,
    "runtime/gpu/runner.py:_read": HOST,
    "runtime/gpu/speech.py:__init__": START,
    "runtime/gpu/speech.py:_fill_voice": ON_DEVICE,
    "runtime/gpu/text.py:__init__": START,
    "runtime/gpu/text.py:walk": START,
    "runtime/gpu/text.py:_read": HOST,
    "runtime/gpu/text.py:_hidden_of": "the vectors of an embedding, which wait: its docstring says so",
    "runtime/gpu/prompt_logprobs.py:of": SELDOM,
    "runtime/gpu/prompt_logprobs.py:logits": SELDOM,
    "runtime/gpu/text.py:logits": BENCH,
    "runtime/gpu/text.py:residuals": BENCH,
    "runtime/gpu/vocoder.py:samples": AFTER_EVENT,
    "runtime/gpu/vocoder.py:open": "the state of a voice, once a stream",
    "runtime/gpu/vocoder.py:state_of": "when a voice is encoded, for what is kept of it",
    "ops/gpu/expert_slots.py:_begin": START,
    "ops/gpu/fp8.py:block_scales": START,
    "ops/gpu/all_reduce.py:let_reach": START,
    "ops/gpu/all_reduce.py:apart": START,
    "ops/gpu/all_reduce.py:_wait": START,
    "models/tts/gpu.py:project_texts": ON_DEVICE,
    "models/tts/gpu.py:frame_embeddings": "when a voice is encoded",
    "models/vocoder/gpu.py:__init__": START,
}
"""By file and function: why what it does there harms no step."""

WAITS = {
    "item",
    "cpu",
    "tolist",
    "synchronize",
    "nonzero",
    "argwhere",
    "masked_select",
    "is_nonzero",
    "equal",
    "allclose",
}
"""Methods, and functions of torch, that wait for the device, or give the host what is on it."""
NOT_VALUES = {
    "shape",
    "device",
    "dtype",
    "ndim",
    "is_cuda",
    "size",
    "numel",
    "dim",
    "stride",
    "data_ptr",
    "element_size",
}
NOT_VALUES |= {"is_contiguous", "nbytes", "numpy", *WAITS}
"""What of a tensor is no tensor."""


class Look(ast.NodeVisitor):
    """Notes the line and what is wrong with it, in one function."""

    def __init__(self, attributes: set[str]) -> None:
        self.attributes = attributes
        """Names of fields that are declared tensors anywhere."""
        self.tensors: set[str] = set()
        self.found: list[tuple[int, str]] = []

    def is_tensor(self, node: ast.expr | None) -> bool:
        """Whether this expression is known to be one."""
        match node:
            case ast.Name(id=name):
                return name in self.tensors
            case ast.Attribute(attr=name):
                return name in self.attributes
            case ast.Subscript(value=of) | ast.UnaryOp(operand=of):
                return self.is_tensor(of) and not isinstance(getattr(node, "op", None), ast.Not)
            case ast.BinOp(left=left, right=right):
                return self.is_tensor(left) or self.is_tensor(right)
            case ast.Compare(left=left, ops=ops, comparators=others):
                plain = all(isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) for op in ops)
                return not plain and any(map(self.is_tensor, (left, *others)))
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name)):
                return name in ("zeros", "ones", "empty", "tensor", "cat", "arange", "from_numpy", "stack", "full")
            case ast.Call(func=ast.Attribute(value=of, attr=name)):
                return self.is_tensor(of) and name not in NOT_VALUES
        return False

    def wrong(self, node: ast.AST, what: str) -> None:
        self.found.append((node.lineno, what))  # type: ignore[attr-defined]

    def ask(self, node: ast.expr, what: str) -> None:
        """What Python asks for its truth."""
        for part in node.values if isinstance(node, ast.BoolOp) else [node]:
            part = part.operand if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not) else part
            if self.is_tensor(part):
                self.wrong(part, what)

    def visit_If(self, node: ast.If) -> None:
        self.ask(node.test, "if tensor")
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self.ask(node.test, "while tensor")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.ask(node.test, "if tensor")
        self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        self.ask(node.test, "assert tensor")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        self.tensors = self.tensors | names if self.is_tensor(node.value) else self.tensors - names

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        is_async = any(k.arg == "non_blocking" and ast.unparse(k.value) == "True" for k in node.keywords)
        match node.func:
            case ast.Name(id="int" | "float" | "bool" | "list" | "sum" | "max" | "min" as name):
                if any(map(self.is_tensor, node.args)):
                    self.wrong(node, f"{name}(tensor)")
            case ast.Attribute(attr="copy_") if not is_async:
                self.wrong(node, "a blocking copy_")
            case ast.Attribute(attr="to") if not is_async and not all(map(is_dtype, node.args)):
                self.wrong(node, "a blocking .to()")
            case ast.Attribute(attr=name) if name in WAITS and ast.unparse(node.func.value) != "np":
                self.wrong(node, f".{name}()")


def is_dtype(node: ast.expr) -> bool:
    text = ast.unparse(node)
    return "dtype" in text or (text.startswith("torch.") and "device" not in text)


def is_annotated(node: ast.expr | None) -> bool:
    match node:
        case ast.BinOp(left=left, right=ast.Constant(value=None)):
            return is_annotated(left)
        case ast.Name(id="Tensor") | ast.Attribute(attr="Tensor"):
            return True
    return False


def fields(trees: Iterable[ast.Module]) -> set[str]:
    """Names of fields that are declared to be tensors, and nothing else anywhere."""
    tensors, others = set(), set()
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign):
                name = getattr(node.target, "attr", None) or getattr(node.target, "id", "")
                (tensors if is_annotated(node.annotation) else others).add(name)
            elif isinstance(node, ast.FunctionDef):
                others.add(node.name)
    return tensors - others


def faults(tree: ast.Module, attributes: set[str]) -> list[tuple[str, int, str]]:
    """(function, line, what) of everything that waits. A function inside another is the outer one's."""

    def functions(node: ast.AST) -> list[ast.FunctionDef]:
        found = []
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef):
                found.append(child)
            elif isinstance(child, ast.ClassDef | ast.If):
                found += functions(child)
        return found

    wrong = []
    for function in functions(tree):
        if any("triton.jit" in ast.unparse(decorator) for decorator in function.decorator_list):
            continue  # a kernel: Triton's language looks like this, and runs elsewhere
        look = Look(attributes)
        for inner in ast.walk(function):
            if isinstance(inner, ast.FunctionDef | ast.Lambda):
                arguments = [*inner.args.args, *inner.args.kwonlyargs]
                look.tensors |= {a.arg for a in arguments if is_annotated(a.annotation)}
        look.visit(function)
        wrong += [(function.name, line, what) for line, what in look.found]
    return wrong


def test_nothing_in_a_step_waits_for_the_device() -> None:
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    assert len(trees) > 40
    beside = [*PACKAGE.glob("engine/*.py"), *PACKAGE.glob("models/*/shape.py")]  # whose fields stand there, too
    attributes = fields([*trees.values(), *(ast.parse(path.read_text()) for path in beside)])
    assert attributes > {"page_table", "top_ids", "last_token"}
    wrong, used = [], set()
    for path, tree in trees.items():
        for function, line, what in faults(tree, attributes):
            name = f"{path.relative_to(PACKAGE)}:{function}"
            used.add(name)
            if name not in ALLOWED:
                wrong.append(f"{name}, line {line}: {what}")
    assert wrong == [], "have it not wait, or say in ALLOWED why it may"
    assert ALLOWED.keys() - used == set(), "nothing waits there any more"


@pytest.mark.parametrize(
    "line",
    [
        "x.item()", "x.cpu()", "x.tolist()", "torch.cuda.synchronize()", "event.synchronize()", "x.nonzero()", "torch.nonzero(x)",
        "y.copy_(x)", "x.to(device)", "x.to('cpu')", "x.to(device, non_blocking=False)", "int(x[0])", "float(x)", "bool(x > 1)",
        "while x[0]: pass", "y = 1 if x else 2", "assert x == 0", "z = x + 1\n    if z: pass", "z = torch.zeros(1)\n    if not z: pass",
        "if self.pages[0] > 1: pass", "max(x)", "torch.equal(x, y)", "def inner(z: Tensor):\n        return z.item()",
    ],
)  # fmt: skip
def test_the_look_sees_what_waits(line: str) -> None:
    source = f"class A:\n  pages: Tensor\n  def step(self, x: Tensor, y, event):\n    {line}\n"
    tree = ast.parse(source)
    assert [function for function, _, _ in faults(tree, fields([tree]))] == ["step"]


@pytest.mark.parametrize(
    "line",
    ["y.copy_(x, non_blocking=True)", "x.to(device, non_blocking=True)", "x.to(torch.int32)", "if x is not None: pass",
     "if x.shape[0] > 1: pass", "int(x.numel())", "x.zero_()", "if event: pass"],
)  # fmt: skip
def test_the_look_lets_through_what_does_not_wait(line: str) -> None:
    tree = ast.parse(f"def step(x: Tensor, y, event):\n    {line}\n")
    assert faults(tree, set()) == []
