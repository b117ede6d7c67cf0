"""Levers hold where they are bound, in every thread that works for who bound them; each changes what is planned or recorded."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from deltic.engine.events import ReplayStats
from deltic.ops.formats import WEIGHT_FORMATS
from deltic.ops.gpu import few_codes, hopper, launch
from deltic.ops.gpu.launch import Levers, allocate_on, bound_levers, launches
from deltic.ops.gpu.linear import k_splits, narrow_swiglu, silu_mul
from deltic.ops.gpu.moe import router_splits
from deltic.ops.gpu.weight import DeviceStore
from deltic.ops.matrix import Matrix
from deltic.runtime.build import build_runner
from deltic.runtime.gpu.buffers import Shares, gpu_workspace
from deltic.runtime.gpu.device import Gpu
from deltic.runtime.gpu.parallel import GpuThread
from deltic.runtime.gpu.record import record_all
from tests.gpu.matrices import in_rows
from tests.gpu.test_gpu_tensor_parallel import config_of, plan_of

OTHERS = Levers(pdl=False, split_k=False)


def record(body: Callable[[], object], device: str) -> Any:
    stream = torch.cuda.Stream() if device == "cuda" else None
    return record_all([body], stream, lambda done: None, ReplayStats())[0]


def test_nothing_is_recorded_without_levers(device: str) -> None:
    """A thread of its own has none: the defaults are not taken in silence."""
    x, out = torch.ones(2, 8, device=device), torch.zeros(2, 4, dtype=torch.bfloat16, device=device)

    def swiglu() -> None:
        silu_mul(x, out)

    with ThreadPoolExecutor(1) as pool:
        for call in (swiglu, lambda: k_splits(64, 1024), lambda: record(swiglu, device)):
            with pytest.raises(LookupError, match=r"within `with levers\.bound\(\):`"):
                pool.submit(call).result()
        assert not out.any()
        pool.submit(Levers().bound()(swiglu)).result()
    assert out.all()


def test_what_is_bound_ends_with_its_block() -> None:
    before = bound_levers()
    with pytest.raises(ValueError, match="inner"), OTHERS.bound():
        with Levers(hopper=False).bound():
            assert bound_levers() == Levers(hopper=False)
        assert bound_levers() is OTHERS
        raise ValueError("inner")
    assert bound_levers() is before


def test_a_thread_of_a_gpu_has_the_levers_of_who_asks_it() -> None:
    thread = GpuThread(torch.device("cpu"))
    with OTHERS.bound():
        asked = thread.start(bound_levers)
    assert asked.result() is OTHERS and thread.start(bound_levers).result() == Levers()


def test_a_recording_keeps_those_of_its_record(device: str) -> None:
    found: list[Levers] = []
    with Levers(graphs=False).bound():
        recording = record(lambda: found.append(bound_levers()), device)
    recording.run()
    assert found[-1] == Levers(graphs=False)


def _graphs(device: str) -> object:
    recording = record(lambda: None, device)
    return recording.graph is not None or (device == "cpu" and bound_levers().graphs)


def _run_ahead(device: str) -> object:
    return build_runner(config_of("dense"), lambda stage, done: None, Gpu(_settings())).levers.run_ahead


def _settings() -> tuple[str, ...]:
    """The levers that are bound, as a configuration has them."""
    return tuple(f"{name}={'on' if value else 'off'}" for name, value in vars(bound_levers()).items())


def _pdl(device: str) -> object:
    class Kernel:
        arg_names = ("x", "PDL")

        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda x, **meta: started.append(meta["PDL"])

    started: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "pdl_works", lambda: True)
        launch.launch(Kernel(), (1,), 0)
        launch.launch(Kernel(), (1,), 0, pdl=False)
    return started[0] and not started[1]


def _split_k(device: str) -> object:
    return k_splits(64, 4096) > 1 and router_splits(2048) > 1


def _silu_epilogue(device: str) -> object:
    x, w, out = (torch.zeros(n, k, dtype=torch.bfloat16, device=device) for n, k in ((2, 64), (128, 64), (2, 64)))
    n_before = launches.n
    narrow_swiglu(x, in_rows(w), out, gate_up=torch.zeros(1, 2, 128, device=device))
    return launches.n == n_before + 1


def _hopper(device: str) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hopper, "works", lambda: True)
        w = in_rows(torch.zeros(256, 1024, dtype=torch.bfloat16, device=device))
        pays = hopper.pays(64, [(w.whole, torch.zeros(2, 64, 256, device=device))], False, False)
        w = Matrix.empty(5120, 4096, WEIGHT_FORMATS["Q4_K"], "rows", 1, DeviceStore("meta").empty)
        assert pays == few_codes.pays(16, [(w.whole, torch.empty(2, 16, 5120, device="meta"))], False)
        return pays


def _shares() -> Shares:
    shares = gpu_workspace(plan_of("dense")[1], allocate_on("meta")).shares
    assert shares is not None
    return shares


def _fused_sums(device: str) -> object:
    return _shares().total is None


def _peer(device: str) -> object:
    return _shares().meeting is not None


WHAT = {name.removeprefix("_"): of for name, of in globals().items() if name.removeprefix("_") in vars(Levers())}
"""By lever, whether what it switches is planned or recorded."""


@pytest.mark.parametrize("name", vars(Levers()))
def test_each_lever_changes_what_is_recorded(name: str, device: str) -> None:
    if name == "graphs" and device == "cpu":
        pytest.skip("without a GPU nothing is replayed")
    with Levers(**{name: True}).bound():
        assert WHAT[name](device)
    with Levers(**{name: False}).bound():
        assert not WHAT[name](device)


def test_a_device_plans_by_its_own_levers() -> None:
    """Whatever is bound: the plan's bytes are those of its runner's buffers."""
    _, plan = plan_of("dense")
    with OTHERS.bound():
        whole, single = (Gpu((f"fused_sums={value}",), n_gpus=2).text.measure(plan) for value in ("on", "off"))
    assert "sums" not in whole and single["sums"] > 0
