"""`deltic run`: every line gets one result, and an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from deltic.__main__ import main
from deltic.batch_lines import parse
from tests.fake_openai import FakeOpenAI


def lines(n: int) -> list[dict[str, Any]]:
    return [{"custom_id": f"job {i}", "body": {"prompt": f"say {i}", "max_tokens": 2}} for i in range(n)]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_both_forms_are_answered_with_many_in_flight(tmp_path: Path):
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "model": "other"}
    source, out = write(tmp_path / "in", [*lines(30), chat]), tmp_path / "out"
    with FakeOpenAI(token_s=0.005) as server:
        assert main(["run", str(source), str(out), "--url", server.url, "--in-flight", "8"]) == 0
        assert server.max_open == 8
    rows = results(out)
    assert {row["custom_id"] for row in rows} == {f"job {i}" for i in range(30)} | {None}
    assert all(row["response"]["status_code"] == 200 and row["error"] is None for row in rows)
    assert {body["model"] for body in server.bodies} == {"fake", "other"}, "a model is filled in, not replaced"
    assert next(row for row in rows if row["line"] == 31)["response"]["body"]["choices"][0]["message"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "expected a JSON object"),
        (b'{"body": {"prompt": "x", "odd": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}", "not JSON"),
        (b'{"body": {"prompt": "x", "user": "\xff"}}', "not JSON"),
        (b"3", "expected a JSON object"),
        (b'{"body": 3}', "body: expected"),
        (b'{"custom_id": 3, "body": {}}', "custom_id"),
        (b'{"body": {"temperature": 1}}', "none of messages, prompt, state, questions, input"),
        (b'{"url": "/v1/images", "body": {}}', "/v1/images"),
        (b'{"method": "GET", "body": {"prompt": "x"}}', "GET"),
        (b'{"prompt": "x", "stream": true}', "stream"),
    ],
)
def test_a_bad_line_says_its_number_and_why(text, complaint):
    job = parse(text, 7)
    assert job.body is None
    assert job.error.startswith("line 7: ")
    assert complaint in job.error


def test_bad_lines_and_refused_requests_do_not_end_the_run(tmp_path: Path, capsys):
    source, out = tmp_path / "in", tmp_path / "out"
    write(source, [*lines(2), {"custom_id": "odd", "body": {"prompt": "x", "odd": 1}}, *lines(1)])
    source.write_bytes(source.read_bytes() + b"\nnonsense\n")
    with FakeOpenAI(refused=("odd",)) as server:
        assert main(["run", str(source), str(out), "--url", server.url]) == 1, "lines failed"
        by_line = {row["line"]: row for row in results(out)}
        assert sorted(by_line) == [1, 2, 3, 4, 6]
        assert by_line[3]["response"]["status_code"] == 400
        assert "odd" in by_line[3]["error"]["message"]
        assert "was used before" in by_line[4]["error"]["message"]
        assert by_line[6]["error"]["code"] == "bad_line"
        n_sent = len(server.bodies)
        assert main(["run", str(source), str(out), "--url", server.url]) == 1, "nothing to do, errors are left"
        assert (len(server.bodies), len(results(out))) == (n_sent, 5)
        assert "it holds 3 errors" in capsys.readouterr().err


def test_errors_are_tried_again_where_asked(tmp_path: Path, capsys):
    source, out = write(tmp_path / "in", lines(5)), tmp_path / "out"
    with FakeOpenAI(statuses=[200, 404, 200, 400]) as server:
        arguments = ["run", str(source), str(out), "--url", server.url, "--in-flight", "1"]
        assert main(arguments) == 1
        assert main([*arguments, "--retry-errors"]) == 0
        assert len(server.bodies) == 7, "what was answered is not asked for again"
        assert main(arguments) == 0
    assert "5 of 5" in capsys.readouterr().err
    assert sorted(row["line"] for row in results(out)) == [1, 2, 3, 4, 5]
    assert not any(row["error"] for row in results(out))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_errors_are_tried_again_in_the_same_place(tmp_path: Path):
    """A link stays a link, and the file as private or as public as it was."""
    source, out, target = write(tmp_path / "in", lines(2)), tmp_path / "out", tmp_path / "there" / "out"
    target.parent.mkdir()
    out.symlink_to(target)
    with FakeOpenAI(statuses=[200, 404]) as server:
        arguments = ["run", str(source), str(out), "--url", server.url, "--in-flight", "1"]
        assert main(arguments) == 1
        target.chmod(0o660)
        assert main([*arguments, "--retry-errors"]) == 0
    assert out.is_symlink() and len(results(target)) == 2
    assert target.stat().st_mode & 0o777 == 0o660
    assert [path.name for path in target.parent.iterdir()] == ["out"]


def test_a_given_model_is_that_of_every_line(tmp_path: Path):
    """A file for OpenAI's batch API names one in each."""
    told = [{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
             "body": {"model": "gpt-5", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}}]  # fmt: skip
    source, out = write(tmp_path / "in", [*told, *lines(1)]), tmp_path / "out"
    with FakeOpenAI() as server:
        assert main(["run", str(source), str(out), "--url", server.url, "--model", "ours"]) == 0
    assert [body["model"] for body in server.bodies] == ["ours", "ours"]


def test_lines_for_responses_are_sent_there(tmp_path: Path):
    """The fake has no such path, so its 404 is the answer; a bare body is known by its input."""
    rows = [{"custom_id": "a", "url": "/v1/responses", "body": {"input": "hi"}}, {"input": "hi"}]
    source, out = write(tmp_path / "in", rows), tmp_path / "out"
    with FakeOpenAI() as server:
        assert main(["run", str(source), str(out), "--url", server.url]) == 1
    assert [row["response"]["status_code"] for row in results(out)] == [404, 404]
    assert [parse(json.dumps(row).encode(), 1).path for row in rows] == ["/v1/responses"] * 2
    assert parse(b'{"url": "/v1/embeddings", "body": {"input": "x"}}', 1).path == "/v1/embeddings"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": []}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/decisions", {"input": "x", "questions": []}),
        ("/v1/systemone", {"state": "x", "questions": {}}),
        ("/v1/score", {"text_1": "x", "text_2": "y"}),
        ("/v1/rerank", {"query": "x", "documents": []}),
    ],
)
def test_a_bare_body_goes_where_its_fields_are_known(path: str, body: dict[str, object]):
    assert parse(json.dumps(body).encode(), 1).path == path


def test_a_run_resumes_and_repairs_a_truncated_last_line(tmp_path: Path, capsys):
    source, out = write(tmp_path / "in", lines(10)), tmp_path / "out"
    with FakeOpenAI() as server:
        assert main(["run", str(source), str(out), "--url", server.url]) == 0
        whole = out.read_bytes()
        kept = whole.splitlines(keepends=True)
        for cut in (b"".join(kept[:6]) + kept[6][:9], b"".join(kept[:6]) + kept[6].rstrip(b"\n")):
            out.write_bytes(cut)
            server.bodies.clear()
            assert main(["run", str(source), str(out), "--url", server.url]) == 0
            assert len(server.bodies) == 4, "the six whole results are not asked for again"
            assert sorted(out.read_bytes().splitlines()) == sorted(whole.splitlines())
    assert "resuming: 6 of 10" in capsys.readouterr().err


def test_busy_and_failing_servers_are_tried_again(tmp_path: Path):
    source, out = write(tmp_path / "in", lines(3)), tmp_path / "out"
    with FakeOpenAI(statuses=[429] * 9 + [503, 500, 502]) as server:
        assert main(["run", str(source), str(out), "--url", server.url, "--in-flight", "1"]) == 0
    assert [row["response"]["status_code"] for row in results(out)] == [200, 200, 200]
    assert len(server.bodies) == 15


def test_a_foreign_output_file_is_not_touched(tmp_path: Path, capsys):
    source, out = write(tmp_path / "in", lines(1)), tmp_path / "out"
    for notes in ("my notes\nand more\n", "my notes"):
        out.write_text(notes)
        assert main(["run", str(source), str(out), "--url", "http://127.0.0.1:1"]) == 1
        assert out.read_text() == notes
    assert main(["run", str(source), str(source), "--url", "http://127.0.0.1:1"]) == 1
    assert "same file" in capsys.readouterr().err


def test_a_full_disk_is_one_line_and_the_next_run_goes_on(tmp_path: Path):
    source, out = write(tmp_path / "in", lines(20)), tmp_path / "out"
    code = (
        "import resource, sys; from deltic.__main__ import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000)); sys.exit(main(sys.argv[1:]))"
    )
    with FakeOpenAI() as server:
        arguments = ["run", str(source), str(out), "--url", server.url]
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
        assert f"deltic: cannot write {out}: File too large" in done.stderr
        assert main(arguments) == 0
    assert len(results(out)) == 20


def test_one_run_at_a_time_writes_an_output(tmp_path: Path, capsys):
    source, out = write(tmp_path / "in", lines(4)), tmp_path / "out"
    with FakeOpenAI(token_s=0.1) as server:
        arguments = ["run", str(source), str(out), "--url", server.url, "--in-flight", "1"]
        first = threading.Thread(target=main, args=(arguments,))
        first.start()
        while not server.bodies:
            time.sleep(0.01)
        assert main(arguments) == 1
        first.join()
    assert "another run" in capsys.readouterr().err
    assert len(results(out)) == 4
