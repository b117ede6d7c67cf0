"""Settings: every value is checked wherever it came from, and the machine is asked the right questions."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from deltic.config import (
    MAX_THREADS,
    ConfigError,
    EngineConfig,
    ServerConfig,
    free_memory_bytes,
    n_usable_cpus,
    resolve,
)
from deltic.models.checkpoint import ALL_FILES, TEXT_FILES

CSRC = Path(__file__).parents[2] / "deltic" / "csrc"


def test_flags_over_variables_over_defaults() -> None:
    environ = {"DELTIC_THREADS": "3", "DELTIC_SEED": "4"}
    config = resolve(EngineConfig, {"seed": 5}, environ)
    assert (config.threads, config.seed, config.max_step_tokens) == (3, 5, 512)
    keys = resolve(ServerConfig, {}, {"DELTIC_API_KEY": "one, two"}).api_key
    assert keys == ("one", "two")


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


def test_no_more_threads_than_the_pool_has_places(monkeypatch: pytest.MonkeyPatch) -> None:
    assert f"constexpr int MAX_THREADS = {MAX_THREADS};" in (CSRC / "pool.cpp").read_text()
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(1000)))
    assert n_usable_cpus() <= MAX_THREADS


def machine(root: Path, files: dict[str, str]) -> int:
    """Free memory of a machine with 8,000 kB available and these files under its cgroup root."""
    meminfo = root / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:    8000 kB\n")
    for name, text in files.items():
        path = root / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return free_memory_bytes(meminfo, root / "cgroup")


STAT = "anon 1000000\ninactive_file 500000\nactive_file 20000\n"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 8_192_000),
        ({"memory.max": "max\n", "memory.current": "1\n", "memory.stat": STAT}, 8_192_000),
        ({"memory.max": "4000000\n", "memory.current": "1520000\n", "memory.stat": STAT}, 3_000_000),
        ({"memory.max": "1000000\n", "memory.current": "1900000\n", "memory.stat": STAT}, 0),
        (
            {
                "memory/memory.limit_in_bytes": "4000000\n",
                "memory/memory.usage_in_bytes": "1500000\n",
                "memory/memory.stat": "inactive_file 7\ntotal_inactive_file 400000\ntotal_active_file 100000\n",
            },
            3_000_000,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/memory.usage_in_bytes": "1500000\n",
                "memory/memory.stat": "total_inactive_file 1\n",
            },
            8_192_000,
        ),
    ],
    ids=["no limit", "v2 max", "v2", "v2 over", "v1", "v1 no limit"],
)
def test_free_memory_is_what_the_container_leaves_with_the_file_cache_counted_in(
    tmp_path: Path, files: dict[str, str], free: int
) -> None:
    assert machine(tmp_path, files) == free


def test_a_download_of_the_whole_checkpoint_has_every_file_the_server_reads() -> None:
    assert "chat_template.json" in TEXT_FILES
    missing = [name for name in TEXT_FILES if not any(fnmatch(name, pattern) for pattern in ALL_FILES)]
    assert not missing
