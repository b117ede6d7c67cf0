"""Settings: every value is checked wherever it came from, and the machine is asked the right questions."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from dataclasses import fields, replace
from fnmatch import fnmatch
from pathlib import Path

import pytest

from deltic.commands.endpoint import flags
from deltic.commands.flags import add_flags
from deltic.config import ConfigError, EngineConfig, ServerConfig, pinned_cpus, without_foreign
from deltic.config_sources import check_environment, resolve
from deltic.machine import MAX_THREADS, free_memory, n_oom_kills, n_usable_cpus
from deltic.models.checkpoint import ALL_FILES, TEXT_FILES
from deltic.models.qwen.adapters import MAX_RANK
from deltic.ops.geometry import MAX_WINDOW


def test_flags_over_variables_over_defaults() -> None:
    environ = {"DELTIC_THREADS": "3", "DELTIC_SEED": "4"}
    config = resolve(EngineConfig, {"seed": 5}, environ)
    assert (config.threads, config.seed, config.max_step_tokens) == (3, 5, None)
    keys = resolve(ServerConfig, {}, {"DELTIC_API_KEY": "one, two"}).api_key
    assert keys == ("one", "two")


def test_home_is_known_whoever_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for given, environ, table in (
        ({"cache_dir": "~/cache"}, {}, {}),
        ({"cache_dir": Path("~/cache")}, {}, {}),
        ({}, {"DELTIC_CACHE_DIR": "~/cache"}, {}),
        ({}, {}, {"cache_dir": "~/cache"}),
    ):
        assert resolve(EngineConfig, given, environ, table).cache_dir == Path("/home/me/cache")


def test_a_path_may_be_given_as_a_text() -> None:
    given = resolve(EngineConfig, {"cache_dir": "/somewhere"}, {"DELTIC_WEIGHTS_CACHE": "/else"})
    assert (given.cache_dir, given.weights_cache) == (Path("/somewhere"), Path("/else"))


@pytest.mark.parametrize(
    ("given", "environ"),
    [
        ({"api_key": [""]}, {}),
        ({"api_key": ["good", " "]}, {}),
        ({}, {"DELTIC_API_KEY": ""}),
        ({}, {"DELTIC_API_KEY": "good,"}),
    ],
)
def test_an_empty_key_is_not_an_open_door(given: dict[str, list[str]], environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"--api-key \(or DELTIC_API_KEY\) has an empty value"):
        resolve(ServerConfig, given, environ)


@pytest.mark.parametrize(
    ("cls", "variable", "text", "complaint"),
    [
        (EngineConfig, "MEMORY_GB", "nan", "--memory-gb nan: must be at least 0.01"),
        (EngineConfig, "MEMORY_GB", "inf", "--memory-gb inf"),
        (EngineConfig, "MAX_ITL_MS", "nan", "--max-itl-ms nan"),
        (EngineConfig, "THREADS", "257", "--threads 257: must be from 1 to 256"),
        (EngineConfig, "THREADS", "two", "DELTIC_THREADS='two': expected int"),
        (EngineConfig, "PIN_THREADS", "maybe", "DELTIC_PIN_THREADS='maybe': expected on or off"),
        (ServerConfig, "DRAIN_S", "nan", "--drain-s nan"),
        (ServerConfig, "MAX_BODY_MB", "nan", "--max-body-mb nan"),
        (ServerConfig, "PORT", "65536", "--port 65536: must be from 0 to 65535"),
        (ServerConfig, "PORT", "-1", "--port -1"),
        (ServerConfig, "LOG_LEVEL", "loud", "--log-level 'loud': must be one of debug, info"),
    ],
)
def test_a_value_out_of_range_is_refused(
    cls: type[EngineConfig] | type[ServerConfig], variable: str, text: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        resolve(cls, {}, {f"DELTIC_{variable}": text})


def test_bounds_are_those_of_what_they_bound() -> None:
    """`config.py` imports neither kernels nor models, so it repeats their constants."""
    most = {field.name: field.metadata.get("most") for field in fields(EngineConfig)}
    assert most["max_drafts"] == MAX_WINDOW - 1  # the window of a draft has a row for the token before it
    assert most["max_lora_rank"] == MAX_RANK


def test_settings_that_exclude_each_other_are_refused_however_they_are_made() -> None:
    with pytest.raises(ConfigError, match="--dummy makes random weights"):
        EngineConfig(model="m", dummy="qwen3.5-0.8b")
    with pytest.raises(ConfigError, match="--tp-invariant 2: with --tensor-parallel 4 give one of 4, 8"):
        replace(EngineConfig(tensor_parallel=4), tp_invariant=2)


def test_what_kubernetes_says_of_a_service_of_our_name_is_no_setting() -> None:
    of_services = {
        "DELTIC_SERVICE_HOST": "10.0.0.7",
        "DELTIC_SERVICE_PORT": "8000",
        "DELTIC_SERVICE_PORT_HTTP": "8000",
        "DELTIC_PORT": "tcp://10.0.0.7:8000",
        "DELTIC_PORT_8000_TCP": "tcp://10.0.0.7:8000",
        "DELTIC_PORT_8000_TCP_PROTO": "tcp",
        "DELTIC_PORT_8000_TCP_PORT": "8000",
        "DELTIC_PORT_8000_TCP_ADDR": "10.0.0.7",
        "DELTIC_API_SERVICE_HOST": "10.0.0.8",
        "DELTIC_API_PORT": "udp://10.0.0.8:53",
        "DELTIC_API_PORT_53_UDP_ADDR": "10.0.0.8",
    }
    check_environment(of_services)
    assert resolve(ServerConfig, {}, of_services) == ServerConfig()
    assert resolve(ServerConfig, {}, of_services | {"DELTIC_PORT": "8001"}).port == 8001
    for typo in ("DELTIC_PORTS", "DELTIC_SERVICE", "DELTIC_PORT_8000"):
        with pytest.raises(ConfigError, match=f"{typo} is not a setting"):
            check_environment({typo: "8000"})
    with pytest.raises(ConfigError, match="DELTIC_PORT='http://x': expected int"):
        resolve(ServerConfig, {}, {"DELTIC_PORT": "http://x"})


def test_no_more_threads_than_the_pool_has_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltic.machine.CPUS", tuple(range(1000)))
    assert n_usable_cpus() <= MAX_THREADS


def test_a_switch_is_a_flag_without_a_value() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, EngineConfig)
    for words, pinned in (["--pin-threads"], True), (["--no-pin-threads"], False):
        given = vars(parser.parse_args(words))
        assert given == {"pin_threads": pinned}
        assert flags(EngineConfig, given) == words, "a server started for a command gets it on"
    for text, pinned in (("on", True), ("1", True), ("True", True), ("off", False), ("0", False), ("no", False)):
        assert resolve(EngineConfig, {}, {"DELTIC_PIN_THREADS": text}).pin_threads is pinned


def test_pinned_threads_get_the_first_cpus_of_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltic.config.CPUS", (2, 4, 9))
    assert pinned_cpus(2) == (2, 4)
    assert resolve(EngineConfig, {"pin_threads": True, "threads": 3}, {}).pin_threads
    with pytest.raises(
        ConfigError, match=r"--threads 4 on 3 CPUs .*\. Give at most --threads 3, or leave --pin-threads out"
    ):
        resolve(EngineConfig, {"pin_threads": True, "threads": 4}, {})


V1 = "4:memory:/pod/one\n3:cpu,cpuacct:/pod/one\n0::/pod/one\n"


@pytest.mark.parametrize(
    ("groups", "files", "n_cpus"),
    [
        ("0::/\n", {}, 8),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "200000 100000\n", "a/cpu.max": "300000 100000\n"}, 2),
        ("0::/a\n", {"a/b/cpu.max": "100000 100000\n", "c/cpu.max": "100000 100000\n"}, 8),
        ("0::/host/path\n", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/../beside\n", {"cpu.max": "400000 100000\n"}, 4),
        (V1, {"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 8),
        (V1, {"cpu/cpu.cfs_quota_us": "600000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 6),
        (V1, {"cpu/pod/cpu.cfs_quota_us": "150000\n", "cpu/pod/cpu.cfs_period_us": "50000\n"}, 3),
        (V1, {"unified/pod/one/cpu.max": "500000 100000\n"}, 5),
        (V1, {"cpu/pod/cpu.cfs_quota_us": "150000\n"}, 8),
        (None, {"cpu.max": "200000 100000\n"}, 2),
    ],
    ids=["none", "v2 max", "v2", "v2 half", "v2 parent", "v2 nested", "v2 others", "v2 not mounted", "v2 outside",
         "v1 no limit", "v1 root", "v1 parent", "both", "v1 half a limit", "no list of groups"],
)  # fmt: skip
def test_threads_are_those_that_the_container_pays_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str | None, files: dict[str, str], n_cpus: int
) -> None:
    monkeypatch.setattr("deltic.machine.CPUS", tuple(range(8)))
    assert n_usable_cpus(*machine(tmp_path, files, groups)) == n_cpus


def machine(root: Path, files: dict[str, str], groups: str | None) -> tuple[Path, Path]:
    """The directories of processes and of control groups of a machine with 8,192,000 bytes available; `files` are the groups'."""
    texts = {f"cgroup/{name}": text for name, text in files.items()}
    texts["proc/meminfo"] = "MemTotal:  9000 kB\nMemAvailable:    8000 kB\n"
    for name, text in (texts | ({"proc/self/cgroup": groups} if groups else {})).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root / "proc", root / "cgroup"


STAT = "anon 1000000\ninactive_file 500000\nactive_file 20000\n"
STAT_V1 = "inactive_file 7\ntotal_inactive_file 400000\ntotal_active_file 100000\n"
UNLIMITED_V1 = "9223372036854771712\n"


def v2(group: str, most: str, used: int, high: str = "max") -> dict[str, str]:
    return {
        f"{group}memory.max": f"{most}\n",
        f"{group}memory.high": f"{high}\n",
        f"{group}memory.current": f"{used}\n",
        f"{group}memory.stat": STAT,
    }


def v1(group: str, most: str, used: int) -> dict[str, str]:
    return {
        f"memory/{group}memory.limit_in_bytes": most,
        f"memory/{group}memory.usage_in_bytes": f"{used}\n",
        f"memory/{group}memory.stat": STAT_V1,
    }


SERVICE = "0::/system.slice/deltic.service\n"


@pytest.mark.parametrize(
    ("groups", "files", "free", "limit"),
    [
        (None, {}, 8_192_000, ""),
        (None, v2("", "max", 1), 8_192_000, ""),
        (None, v2("", "4000000", 1_520_000), 3_000_000, "memory.max of the control group /, 0.0 GB"),
        (None, v2("", "1000000", 1_900_000), 0, "memory.max"),
        (None, v1("", "4000000\n", 1_500_000), 3_000_000, "memory.limit_in_bytes of the control group /memory,"),
        (None, v1("", UNLIMITED_V1, 1_500_000), 8_192_000, ""),
        (SERVICE, v2("system.slice/deltic.service/", "2000000", 520_000), 2_000_000,
         "memory.max of the control group /system.slice/deltic.service,"),
        (SERVICE, v2("system.slice/", "5000000", 1_520_000) | v2("system.slice/deltic.service/", "6000000", 520_000),
         4_000_000, "memory.max of the control group /system.slice,"),
        (SERVICE, v2("system.slice/deltic.service/", "5000000", 520_000, high="3000000"), 3_000_000, "memory.high"),
        (SERVICE, v2("system.slice/another.service/", "1000000", 520_000), 8_192_000, ""),
        ("4:memory:/pod/one\n", v1("pod/", "4000000\n", 1_500_000) | v1("pod/one/", UNLIMITED_V1, 500_000) | v1("", UNLIMITED_V1, 9),
         3_000_000, "memory.limit_in_bytes of the control group /memory/pod,"),
        ("4:memory:/on/the/host\n", v1("", "4000000\n", 1_500_000), 3_000_000, "memory.limit_in_bytes"),
    ],
    ids=["no limit", "v2 max", "v2", "v2 over", "v1", "v1 no limit", "v2 own", "v2 parent", "v2 high", "v2 others",
         "v1 parent", "v1 not mounted"],
)  # fmt: skip
def test_free_memory_is_the_least_that_a_control_group_leaves_with_the_file_cache_counted_in(
    tmp_path: Path, groups: str | None, files: dict[str, str], free: int, limit: str
) -> None:
    found = free_memory(*machine(tmp_path, files, groups))
    assert found.bytes == free and found.limit.startswith(limit) and bool(found.limit) == bool(limit)


def test_a_limit_of_addresses_bounds_memory_too() -> None:
    """What Python has mapped already does not count as free."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30)); "
        "from deltic.machine import free_memory; print(*free_memory(), sep='|')"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    free, limit = said.strip().split("|")
    assert 1 << 30 < int(free) < 3 << 30 and limit == "RLIMIT_AS (ulimit -v), 3.2 GB"


@pytest.mark.parametrize(
    ("groups", "files", "n"),
    [
        (SERVICE, {"system.slice/deltic.service/memory.events": "oom 3\noom_kill 2\n", "memory.events": "oom_kill 9\n"}, 2),
        ("4:memory:/pod\n", {"memory/pod/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n"}, 1),
        (SERVICE, {}, None),
    ],
    ids=["v2", "v1", "not told"],
)  # fmt: skip
def test_the_kernel_tells_what_it_ended_for_want_of_memory(
    tmp_path: Path, groups: str, files: dict[str, str], n: int | None
) -> None:
    assert n_oom_kills(*machine(tmp_path, files, groups)) == n


def test_a_download_of_the_whole_checkpoint_has_every_file_the_server_reads() -> None:
    assert "chat_template.json" in TEXT_FILES
    missing = [name for name in TEXT_FILES if not any(fnmatch(name, pattern) for pattern in ALL_FILES)]
    assert not missing


@pytest.mark.parametrize(
    ("settings", "device", "kind", "complaint"),
    [
        ({"weights_cache": Path("/here")}, "cuda", "text", "--weights-cache /here is for the CPU, and this model runs on a GPU. Leave it out"),
        ({"threads": 4}, "cuda", "speech", "--threads 4 is for the CPU"),
        ({"pin_threads": True}, "cuda", "text", "--pin-threads is for the CPU"),
        ({"quantize": "int8"}, "cuda", "speech", "--quantize int8 is for the CPU, .* Leave it out, or give --device cpu"),
        ({"lever": ("pdl=off",)}, "cpu", "text", "--lever pdl=off is for a GPU, .* Leave it out, or give --device cuda"),
        ({"voices_dir": Path("/here")}, "cpu", "text", "--voices-dir /here is for a speech model, and this is a text model"),
        ({"n_checkpoints": 4}, "cuda", "speech", "--n-checkpoints 4 is for a text model, and this is a speech model"),
    ],
)  # fmt: skip
def test_a_setting_that_means_nothing_here_is_refused(
    settings: dict[str, object], device: str, kind: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        without_foreign(EngineConfig(**settings), device, kind)
    other = ("cpu" if device == "cuda" else "cuda", "text" if kind == "speech" else "speech")
    assert without_foreign(EngineConfig(**settings), *other) == EngineConfig(**settings)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["text", "speech"])
def test_a_variable_is_left_out_where_it_means_nothing(device: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds for every model of a server, whatever its kind and device."""
    general = resolve(EngineConfig, {"max_num_seqs": 4, "cache_dir": Path("/here")}, {})
    assert without_foreign(general, device, kind) == general
    for setting, means in (
        ({"threads": 4}, device == "cpu"),
        ({"quantize": "int8"}, device == "cpu" or kind == "text"),
        ({"lever": ("pdl=off",)}, device == "cuda"),
        ({"n_checkpoints": 3}, kind == "text"),
        ({"state_dtype": "bfloat16"}, kind == "text"),
        ({"voices_dir": Path("/here")}, kind == "speech"),
    ):
        for name in setting:
            monkeypatch.setenv(f"DELTIC_{name.upper()}", "given")
        given = EngineConfig(**setting)
        assert without_foreign(given, device, kind) == (given if means else EngineConfig())
