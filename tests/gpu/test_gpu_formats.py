"""Weights in every format on the GPU: what is put into memory is read back, and multiplied as its values say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deltic.ops.formats import WEIGHT_FORMATS
from deltic.ops.gpu.weight import DeviceStore, unpack
from deltic.ops.matrix import Matrix
from tests.quantised_rows import random_rows

NAMES = [name for name in WEIGHT_FORMATS if name != "bf16"]


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_read_back(device: str, name: str) -> None:
    store = DeviceStore(device)
    for n, k in ((5, 96), (37, 512)):
        w = Matrix.empty(n, k, WEIGHT_FORMATS[name], "rows", 2, store.empty)
        rows = [random_rows(name, n, k, seed) for seed in (0, 1)]
        for i, each in enumerate(rows):
            store.put(w.whole.one(i), each)
        found = unpack(w.whole).cpu().numpy()
        assert np.array_equal(found.view(np.int32), np.stack([each.values() for each in rows]).view(np.int32))
