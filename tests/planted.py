"""Whether the tests catch faults: `python -m tests.planted` plants one after another and says which test notices, and after how long.

A fault is a small edit as a person makes it: a mask left out, a sum in another order, a slot that nobody frees. Each is planted in a
copy of the tree, in build/planted. There run the tests that should notice first; else all that a landing runs (`make test`), with the
long tests of no area, as if no kernel had changed; else the long ones: of the area that the file is of ("its grid"), or, where it is
of none, all, as at night. A test that fails counts if it passes in a copy without the fault. A fault in a kernel of the CPU is compiled
for every instruction set that this machine runs, from the objects of `make kernels`.

Some faults, one process at a time: `python -m tests.planted padded-row spoilt-mask`. `--list` says what there is, `--check` only plants,
compiles and imports. An older tree, whose tests have no areas: `--old --tree DIRECTORY`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from threading import Lock

from rich.console import Console
from rich.table import Table

from tests import areas

ROOT = Path(__file__).resolve().parents[1]
PLACE = ROOT / "build" / "planted"
SUITES = {"null": "tests/null", "cpu": "tests/cpu", "gpu": "tests/gpu"}
STATED = re.compile(r"^(tests/\S+?\.py::.+?)(?: (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b.*)?$", re.MULTILINE)
OWN_IMPORTS = """import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable_")]
"""
console = Console(stderr=True, soft_wrap=True)


@dataclass(frozen=True)
class Fault:
    name: str
    kind: str
    file: str
    old: str
    """Occurs once."""
    new: str
    first: str
    """Files of tests that should notice, the quickest first."""

    @property
    def room(self) -> str:
        parts = PurePosixPath(self.file).parts[1:-1]
        return "/".join(parts) or PurePosixPath(self.file).name

    @property
    def suites(self) -> list[str]:
        """Those of its side, the one that should notice first."""
        if self.room == "csrc" or "/cpu" in self.file:
            return ["cpu", "null"]
        return ["gpu", "null"] if "/gpu" in self.file else ["null", "cpu", "gpu"]

    @property
    def areas(self) -> list[str]:
        """Whose long tests its change brings back."""
        return [name for name, globs in areas.AREAS.items() if any(PurePosixPath(self.file).match(g) for g in globs)]


# The name of each test below is that of a file; the edits are of the tree that this file is in.
FAULTS = [
    # Kernels of the CPU.
    Fault(
        "padded-row",
        "wrong tail of a matrix",
        "deltic/csrc/matrix.h",
        "s < NS && !(MAY_PAD && m >= rows)",
        "s < NS && !(MAY_PAD && m > rows)",
        "tests/cpu/test_ops.py tests/cpu/test_quantised_models.py",
    ),
    Fault(
        "nvfp4-divisor",
        "wrong scale of a format",
        "deltic/csrc/format.h",
        "* times / over * splat(0.5f)",
        "* times * over * splat(0.5f)",
        "tests/cpu/test_formats.py tests/cpu/test_ops.py",
    ),
    Fault(
        "order-of-splits",
        "a sum's order follows the batch",
        "deltic/csrc/attention.cpp",
        "        attend(b, 0, known);\n        for (int64_t split = 1; split < b.n_splits; split++) {",
        "        attend(b, b.n_splits - 1, known);\n        for (int64_t split = b.n_splits - 2; split >= 0; split--) {",
        "tests/cpu/test_attention.py tests/cpu/test_purity.py",
    ),
    Fault(
        "short-window",
        "off by one at a chunk's boundary",
        "deltic/csrc/gdn.cpp",
        "if (seq_start[s] - t > seq_context[s]) return v16{};",
        "if (seq_start[s] - t >= seq_context[s]) return v16{};",
        "tests/cpu/test_ops.py tests/cpu/test_purity.py",
    ),
    Fault(
        "likeliest-of-equals",
        "wrong candidate",
        "deltic/csrc/draft.cpp",
        "!(values[i] > c[k - 1].value)",
        "!(values[i] >= c[k - 1].value)",
        "tests/cpu/test_draft_ops.py tests/cpu/test_block_drafter.py",
    ),
    Fault(
        "tied-experts",
        "wrong expert",
        "deltic/csrc/moe.cpp",
        "if (scratch[e] > scratch[best]) best = e;",
        "if (scratch[e] >= scratch[best]) best = e;",
        "tests/cpu/test_ops.py",
    ),
    Fault(
        "tail-of-logits",
        "wrong log-probability",
        "deltic/csrc/sample.cpp",
        "        for (; j < n_real; j++) total += exp1(x[j] - high);\n",
        "",
        "tests/cpu/test_ops.py",
    ),
    Fault(
        "unshrunk-total",
        "a sum that is not rescaled",
        "deltic/csrc/vision.cpp",
        "store(total_of, fma(load(total_of), shrink, even + odd));",
        "store(total_of, load(total_of) + (even + odd));",
        "tests/cpu/test_vision_ops.py",
    ),
    Fault(
        "vocoder-ring",
        "vocoder's state",
        "deltic/csrc/codec.cpp",
        "memcpy(past + ((begin + t) % ring * 2 + part - 1) * dim",
        "memcpy(past + (t % ring * 2 + part - 1) * dim",
        "tests/cpu/test_vocoder.py",
    ),
    Fault(
        "odd-strip-of-ranks",
        "wrong tail of a matrix",
        "deltic/csrc/lora.h",
        "const int64_t n_tasks = (most / STRIP + 1) / 2;",
        "const int64_t n_tasks = std::max<int64_t>(1, most / STRIP / 2);",
        "tests/cpu/test_lora.py tests/cpu/test_adapters.py",
    ),
    # Kernels of the GPU.
    Fault(
        "scales-of-slice",
        "wrong scale of a format",
        "deltic/ops/gpu/linear.py",
        "p_scale = p_x_scale + first_k // BLOCK_K * n + tl.minimum(o_n, n - 1)",
        "p_scale = p_x_scale + tl.minimum(o_n, n - 1)",
        "tests/gpu/test_gpu_formats.py",
    ),
    Fault(
        "stride-of-experts",
        "wrong expert",
        "deltic/ops/gpu/experts.py",
        "matrix_at(p_up, i_matrix, M, H, UP), o_w",
        "matrix_at(p_up, i_matrix, M, H, FORMAT), o_w",
        "tests/gpu/test_gpu_moe_formats.py",
    ),
    Fault(
        "scales-of-no-keys",
        "missing mask",
        "deltic/ops/gpu/attention_decode.py",
        "floats = kv.load_floats(p_page, i_kv, o_t, last * PAGE + o_t < n_old, KV, NK, D)",
        "floats = kv.load_floats(p_page, i_kv, o_t, o_t >= 0, KV, NK, D)",
        "tests/gpu/test_gpu_attention_decode.py tests/gpu/test_gpu_kv_formats.py",
    ),
    Fault(
        "gate-of-second-head",
        "wrong field",
        "deltic/ops/gpu/attention_prefill.py",
        "o_gate = (o_t * ROW + o_m // 64 * D)[:, None]",
        "o_gate = (o_t * ROW)[:, None]",
        "tests/gpu/test_gpu_attention_prefill.py",
    ),
    Fault(
        "sign-in-series",
        "flipped sign",
        "deltic/ops/gpu/gdn_prefill_kernels.py",
        "b_t = 1.0 + b_2 * (1.0 / 3 + b_2 * (1.0 / 5",
        "b_t = 1.0 + b_2 * (1.0 / 3 - b_2 * (1.0 / 5",
        "tests/gpu/test_gpu_gdn_prefill.py",
    ),
    Fault(
        "mask-of-draft",
        "missing mask",
        "deltic/ops/gpu/sample_kernels.py",
        "mask_row = tl.where(mask_row < 0, mask_row, mask_row + tl.load(p_ahead + i))",
        "mask_row = tl.maximum(mask_row, -1)",
        "tests/gpu/test_gpu_sample.py tests/gpu/test_gpu_drafts.py",
    ),
    Fault(
        "tap-of-another-block",
        "missing mask",
        "deltic/ops/gpu/block.py",
        "b_here = b_mask & (nth >= tap)",
        "b_here = b_mask & (i_row >= tap)",
        "tests/gpu/test_gpu_block.py",
    ),
    Fault(
        "behind-the-mask",
        "wrong token before a guess",
        "deltic/ops/gpu/block.py",
        "before = tl.where(is_first, token, guess)",
        "before = tl.where(is_now, tl.load(p_token + i - BESIDE, mask=is_now, other=-1), -1)",
        "tests/gpu/test_gpu_block.py",
    ),
    Fault(
        "least-of-second-half",
        "wrong scale of a format",
        "deltic/ops/gpu/decode.py",
        "tl.fma(b_value, b_scale, spread(least_of(block, j * HALVES // 8, SCALES), BLOCK_K))",
        "tl.fma(b_value, b_scale, spread(least_of(block, 0, SCALES), BLOCK_K))",
        "tests/gpu/test_gpu_formats.py",
    ),
    Fault(
        "own-rank-first",
        "wrong order of a sum",
        "deltic/ops/gpu/all_reduce.py",
        """\
            p_from = p_inbox + ((turn + q) * n_rows + row).to(tl.int64) * width + o_col
            b_part = tl.load(p_from, mask=(o_col < width) & (q != rank), other=0.0, volatile=True).to(tl.float32)
            shards += (tl.where(q == rank, own[j], b_part),)
""",
        """\
            of = (rank + q) % RANKS
            p_from = p_inbox + ((turn + of) * n_rows + row).to(tl.int64) * width + o_col
            b_part = tl.load(p_from, mask=(o_col < width) & (of != rank), other=0.0, volatile=True).to(tl.float32)
            shards += (tl.where(of == rank, own[j], b_part),)
""",
        "tests/gpu/test_gpu_all_reduce.py",
    ),
    # Runtimes.
    Fault(
        "position-of-draft",
        "wrong position in sampling",
        "deltic/runtime/cpu/sampler.py",
        "_Draw(row + j, batch_slot, at + j, known + j if",
        "_Draw(row + j, batch_slot, at, known + j if",
        "tests/cpu/test_drafts.py tests/cpu/test_draft_head.py",
    ),
    Fault(
        "stale-snapshots",
        "state slot written by a later step",
        "deltic/runtime/cpu/batch.py",
        "if has_snapshots or self._has_snapshots:",
        "if has_snapshots:",
        "tests/cpu/test_engine.py tests/cpu/test_purity.py tests/cpu/test_prefix_bits.py",
    ),
    Fault(
        "stale-page-table",
        "lost page",
        "deltic/runtime/gpu/batch_slots.py",
        "same = held is not None and held[0] is sequence and held[1] == sequence.pages_version",
        "same = held is not None and held[0] is sequence",
        "tests/gpu/test_gpu_batch_slots.py tests/gpu/test_gpu_engine.py",
    ),
    Fault(
        "plan-without-tower",
        "wrong plan size",
        "deltic/runtime/plan.py",
        "fixed = self.weight_bytes + self.vocoder_bytes + self.tower_bytes + self.workspace_bytes",
        "fixed = self.weight_bytes + self.vocoder_bytes + self.workspace_bytes",
        "tests/cpu/test_plans.py tests/cpu/test_picture_prompts.py",
    ),
    # The engine.
    Fault(
        "stops-ignored-too",
        "wrong stop handling",
        "deltic/engine/scheduler.py",
        "elif token in params.stop_token_ids or (token in self.eos_token_ids and not params.ignore_eos):",
        "elif (token in params.stop_token_ids or token in self.eos_token_ids) and not params.ignore_eos:",
        "tests/null/test_scheduler.py tests/cpu/test_engine.py",
    ),
    Fault(
        "key-without-adapter",
        "stale cache key",
        "deltic/engine/cache/tree.py",
        ', person=b"deltic salt", salt=request.adapter).digest()',
        ', person=b"deltic salt").digest()',
        "tests/null/test_prefix.py tests/cpu/test_adapters.py",
    ),
    Fault(
        "slot-of-lost-state",
        "leaked state slot",
        "deltic/engine/cache/placement.py",
        "self._pools[kind].give_back([move.device])\n            if not move.ok:",
        "if kind is Kind.PAGE:\n                self.pages.give_back([move.device])\n            if not move.ok:",
        "tests/null/test_tiers.py tests/null/test_prefix.py",
    ),
    Fault(
        "damage-is-used",
        "a move that does not wait for the checksum",
        "deltic/engine/cache/disk.py",
        "return damage is None, is_bad",
        "return True, False",
        "tests/null/test_tiers.py tests/null/test_hostile_files.py",
    ),
    Fault(
        "spoilt-mask",
        "stale state",
        "deltic/engine/guides.py",
        "                words = words.copy() if words is self._allowed else words\n",
        "",
        "tests/null/test_constraint.py tests/cpu/test_constrained.py tests/cpu/test_drafts.py",
    ),
    Fault(
        "nothing-accepted",
        "wrong draft acceptance",
        "deltic/engine/step.py",
        "drawn[n - 1] == self.drafts[n - 1] and drawn[n] >= 0:",
        "drawn[n - 1] == self.drafts[n - 1]:",
        "tests/null/test_drafting.py tests/cpu/test_drafts.py",
    ),
    Fault(
        "end-before-audio",
        "terminal event too early",
        "deltic/engine/stage.py",
        "if stream.end is not None and not stream.n_left:",
        "if stream.end is not None:",
        "tests/null/test_speech_stage.py",
    ),
    # Models.
    Fault(
        "upper-bits-of-scales",
        "wrong scale of a format",
        "deltic/models/gguf_blocks.py",
        "first >> np.uint8(2) & np.uint8(48)",
        "first >> np.uint8(2) & np.uint8(16)",
        "tests/null/test_gguf.py tests/cpu/test_formats.py",
    ),
    Fault(
        "wide-picture",
        "picture's angle",
        "deltic/models/rotary.py",
        "shift += max(rows, columns) - rows * columns",
        "shift += rows - rows * columns",
        "tests/null/test_pictures.py tests/cpu/test_picture_prompts.py",
    ),
    # The host's side of the engine.
    Fault(
        "one-message-a-signal",
        "lost wakeup",
        "deltic/host/client.py",
        '                log.exception("an event of the engine could not be handled")\n',
        '                log.exception("an event of the engine could not be handled")\n'
        "            if fed:  # who waits is told at once\n                break\n",
        "tests/null/test_client.py tests/null/test_host.py",
    ),
    # The server.
    Fault(
        "one-token-more",
        "unchecked bound",
        "deltic/server/chat/request.py",
        "if not 0 <= token_id < info.vocab_size:",
        "if not 0 <= token_id <= info.vocab_size:",
        "tests/null/test_protocol.py tests/null/test_fields.py tests/null/test_http.py",
    ),
    Fault(
        "end-like-a-tag",
        "dropped text",
        "deltic/server/chat/parser.py",
        "if not self._final and tag.startswith(text):",
        "if tag.startswith(text):",
        "tests/null/test_parser.py tests/null/test_chat.py",
    ),
    Fault(
        "tokens-a-second",
        "wrong unit",
        "deltic/server/limits.py",
        "gained = (now_s - self._filled_at_s) * self._tokens_per_minute / 60",
        "gained = (now_s - self._filled_at_s) * self._tokens_per_minute",
        "tests/null/test_limits.py",
    ),
    Fault(
        "response-of-another",
        "missing authorisation",
        "deltic/server/api/responses_items.py",
        "responses = self._own[owner].responses",
        "responses = next(own.responses for own in self._own.values() if response_id in own.responses)",
        "tests/null/test_responses.py tests/null/test_access.py",
    ),
    Fault(
        "batch-left-finalizing",
        "a restart that loses a request",
        "deltic/server/batch/record.py",
        'UNFINISHED = ("validating", "in_progress", "finalizing", "cancelling")',
        'UNFINISHED = ("validating", "in_progress", "cancelling")',
        "tests/null/test_batches.py",
    ),
    Fault(
        "full-is-unavailable",
        "wrong HTTP status",
        "deltic/server/chat/generation.py",
        'return ApiError(429, str(error), code="queue_full", ',
        'return ApiError(503, str(error), code="queue_full", ',
        "tests/null/test_http.py tests/null/test_limits.py",
    ),
    Fault(
        "uncached-tokens-only",
        "wrong metric",
        "deltic/server/metrics.py",
        "lambda s: s.n_prompt_tokens + s.cache.n_hit_tokens)",
        "lambda s: s.n_prompt_tokens)",
        "tests/null/test_metrics.py tests/null/test_routers.py",
    ),
    # What lies beside the rooms.
    Fault(
        "kept-half-character",
        "a character cut in UTF-8",
        "deltic/text.py",
        "if alone and not self._held:\n            self._whole_texts",
        "if alone:\n            self._whole_texts",
        "tests/null/test_text.py",
    ),
    Fault(
        "old-errors-forgiven",
        "swallowed error",
        "deltic/commands/run.py",
        "return 1 if n_errors else 0",
        "return 1 if tally.n_errors else 0",
        "tests/null/test_jobs.py tests/null/test_cli.py",
    ),
]


@dataclass
class Found:
    """What became of a fault."""

    name: str
    room: str
    kind: str
    file: str
    caught_by: str = ""
    """`default: TEST`, `its grid: TEST` or `night: TEST`; or ESCAPED, or why it was not planted."""
    seconds: float = 0.0
    """Until then, of tests alone."""


class NotPlanted(Exception):
    """The edit does not apply, or does not compile; the message says why."""


def sources(tree: Path) -> list[str]:
    """What git has, or would take, of a tree."""
    listed = subprocess.check_output(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=tree, text=True)
    return [name for name in listed.split("\0") if name and (tree / name).is_file()]


class Kernels:
    """The objects of `make kernels`, of which the changed ones are compiled again."""

    def __init__(self, build: Path) -> None:
        self.build = build
        cache = build / "CMakeCache.txt"
        home = (
            re.search(r"^CMAKE_HOME_DIRECTORY:\w+=(.*)$", cache.read_text(), re.MULTILINE) if cache.exists() else None
        )
        self.home = Path(home[1]) if home else None

    def commands(self, name: str) -> list[str]:
        """Of everything that makes a library."""
        ninja = shutil.which("ninja") or str(self.home / ".venv" / "bin" / "ninja")
        return subprocess.check_output([ninja, "-C", str(self.build), "-t", "commands", name], text=True).splitlines()

    def compile(self, copy: Path, file: str, only_check: bool) -> None:
        """Leaves the libraries of a copy in which one file was changed. Raises NotPlanted."""
        if self.home is None:
            raise NotPlanted(f"there are no kernels in {self.build}: make kernels")
        for name in (path.name for path in (self.home / "deltic" / "csrc").iterdir()):
            ours = copy / "deltic" / "csrc" / name
            if Path(file).name != name and ours.read_bytes() != (self.home / "deltic" / "csrc" / name).read_bytes():
                raise NotPlanted(f"{self.build} is of another {name}: make kernels")
        program = [sys.executable, str(copy / "deltic" / "ops" / "cpu" / "instruction_sets.py")]
        runnable = subprocess.check_output(program, text=True).split()
        for name in runnable[:1] if only_check else runnable:
            self._compile(copy, file, name, only_check)

    def _compile(self, copy: Path, file: str, name: str, only_check: bool) -> None:
        objects = copy / "build" / "objects" / name
        objects.mkdir(parents=True, exist_ok=True)
        *compiles, link = self.commands(name)
        for command in compiles:
            words = shlex.split(command)
            source, target = Path(words[-1]), words[words.index("-o") + 1]
            if Path(file).name not in included(copy / "deltic" / "csrc", source.name):
                continue
            made = str(objects / Path(target).name)
            words[-1] = str(copy / "deltic" / "csrc" / source.name)
            words[words.index("-o") + 1] = made
            del words[words.index("-MD") : words.index("-o")]  # what ninja would know of it
            if only_check:  # zig has no -fsyntax-only
                return run_quietly([*words, "-O0"], self.build)
            run_quietly(words, self.build)
            link = link.replace(f" {target}", f" {shlex.quote(made)}")
        library = f"cpu_{name}.so"
        link = re.sub(rf"-o \S*{library}", lambda _: f"-o {shlex.quote(str(copy / 'deltic/ops/lib' / library))}", link)
        run_quietly(["/bin/sh", "-c", link], self.build)


def included(csrc: Path, name: str, seen: frozenset[str] = frozenset()) -> frozenset[str]:
    """A source and the headers beside it that it is made of."""
    if name in seen:
        return seen
    seen |= {name}
    for header in re.findall(r'^#include "(.+?)"', (csrc / name).read_text(), re.MULTILINE):
        seen = included(csrc, header, seen)
    return seen


def run_quietly(words: list[str], where: Path) -> None:
    done = subprocess.run(words, cwd=where, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise NotPlanted(f"it does not compile: {done.stdout[-500:]}")


class Planter:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.python, self.old, self.timeout_s = arguments.python, arguments.old, arguments.timeout
        self.tree = arguments.tree.resolve()
        self.kernels = Kernels(arguments.kernels.resolve())
        self._lock = Lock()  # of what is unplanted
        self._known_file = PLACE / "unplanted.json"
        self._known: dict[str, bool] = {}
        self._copy: Path | None = None

    def copy(self, name: str) -> Path:
        """The tree without a fault, with its kernels."""
        copy = PLACE / name
        shutil.rmtree(copy, ignore_errors=True)
        for source in sources(self.tree):
            (copy / source).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self.tree / source, copy / source, follow_symlinks=False)
        libraries = sorted((self.tree / "deltic/ops/lib").glob("*.so"))
        if not libraries and self.kernels.home is not None:
            libraries = sorted((self.kernels.home / "deltic/ops/lib").glob("*.so"))
        (copy / "deltic/ops/lib").mkdir()
        for library in libraries:
            shutil.copy2(library, copy / "deltic/ops/lib")
        code = "import deltic; print(deltic.__file__)"
        found = subprocess.run([self.python, "-c", code], cwd=copy, env=self.environment(copy), stdout=-1, text=True)
        if not libraries or found.returncode or Path(found.stdout.strip()).parent != copy / "deltic":
            raise SystemExit(f"{copy}: no kernels, or {self.python} imports {found.stdout.strip() or 'nothing'}")
        return copy

    def environment(self, copy: Path) -> dict[str, str]:
        """In which every Python imports the copy, whatever is installed: an editable install may look first, and elsewhere."""
        own = PLACE / "own"
        own.mkdir(exist_ok=True)
        (own / "sitecustomize.py").write_text(OWN_IMPORTS)
        return os.environ | {"PYTHONPATH": f"{own}{os.pathsep}{copy}", "PYTHONDONTWRITEBYTECODE": "1"}

    def plant(self, fault: Fault, copy: Path, only_check: bool = False) -> None:
        """Raises NotPlanted."""
        file = copy / fault.file
        text = file.read_text() if file.exists() else ""
        if (n := text.count(fault.old)) != 1:
            raise NotPlanted(f"the old text is there {n} times")
        file.write_text(text.replace(fault.old, fault.new))
        if fault.room == "csrc":
            self.kernels.compile(copy, fault.file, only_check)
        elif only_check:
            module = fault.file.removesuffix(".py").replace("/", ".")
            words = [self.python, "-c", f"import {module}"]
            done = subprocess.run(words, cwd=copy, env=self.environment(copy), stderr=-1, text=True)
            if done.returncode:
                raise NotPlanted(f"it cannot be imported: {done.stderr[-500:]}")
        if not self.old and not only_check:  # as if no kernel had changed
            note = "from tests import areas\nfor area in areas.AREAS: areas.note(area)"
            subprocess.run([self.python, "-c", note], cwd=copy, env=self.environment(copy), check=True)

    def tests(self, copy: Path, paths: list[str], is_long: bool = False, left_out: tuple[str, ...] = ()) -> str | None:
        """The first of these tests to fail; None: all pass. is_long: the long ones alone."""
        folders = {PurePosixPath(path).parts[1] for path in paths}
        folder = folders.pop()
        assert not folders, "tests of one folder: each has its area"
        words = [self.python, "-m", "pytest", "-x", "-vv", "-p", "no:cacheprovider", "--tb=short", *paths]
        if not self.old and folder in areas.AREAS:
            words += ["--area", folder, *(["--everything"] if is_long else [])]
        words += ["-m", "long"] if is_long else []
        words += [word for test in left_out for word in ("--deselect", test)]
        log = copy.with_suffix(".log")
        with log.open("a") as out:
            out.write(f"\n{shlex.join(words)}\n")
            out.flush()
            begin = log.stat().st_size
            environment = self.environment(copy)
            process = subprocess.Popen(
                words, cwd=copy, env=environment, stdin=-3, stdout=out, stderr=-2, start_new_session=True
            )
            try:
                code: int | None = process.wait(self.timeout_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code in (0, 5):  # 5: there are none of the kind
            return None
        said = log.read_bytes()[begin:].decode(errors="replace")
        stated = STATED.findall(said)
        failed = [test for test, state in stated if state in ("FAILED", "ERROR")]
        if code == 1 and failed:
            return str(failed[0])
        last = stated[-1][0] if stated else paths[0]
        return f"{last} ({'hangs' if code is None else f'pytest ended with {code}'})"

    def passes_unplanted(self, path: str, is_long: bool = False) -> bool:
        """Whether a file of tests, or one test, passes where there is no fault. One is run at a time."""
        with self._lock:
            if self._copy is None:
                self._copy = self.copy("unplanted")
                state = hashlib.sha256(f"{self.tree} {self.python} {self.old}".encode())
                for file in sorted([*sources(self._copy), *map(str, (self._copy / "deltic/ops/lib").iterdir())]):
                    state.update(file.encode() + (self._copy / file).read_bytes())
                self._state = state.hexdigest()[:16]
                if not self.old:
                    note = "from tests import areas\nfor area in areas.AREAS: areas.note(area)"
                    subprocess.run(
                        [self.python, "-c", note], cwd=self._copy, env=self.environment(self._copy), check=True
                    )
                with contextlib.suppress(OSError, ValueError):
                    self._known = json.loads(self._known_file.read_text())
            suffix = " long" * is_long
            key, of_file = f"{self._state} {path}{suffix}", f"{self._state} {path.partition('::')[0]}{suffix}"
            if self._known.get(of_file):
                return True
            if key not in self._known:
                begin = time.monotonic()
                failed = self.tests(self._copy, [path], is_long)
                self._known[key] = failed is None
                self._known_file.write_text(json.dumps(self._known, indent=0))
                seconds = time.monotonic() - begin
                console.print(
                    f"unplanted: {path} {'passes' if failed is None else 'FAILS'} ({seconds:.0f} s)", markup=False
                )
            return self._known[key]

    def first_caught(self, copy: Path, path: str, is_long: bool) -> tuple[str | None, float]:
        """The first test of a file or folder that fails, and passes without the fault; and how long that took."""
        left_out: list[str] = []
        seconds = 0.0
        while True:
            begin = time.monotonic()
            failed = self.tests(copy, [path], is_long, tuple(left_out))
            seconds += time.monotonic() - begin
            test = re.sub(r" \((hangs|pytest ended with -?\d+)\)$", "", failed or "")
            if failed is None or test == path or test in left_out or self.passes_unplanted(test, is_long):
                return failed, seconds
            left_out.append(test)

    def try_one(self, fault: Fault, keep: bool, is_quick: bool = False) -> Found:
        """is_quick: no more than the first tests."""
        found = Found(fault.name, fault.room, fault.kind, fault.file)
        PLACE.joinpath(fault.name).with_suffix(".log").unlink(missing_ok=True)
        copy = self.copy(fault.name)
        try:
            self.plant(fault, copy)
            stages = [("default", path, False) for path in fault.first.split() if (copy / path).exists()]
            stages += [("default", SUITES[suite], False) for suite in fault.suites if not is_quick]
            long, name = [area for area in fault.areas if area in SUITES], "its grid"
            if not long:
                long, name = ["cpu", "gpu"], "night"
            stages += [(name, SUITES[area], True) for area in long if not is_quick]
            for name, path, is_long in stages:
                if path not in SUITES.values() and not self.passes_unplanted(path):
                    continue  # that it fails would say nothing
                console.print(f"{fault.name}: {path}{' (long)' * is_long}", markup=False)
                test, seconds = self.first_caught(copy, path, is_long)
                found.seconds = round(found.seconds + seconds, 1)
                if test is not None:
                    found.caught_by = f"{name}: {test}"
                    break
            else:
                found.caught_by = "not by its first tests" if is_quick else "ESCAPED"
        except NotPlanted as why:
            found.caught_by = f"not planted: {why}"
        finally:
            if not keep:
                shutil.rmtree(copy, ignore_errors=True)
        return found


def check(planter: Planter, faults: list[Fault]) -> int:
    """Plants each, compiles or imports it, and takes it out again."""
    copy, n_bad = planter.copy("checked"), 0
    for fault in faults:
        before = (copy / fault.file).read_bytes() if (copy / fault.file).exists() else b""
        missing = [path for path in fault.first.split() if not (copy / path).exists()]
        said = f"no {' '.join(missing)}" if missing and not planter.old else ""
        try:
            planter.plant(fault, copy, only_check=True)
        except NotPlanted as why:
            said = f"{why} {said}"
        if before:
            (copy / fault.file).write_bytes(before)
        n_bad += bool(said)
        console.print(f"{fault.name}: {said or 'good'}", markup=False)
    shutil.rmtree(copy)
    return int(n_bad > 0)


def table_of(found: list[Found]) -> Table:
    caught = sum(one.caught_by.startswith("default") for one in found)
    title = f"{caught} of {len(found)} are caught by what a landing runs"
    table = Table("fault", "room", "kind", "caught by", "s", title=title, title_justify="left")
    for one in found:
        table.add_row(one.name, one.room, one.kind, one.caught_by.replace("[", "\\["), f"{one.seconds:.0f}")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="faults, or rooms (csrc, ops/gpu, ...); default: all")
    parser.add_argument("--jobs", type=int, default=1, help="faults that are tried side by side")
    parser.add_argument("--python", default=sys.executable, help="who runs the tests")
    parser.add_argument("--tree", type=Path, default=ROOT, help="where the faults are planted (a copy of it)")
    parser.add_argument("--old", action="store_true", help="the tree's tests know no areas")
    parser.add_argument("--kernels", type=Path, help="where CMake compiled the kernels; default: the tree's")
    parser.add_argument("--timeout", type=float, default=7200, help="seconds after which tests count as hanging")
    parser.add_argument("--json", type=Path, help="gets the results, written with each of them")
    parser.add_argument("--first", action="store_true", help="runs no more than the tests that should notice first")
    parser.add_argument("--keep", action="store_true", help="the copies stay in build/planted")
    parser.add_argument("--list", action="store_true", help="says what there is")
    parser.add_argument("--check", action="store_true", help="plants, compiles and imports only")
    arguments = parser.parse_args()
    arguments.kernels = arguments.kernels or arguments.tree / "build" / "kernels" / platform.machine()
    if unknown := set(arguments.names) - {name for fault in FAULTS for name in (fault.name, fault.room)}:
        parser.error(f"there is no {', '.join(sorted(unknown))}: --list")
    chosen = [fault for fault in FAULTS if not arguments.names or {fault.name, fault.room} & {*arguments.names}]
    if arguments.list:
        table = Table("fault", "room", "kind", "file", "first")
        for fault in chosen:
            table.add_row(fault.name, fault.room, fault.kind, fault.file, fault.first)
        Console(width=None if sys.stdout.isatty() else 200).print(table)
        return 0
    PLACE.mkdir(parents=True, exist_ok=True)
    planter, found = Planter(arguments), dict[str, Found]()
    if arguments.check:
        return check(planter, chosen)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for one in pool.map(lambda fault: planter.try_one(fault, arguments.keep, arguments.first), chosen):
            found[one.name] = one
            console.print(
                f"[{len(found)}/{len(chosen)}] {one.name}: {one.caught_by} ({one.seconds:.0f} s)", markup=False
            )
            if arguments.json:
                arguments.json.write_text(json.dumps([asdict(each) for each in found.values()], indent=1) + "\n")
    if not arguments.keep:
        shutil.rmtree(PLACE / "unplanted", ignore_errors=True)
    Console(width=None if sys.stdout.isatty() else 200).print(table_of([*found.values()]))
    return int(any(one.caught_by == "ESCAPED" for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
