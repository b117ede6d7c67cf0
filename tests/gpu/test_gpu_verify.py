"""What `deltic verify` compares with transformers' layers: the residual stream of a prefill."""

from __future__ import annotations

import numpy as np
import pytest

from deltic.config import EngineConfig
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.device import Cpu
from deltic.verify.layers import residuals
from tests.tiny import tiny_checkpoint

pytest.importorskip("triton")
from deltic.runtime.gpu.device import Gpu


def test_the_residual_stream_is_that_of_a_cpu() -> None:
    ids = [17, 200, 3, 90, 41, 41, 7]
    config = EngineConfig(
        model=str(tiny_checkpoint("dense")), max_num_seqs=2, max_model_len=128, max_step_tokens=64, n_pages=4
    )
    found = residuals(build_runner(config, lambda stage, done: None, Gpu()), ids)
    expected = residuals(build_runner(config, lambda stage, done: None, Cpu()), ids)
    assert len(found) == len(expected) == 9
    for one, other in zip(found, expected, strict=True):
        assert one.shape == (7, 256)
        assert np.linalg.norm(one - other) < 0.03 * np.linalg.norm(other)
