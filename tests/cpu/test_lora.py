"""The products of adapters on every instruction set that runs here, against plain sums and between companies."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deltic.ops.arrays import Array, bfloat16, zeros
from deltic.ops.cpu.lora import (
    AdapterRows,
    Entries,
    adapter_rows,
    lora,
    lora_embed,
    lora_scratch,
    make_table,
    put_terms,
    terms_bytes,
)
from deltic.ops.cpu.program import Program, usable_instruction_sets
from tests.cpu.grid import grid
from tests.tensors import tensor_of

WIDTH, HEIGHT, N_ROWS = 96, 150, 9

SETS = usable_instruction_sets()
every_set = pytest.mark.parametrize("library", grid(SETS, SETS[:1], pytest.mark.long))


def allocate(name: str, size: tuple[int, ...], dtype: object) -> Array:
    return zeros(size, dtype)  # type: ignore[arg-type]


def term(rng: np.random.Generator, first: int, n: int, rank: int, k: int = WIDTH) -> SimpleNamespace:
    down, up = (rng.standard_normal(size, np.float32).astype(bfloat16) for size in ((1, rank, k), (1, n, rank)))
    return SimpleNamespace(first=first, down=down, up=up, scale=float(rng.uniform(0.1, 2)))


def table_of(adapters: list[list[SimpleNamespace]], is_embedding: bool = False) -> tuple[Array, list[Array]]:
    """Entries of one product, and the memory that they name."""
    table, memory = make_table(len(adapters), 1, allocate), []
    for slot, terms in enumerate(adapters):
        if terms:
            memory.append(zeros((terms_bytes(terms),), np.uint8))
            table[slot, 0] = put_terms(terms, memory[-1], is_embedding)
    return table, memory


def rows_of(slots: list[int]) -> AdapterRows:
    rows = adapter_rows("test", 200, allocate)
    rows.fill(np.array(slots, np.int32))
    return rows


def expected(x: torch.Tensor, terms: list[SimpleNamespace]) -> torch.Tensor:
    out = torch.zeros(len(x), HEIGHT)
    for one in terms:
        v = (one.scale * (x.float() @ tensor_of(one.down)[0].float().T)).bfloat16()
        out[:, one.first : one.first + one.up.shape[1]] += v.float() @ tensor_of(one.up)[0].float().T
    return out


@every_set
def test_rows_get_their_adapters_terms(library: str) -> None:
    """Ranks and rows that fill no panel, terms that leave columns out, an adapter without any, rows without one."""
    rng = np.random.default_rng(0)
    adapters = [[term(rng, 3, 40, 5), term(rng, 43, 100, 33)], [], [term(rng, 0, HEIGHT, 16)], [term(rng, 149, 1, 1)]]
    table, memory = table_of(adapters)
    scratch = lora_scratch(200, WIDTH, 40, allocate)
    slots = [0, -1, 2, 3, 0, 1, 2, -1] * 3 + [2] * 90
    x = rng.standard_normal((len(slots), WIDTH), np.float32).astype(bfloat16)
    before = rng.standard_normal((len(slots), HEIGHT), np.float32)

    def run(which: list[int]) -> Array:
        program, out = Program(2, library=library), before[which]
        lora(program, x[which], out, Entries(table, 0), rows_of([slots[i] for i in which]), scratch)
        program.run()
        return out

    out = run(list(range(len(slots))))
    for i, slot in enumerate(slots):
        want = tensor_of(before[i : i + 1]) + (expected(tensor_of(x[i : i + 1]), adapters[slot]) if slot >= 0 else 0)
        torch.testing.assert_close(tensor_of(out[i : i + 1]), want, atol=0.2, rtol=1e-2)
        if slot < 0 or not adapters[slot]:
            assert (out[i] == before[i]).all()
    for which in ([0], [2, 5], [4, 1, 0, 3], list(range(24, len(slots)))):
        assert (run(which) == out[which]).all()
    assert memory


@every_set
def test_an_embedding_gets_the_column_of_its_id(library: str) -> None:
    rng = np.random.default_rng(1)
    one = term(rng, 0, HEIGHT, 7, k=50)
    table, memory = table_of([[one]], is_embedding=True)
    out = np.zeros((4, HEIGHT), np.float32)
    program = Program(2, library=library)
    ids = np.array([49, 3, -1, 0], np.int32)
    lora_embed(program, ids, out, Entries(table, 0), rows_of([0, -1, 0, 0]), lora_scratch(8, WIDTH, 7, allocate))
    program.run()
    for row, id in ((0, 49), (3, 0)):
        v = (one.scale * tensor_of(one.down)[0, :, id].float()).bfloat16().float()
        torch.testing.assert_close(tensor_of(out[row]), tensor_of(one.up)[0].float() @ v, atol=0.05, rtol=1e-2)
    assert not out[1:3].any()
    assert memory
