"""/v1/files and /v1/batches over a fake engine: the flow of OpenAI's library, what is refused, keys, limits, and restarts."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from deltic.config import ConfigError
from deltic.server.batch import batches, file_store, lines, record
from deltic.server.batch import runner as batch_runner
from deltic.server.errors import ApiError
from deltic.server.limits import BATCH_PRIORITY, Account, Ticket
from tests.fake_engine import END, FakeEngineClient, make_app, served

CHAT = "/v1/chat/completions"


def line(custom_id: Any, url: str = CHAT, **body: Any) -> dict[str, Any]:
    asked = {CHAT: {"messages": [{"role": "user", "content": "hi"}]}, "/v1/completions": {"prompt": "hi"}}
    fields = {"model": "fake"} | asked.get(url, {"input": "hi"}) | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": fields}


def jsonl(rows: list[Any]) -> bytes:
    return b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows)


class Site:
    """A server in a thread, which can be stopped as if it were killed: nothing is told to end."""

    def __init__(self, directory: Path, engine: FakeEngineClient | None = None, **config: Any) -> None:
        self.engine = engine or FakeEngineClient()
        self.app = make_app(self.engine, batch_dir=directory, **config)
        self._served = served(self.app)
        self.runner: batch_runner.BatchRunner = self.app.state.server.batches

    def __enter__(self) -> Site:
        self.url = self._served.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        self._served.__exit__(None, None, None)
        self.runner.close()

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=20)

    def upload(self, rows: list[Any], key: str = "none", **fields: Any) -> Any:
        return self.client(key).files.create(file=("in.jsonl", jsonl(rows)), purpose="batch", **fields)

    def run(self, rows: list[Any], key: str = "none", endpoint: Any = CHAT, **fields: Any) -> Any:
        file = self.upload(rows, key)
        fields = {"completion_window": "24h"} | fields
        return self.client(key).batches.create(input_file_id=file.id, endpoint=endpoint, **fields)

    def ended(self, batch: Any, key: str = "none") -> Any:
        return until(lambda: self.client(key).batches.retrieve(batch.id), lambda b: b.status not in record.UNFINISHED)

    def content(self, file_id: str, key: str = "none") -> dict[str, Any]:
        text = self.client(key).files.content(file_id).text
        return {row["custom_id"]: row for row in map(json.loads, text.splitlines())}


def until(look: Callable[[], Any], is_there: Callable[[Any], bool], seconds: float = 30.0) -> Any:
    deadline_s = time.monotonic() + seconds
    while not is_there(found := look()):
        assert time.monotonic() < deadline_s, found
        time.sleep(0.02)
    return found


OUTSIDE = [
    "../secret",
    "..%2fsecret",
    "%2e%2e/secret",
    "files/../../secret",
    "/etc/hostname",
    "file-x/../../../secret",
    "lock",
    ".",
]
"""Names of files beside those of clients."""


@pytest.mark.parametrize("name", OUTSIDE)
def test_ids_are_no_paths(tmp_path: Path, name: str) -> None:
    """Of files and batches, in addresses and in bodies."""
    (tmp_path / "secret").write_text("what is hidden")
    with Site(tmp_path / "d") as site, httpx.Client(base_url=site.url) as client:
        tries = [client.request(method, f"/v1/files/{name}") for method in ("GET", "DELETE")]
        tries += [client.get(f"/v1/files/{name}/content"), client.get(f"/v1/batches/{name}")]
        tries += [client.post(f"/v1/batches/{name}/cancel")]
        tries.append(
            client.post("/v1/batches", json={"input_file_id": name, "endpoint": CHAT, "completion_window": "24h"})
        )
        for reply in tries:
            assert reply.status_code in (400, 404, 405, 415) or reply.json().get("object") == "list", reply.text
            assert "hidden" not in reply.text
    assert (tmp_path / "secret").read_text() == "what is hidden" and (tmp_path / "d" / "lock").exists()


def test_the_flow_of_the_library(tmp_path: Path) -> None:
    rows = [line(f"r{i}") for i in range(20)]
    rows[7] = line("r7", temperature=-1)
    with Site(tmp_path / "d") as site:
        client = site.client()
        file = site.upload(rows)
        assert (file.object, file.purpose, file.filename, file.status) == ("file", "batch", "in.jsonl", "processed")
        assert file.bytes == len(jsonl(rows)) and file.expires_at == file.created_at + 30 * 86_400
        assert client.files.content(file.id).content == jsonl(rows)
        batch = client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"night": "1"},
            output_expires_after={"anchor": "created_at", "seconds": 3600},
        )  # fmt: skip
        assert batch.status in ("validating", "in_progress") and batch.expires_at == batch.created_at + 86_400
        done = site.ended(batch)
        assert (done.status, done.metadata, done.endpoint, done.model) == ("completed", {"night": "1"}, CHAT, "fake")
        assert done.request_counts.to_dict() == {"total": 20, "completed": 19, "failed": 1}
        assert done.in_progress_at and done.finalizing_at and done.completed_at and not done.errors
        answers, errors = site.content(done.output_file_id), site.content(done.error_file_id)
        assert answers.keys() == {f"r{i}" for i in range(20)} - {"r7"} and errors.keys() == {"r7"}
        one = answers["r3"]
        assert one["id"].startswith("batch_req_") and one["error"] is None and one["response"]["request_id"]
        assert one["response"]["status_code"] == 200
        assert one["response"]["body"]["choices"][0]["message"]["content"] == "Hello"
        assert errors["r7"]["response"]["status_code"] == 400
        assert "temperature" in errors["r7"]["response"]["body"]["error"]["message"]
        assert done.usage.output_tokens == 19 * 6 and done.usage.total_tokens > done.usage.output_tokens
        made = client.files.retrieve(done.output_file_id)
        assert made.purpose == "batch_output" and made.expires_at == made.created_at + 3600
        assert {f.id for f in client.files.list()} == {file.id, done.output_file_id, done.error_file_id}
        assert [f.id for f in client.files.list(purpose="batch")] == [file.id]
        for file_id in (file.id, done.output_file_id, done.error_file_id):
            assert client.files.delete(file_id).deleted
        assert not list(client.files.list())
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)
        assert site.runner.files.used_bytes == 0
        assert {request.priority for request in site.engine.requests} == {BATCH_PRIORITY}
        assert not site.engine.streams or site.engine.n_open == 0


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/responses"])
def test_other_endpoints(endpoint: str, tmp_path: Path) -> None:
    with Site(tmp_path) as site:
        done = site.ended(site.run([line("a", endpoint), line("b", endpoint)], endpoint=endpoint))
        assert (done.status, done.request_counts.completed) == ("completed", 2)
        body = site.content(done.output_file_id)["a"]["response"]["body"]
        assert "Hello" in json.dumps(body) and done.usage.output_tokens == 12
        assert body.get("store") in (None, False), "answers of batches drive out nobody's stored ones"


def test_lists_have_pages(tmp_path: Path) -> None:
    with Site(tmp_path) as site:
        made = [site.run([line("a")]).id for _ in range(5)]
        client = site.client()
        assert [b.id for b in client.batches.list(limit=2)] == made[::-1], "the library asks for the next page"
        page = client.batches.list(limit=2, after=made[3])
        assert ([b.id for b in page.data], page.has_more) == ([made[2], made[1]], True)
        assert [f.id for f in client.files.list(order="asc", limit=3)] == [
            f.id for f in client.files.list(order="desc")
        ][::-1]
        for wrong in ({"limit": 0}, {"limit": 101}, {"after": "batch_x"}):
            with pytest.raises(openai.BadRequestError):
                client.batches.list(**wrong)


def test_a_long_list_is_made_as_it_is_sent(tmp_path: Path) -> None:
    with Site(tmp_path) as site:
        for i in range(file_store.MAX_FILES):
            card = file_store.Card(f"file-{i}", "", 0, 0, 2**40, "f", "batch")
            site.runner.files._cards[card.id] = card
        answer = httpx.get(f"{site.url}/v1/files?order=asc")
        assert answer.headers["transfer-encoding"] == "chunked", "other answers go on meanwhile"
        told = answer.json()
        assert [file["id"] for file in told["data"]] == list(site.runner.files._cards)
        assert (told["first_id"], told["last_id"], told["has_more"]) == ("file-0", "file-9999", False)


@pytest.mark.parametrize(
    ("rows", "code", "at"),
    [
        ([line("a"), b"{"], "invalid_json_line", 2),
        ([line("a"), b"", b"[]"], "invalid_json_line", 3),
        ([line("a"), line("b"), line("a")], "duplicate_custom_id", 3),
        ([line(None)], "missing_required_parameter", 1),
        ([line("a", "/v1/completions")], "mismatched_url", 1),
        ([line("a", "/v1/rerankings")], "invalid_url", 1),
        ([line("a") | {"method": "GET"}], "invalid_method", 1),
        ([line("a", stream=True)], "invalid_request", 1),
        ([line("a", model="gpt-5")], "model_not_found", 1),
        ([], "empty_file", None),
    ],
)  # fmt: skip
def test_a_file_is_checked_before_anything_is_sent(rows: list[Any], code: str, at: int | None, tmp_path: Path) -> None:
    with Site(tmp_path) as site:
        done = site.ended(site.run(rows))
        assert done.status == "failed" and done.failed_at and done.errors.object == "list"
        error = done.errors.data[0]
        assert (error.code, error.line) == (code, at) and error.message
        assert not site.engine.requests and done.output_file_id is None


def test_models_may_not_be_mixed(tmp_path: Path) -> None:
    other = FakeEngineClient()
    with Site(tmp_path) as site:
        from tests.fake_engine import service_of

        server = site.app.state.server
        server.add(service_of(server, other, "other"))
        mixed = site.ended(site.run([line("a"), line("b", model="other")]))
        assert mixed.errors.data[0].code == "mismatched_model"
        assert site.ended(site.run([line("a", model="other"), line("b", model="other")])).status == "completed"
        assert (len(site.engine.requests), len(other.requests)) == (0, 2)


def test_what_a_batch_is_refused_for(tmp_path: Path) -> None:
    with Site(tmp_path) as site:
        client, file = site.client(), site.upload([line("a")])

        def refused(**fields: Any) -> str:
            asked = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | fields
            with pytest.raises(openai.BadRequestError) as caught:
                client.batches.create(**asked)
            return caught.value.message

        assert "/v1/images/edits" in refused(endpoint="/v1/images/edits")
        assert "no file 'file-x'" in refused(input_file_id="file-x")
        for window in ("soon", "24", "0h", "24h\n", "99999h"):
            said = refused(completion_window=window)
            assert "completion_window: must be such as 24h: a number from 1 to 9999 and m, h or d" in said
        assert "metadata" in refused(metadata={f"k{i}": "v" for i in range(17)})
        assert "metadata" in refused(metadata={"k": "v" * 513})
        assert "seconds" in refused(output_expires_after={"anchor": "created_at", "seconds": 10})
        output = site.ended(site.run([line("a")])).output_file_id
        assert "'batch_output'" in refused(input_file_id=output)
        with pytest.raises(openai.NotFoundError):
            client.batches.retrieve("batch_x")


def test_what_a_file_is_refused_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_FILE_BYTES", 3_000_000)
    with Site(tmp_path, batch_disk_gb=0.004) as site:
        client = site.client()
        files = site.runner.files
        with pytest.raises(openai.BadRequestError, match="'fine-tune'"):
            client.files.create(file=b"x", purpose="fine-tune")
        with pytest.raises(openai.BadRequestError, match="expires_after"):
            site.upload([], expires_after={"anchor": "created_at", "seconds": 1})
        assert site.upload([], expires_after={"anchor": "created_at", "seconds": 3600}).bytes == 0
        with pytest.raises(openai.APIStatusError, match="larger than 3 MB") as caught:
            client.files.create(file=bytes(3_000_001), purpose="batch")
        assert caught.value.status_code == 413
        assert client.files.create(file=bytes(2_900_000), purpose="batch").bytes == 2_900_000
        with pytest.raises(openai.ConflictError, match="no room for more files"):
            client.files.create(file=bytes(2_000_000), purpose="batch")
        assert files.used_bytes == 2_900_000 + file_store.MIN_BYTES, "what was refused is given back"
        form = {"content-type": "multipart/form-data; boundary=x"}
        for body, said in (
            (b"nonsense", "not a valid form"),
            (
                b'--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\nhalf',
                "ends before its last boundary",
            ),
            (b"--x\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--x--\r\n", "file: is missing"),
            (b"--x\r\ncontent-disposition: form-data; name=\"odd\"\r\n\r\n" + bytes(9999) + b"\r\n--x--\r\n", "beside its file"),
        ):  # fmt: skip
            answer = httpx.post(f"{site.url}/v1/files", content=body, headers=form)
            assert answer.status_code == 400 and said in answer.json()["error"]["message"]
        for boundary in ("x" * 257, '""'):
            form = {"content-type": f"multipart/form-data; boundary={boundary}"}
            answer = httpx.post(f"{site.url}/v1/files", content=b"nonsense", headers=form)
            assert answer.status_code == 400 and "not a valid form" in answer.json()["error"]["message"]
        assert httpx.post(f"{site.url}/v1/files", json={}).status_code == 415
        names = {path.suffix for path in (tmp_path / "files").iterdir()}
        assert names == {"", ".json"}, "no parts are left"


def test_without_a_directory_it_is_refused_by_the_flags_name() -> None:
    with served(make_app(FakeEngineClient())) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        for ask in (client.files.list, client.batches.list, lambda: client.files.create(file=b"x", purpose="batch")):
            with pytest.raises(openai.NotFoundError, match="--batch-dir"):
                ask()


def test_keys_are_tenants_and_a_batch_counts_its_tokens_only(tmp_path: Path) -> None:
    keys = {"api_key": ("alice=a", "bob=b"), "max_concurrent_per_key": 1}
    with Site(tmp_path, **keys) as site:
        batch = site.run([line(f"r{i}") for i in range(6)], "a")
        done = site.ended(batch, "a")
        assert done.request_counts.completed == 6
        bob = site.client("b")
        for ask in (
            lambda: bob.files.retrieve(batch.input_file_id), lambda: bob.files.content(done.output_file_id),
            lambda: bob.files.delete(batch.input_file_id), lambda: bob.batches.retrieve(batch.id),
            lambda: bob.batches.cancel(batch.id),
        ):  # fmt: skip
            with pytest.raises(openai.NotFoundError):
                ask()
        assert not list(bob.files.list()) and not list(bob.batches.list())
        with pytest.raises(openai.BadRequestError, match="there is no file"):
            bob.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h")
        alice = site.app.state.server.accounts.named("alice")
        assert alice.numbers.n_generated_tokens == 36 and alice.numbers.n_open == 0
        assert {request.tenant for request in site.engine.requests} == {"alice/batches"}, "turns of their own"


def test_a_line_waits_for_its_keys_tokens_and_not_for_its_other_requests() -> None:
    account, ticket = Account("a", 1, 60), Ticket(is_batch=True)
    account.enter()
    ticket.account = account
    ticket.enter()
    assert account.numbers.n_open == 1
    ticket.take(1000)
    with pytest.raises(ApiError, match="has used up its 60 tokens a minute") as caught:
        ticket.enter()
    assert caught.value.status == 429
    ticket.end(429)
    assert account.numbers.n_open == 1


def test_a_batch_takes_half_the_places_and_keys_share_them(tmp_path: Path) -> None:
    engine = FakeEngineClient()
    engine.hold = True
    with Site(tmp_path, engine, api_key=("alice=a", "bob=b")) as site:
        first = site.run([line(f"r{i}") for i in range(30)], "a")
        until(lambda: engine.n_open, lambda n: n == 8)
        time.sleep(0.1)
        assert engine.n_open == 8, "of 16 places"
        second = site.run([line(f"r{i}") for i in range(30)], "b")
        until(lambda: site.client("b").batches.retrieve(second.id).status, lambda status: status == "in_progress")
        engine.hold = False
        assert site.ended(first, "a").request_counts.completed == site.ended(second, "b").request_counts.completed == 30
        owners = [request.tenant for request in engine.requests]
        assert owners[8:28].count("bob/batches") >= 6, "they take turns"


def test_half_of_the_queue_is_left_to_others(tmp_path: Path) -> None:
    """A line may be many sequences."""
    engine = FakeEngineClient()
    engine.hold, engine.max_queue = True, 8
    with Site(tmp_path, engine) as site:
        rows = [line(f"r{i}", "/v1/completions", prompt=["a"] * 9) for i in range(4)]
        batch = site.run(rows, endpoint="/v1/completions")
        until(lambda: engine.n_open, lambda n: n == 18)
        time.sleep(0.2)
        assert engine.n_open == 18, "of 16 places and 8 that may wait, 4 of these are for others"
        engine.hold = False
        assert site.ended(batch).request_counts.completed == 4


def test_cancelling_keeps_what_there_is(tmp_path: Path) -> None:
    engine = FakeEngineClient()
    with Site(tmp_path, engine, batch_in_flight=1) as site:
        engine.token_s = 0.02
        batch = site.run([line(f"r{i}") for i in range(50)])
        with pytest.raises(openai.ConflictError, match="Cancel that first"):
            site.client().files.delete(batch.input_file_id)
        until(lambda: site.client().batches.retrieve(batch.id).request_counts.completed, lambda n: n >= 2)
        assert site.client().batches.cancel(batch.id).status == "cancelling"
        done = site.ended(batch)
        assert done.status == "cancelled" and done.cancelling_at and done.cancelled_at
        assert len(site.content(done.output_file_id)) == done.request_counts.completed >= 2
        until(lambda: engine.n_open, lambda n: n == 0)
        with pytest.raises(openai.ConflictError, match="'cancelled'"):
            site.client().batches.cancel(batch.id)
        assert site.client().files.delete(batch.input_file_id).deleted


def test_what_is_not_answered_in_its_window_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(batches.SECONDS, "m", 1)
    engine = FakeEngineClient(lambda request, index: [*b"Hello", END])
    with Site(tmp_path, engine, batch_in_flight=2) as site:
        engine.hold = True
        done = site.ended(site.run([line(f"r{i}") for i in range(5)], completion_window="1m"))
        assert done.status == "expired" and done.expired_at and done.output_file_id is None
        assert done.request_counts.to_dict() == {"total": 5, "completed": 0, "failed": 5}
        errors = site.content(done.error_file_id)
        assert errors["r4"]["error"]["code"] == "batch_expired" and errors["r4"]["response"] is None
        engine.hold = False


def test_a_line_that_waits_for_others_is_not_late(tmp_path: Path) -> None:
    engine = FakeEngineClient()
    engine.hold = True
    with Site(tmp_path, engine, request_timeout_s=0.1) as site:
        batch = site.run([line("a")])
        until(lambda: engine.n_open, lambda n: n == 1)
        time.sleep(0.3)
        engine.hold = False
        assert site.ended(batch).request_counts.to_dict() == {"total": 1, "completed": 1, "failed": 0}


def test_what_the_server_is_to_blame_for_is_tried_again(tmp_path: Path) -> None:
    """The engine dies in the middle of an answer, and is back some time later; nothing is lost."""
    engine = FakeEngineClient()
    engine.die_after = 2
    with Site(tmp_path, engine) as site:
        batch = site.run([line("a"), line("b")])
        until(lambda: engine.state, lambda state: state == "restarting")
        engine.die_after, engine.state = None, "ready"
        assert site.ended(batch).request_counts.to_dict() == {"total": 2, "completed": 2, "failed": 0}
        assert len(engine.requests) > 2


def test_a_batch_goes_on_after_the_process_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second process finds a half-written line, a file without a card and an upload that broke off."""
    engine = FakeEngineClient()
    engine.token_s = 0.01
    rows = [line(f"r{i}") for i in range(30)]
    with Site(tmp_path, engine, batch_in_flight=2) as site:
        batch = site.run(rows)
        until(lambda: site.client().batches.retrieve(batch.id).request_counts.completed, lambda n: n >= 5)
    n_before = len(engine.requests)
    out = tmp_path / "batches" / f"{batch.id}.out"
    whole = out.read_bytes()
    n_kept = whole.count(b"\n")
    out.write_bytes(whole[: whole.rindex(b"\n") + 1] + b'{"id":"batch_req_1","cus')
    for name in ("0" * 24 + ".part", "file-" + "0" * 24, f"file-{'0' * 24}.json.new"):
        (tmp_path / "files" / name).write_bytes(b"x")
    again = FakeEngineClient()
    with Site(tmp_path, again) as site:
        assert sorted(path.name for path in (tmp_path / "files").iterdir()) == [
            batch.input_file_id,
            f"{batch.input_file_id}.json",
        ]
        kept = site.client().batches.retrieve(batch.id)
        assert kept.status == "in_progress"
        with caplog.at_level("INFO", "deltic.server"):
            loop_runs(site)
            done = site.ended(batch)
        assert f"batch {batch.id} goes on: {n_kept} answered, 0 with an error, of 30" in caplog.text
        assert f"batch {batch.id} completed: 30 answered" in caplog.text
        assert "POST /v1/chat/completions" not in caplog.text, "lines are for debug"
        assert done.request_counts.to_dict() == {"total": 30, "completed": 30, "failed": 0}
        assert site.content(done.output_file_id).keys() == {f"r{i}" for i in range(30)}
        assert len(again.requests) - 1 == 30 - n_kept and n_before >= n_kept, "the one is the later batch's"
        assert done.usage.output_tokens == 30 * 6
    with Site(tmp_path) as site:
        assert site.client().batches.retrieve(batch.id).output_file_id == done.output_file_id
        assert len(site.content(done.output_file_id)) == 30


def test_what_others_keep_in_the_directory_stays(tmp_path: Path) -> None:
    with Site(tmp_path) as site:
        done = site.ended(site.run([line("a")]))
    batch = (tmp_path / "batches" / f"{done.id}.json").read_bytes()
    foreign = {tmp_path / "files" / name: b"x" for name in ("thesis.txt", "file-1", "file-1.json", "a.part")}
    foreign |= {tmp_path / "batches" / name: batch for name in ("notes.json", f"{done.id} (copy).json", "a.out")}
    for path, data in foreign.items():
        path.write_bytes(data)
    (tmp_path / "files" / "below.json").mkdir()
    (tmp_path / "batches" / "below.json").mkdir()
    with Site(tmp_path) as site:
        assert [batch.id for batch in site.client().batches.list()] == [done.id]
        assert {f.id for f in site.client().files.list()} == {done.input_file_id, done.output_file_id}
    assert {path: path.read_bytes() for path in foreign} == foreign


def test_a_card_that_cannot_be_read_stops_the_start_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Site(tmp_path) as site:
        done = site.ended(site.run([line("a")]))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*[-_]*") if path.is_file()}
    read = Path.read_bytes
    for name in (done.input_file_id, done.id):

        def failing(path: Path, stem: str = name) -> bytes:
            if path.stem == stem:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return read(path)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", failing)
            with pytest.raises((ConfigError, OSError), match=rf"{name}\.json"):
                make_app(FakeEngineClient(), batch_dir=tmp_path)
    assert {path: path.read_bytes() for path in before} == before


def loop_runs(site: Site, key: str = "none") -> None:
    """What serve.py does when the model is ready, in the loop in which the server runs: here where another batch is made."""
    add = site.runner.add

    def start_and_add(batch: record.BatchRecord) -> None:
        site.runner.start()
        add(batch)

    site.runner.add = start_and_add  # type: ignore[method-assign]
    site.ended(site.run([line("later")], key), key)
    site.runner.add = add  # type: ignore[method-assign]


def test_a_publication_that_broke_off_is_made_whole(tmp_path: Path) -> None:
    with Site(tmp_path) as site:
        done = site.ended(site.run([line("a"), line("b", temperature=-1)]))
    path = tmp_path / "batches" / f"{done.id}.json"
    told = json.loads(path.read_text()) | {"status": "finalizing"}
    path.write_text(json.dumps(told))
    # The error file was not moved yet: only its card is there.
    (tmp_path / "files" / done.error_file_id).rename(tmp_path / "batches" / f"{done.id}.err")
    with Site(tmp_path) as site:
        loop_runs(site)
        again = site.ended(done)
        assert (again.output_file_id, again.error_file_id) == (done.output_file_id, done.error_file_id)
        assert again.request_counts == done.request_counts and again.status == "completed"
        assert site.content(again.error_file_id).keys() == {"b"}


def test_one_server_has_a_directory(tmp_path: Path) -> None:
    with Site(tmp_path), pytest.raises(ConfigError, match="another server's"):
        make_app(FakeEngineClient(), batch_dir=tmp_path)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match=r"--batch-dir .*/open: is writable for others"):
        make_app(FakeEngineClient(), batch_dir=tmp_path / "open")
    for below in ("files", "batches"):
        (tmp_path / "own" / below).mkdir(0o700, parents=True)
        (tmp_path / "own" / below).chmod(0o777)
        with pytest.raises(ConfigError, match=rf"--batch-dir .*/own/{below}: is writable for others"):
            make_app(FakeEngineClient(), batch_dir=tmp_path / "own")
        (tmp_path / "own" / below).chmod(0o700)
    (tmp_path / "f").write_text("")
    with pytest.raises(ConfigError, match="cannot be used"):
        make_app(FakeEngineClient(), batch_dir=tmp_path / "f")


def test_files_go_when_their_time_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Site(tmp_path) as site:
        file = site.upload([line("a")])
        site.runner.files._cards[file.id].expires_at = 1
        monkeypatch.setattr(file_store, "SWEEP_S", 0.0)
        assert not list(site.client().files.list())
        assert not list((tmp_path / "files").iterdir()) and site.runner.files.used_bytes == 0


def test_nothing_is_kept_that_others_may_read(tmp_path: Path) -> None:
    with Site(tmp_path / "d") as site:
        site.ended(site.run([line("a")]))
        modes = {path: path.stat().st_mode & 0o077 for path in (tmp_path / "d").rglob("*") if path.name != "lock"}
        assert len(modes) >= 6 and not any(modes.values()), modes


class Disk:
    """In place of write_whole: room for as many of a batch's states as are told."""

    def __init__(self, n_left: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_left = n_left
        self.n_refused = 0
        self._write = batch_runner.write_whole
        monkeypatch.setattr(batch_runner, "write_whole", self)
        monkeypatch.setattr(batch_runner, "AGAIN_S", 0.05)

    def __call__(self, path: Path, data: bytes) -> None:
        if self.n_left <= 0:
            self.n_refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.n_left -= 1
        self._write(path, data)


@pytest.mark.parametrize("n_before", range(1, 6))
def test_a_full_disk_delays_any_step_of_a_batch_and_loses_none(
    n_before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states are: made, checked, answered, of which file, ended."""
    with Site(tmp_path) as site:
        disk = Disk(n_before, monkeypatch)
        batch = site.run([line("a")])
        if n_before < 5:
            until(lambda: disk.n_refused, lambda n: n >= 2)
            assert site.client().batches.retrieve(batch.id).status in record.UNFINISHED
            with pytest.raises(openai.ConflictError, match="the batch cannot be written: No space left"):
                site.run([line("a")])
        disk.n_left = 100
        done = site.ended(batch)
        assert (done.status, done.request_counts.completed) == ("completed", 1)
        assert site.content(done.output_file_id).keys() == {"a"} and len(site.engine.requests) == 1
        assert site.ended(site.run([line("b")])).status == "completed", "the key's next one runs"


def test_a_batch_that_cannot_even_fail_does_not_stop_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Site(tmp_path) as site:
        work = site.runner._work

        async def broken(batch: record.BatchRecord) -> None:
            raise RuntimeError("unforeseen")

        monkeypatch.setattr(site.runner, "_work", broken)
        disk = Disk(2, monkeypatch)
        first = site.run([line("a")])
        until(lambda: disk.n_refused, lambda n: n >= 2)
        disk.n_left = 100
        assert site.ended(first).errors.data[0].code == "server_error"
        monkeypatch.setattr(site.runner, "_work", work)
        assert site.ended(site.run([line("b")])).status == "completed"


def test_a_cancel_that_cannot_be_written_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngineClient()
    engine.hold = True
    with Site(tmp_path, engine) as site:
        batch = site.run([line("a")])
        until(lambda: engine.n_open, lambda n: n == 1)
        disk = Disk(0, monkeypatch)
        assert site.client().batches.cancel(batch.id).status == "cancelling"
        assert site.client().batches.cancel(batch.id).status == "cancelling"
        assert "which cannot be written" in caplog.text
        until(lambda: disk.n_refused, lambda n: n >= 4)
        disk.n_left = 100
        assert site.ended(batch).status == "cancelled"
        assert len(engine.requests) == 1 and not engine.n_open
        engine.hold = False


def test_an_upload_that_cannot_be_kept_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Site(tmp_path) as site:
        monkeypatch.setattr(file_store, "write_whole", full)
        with pytest.raises(openai.ConflictError, match="the file cannot be written: No space left"):
            site.upload([line("a")])
        assert site.runner.files.used_bytes == 0 and not list((tmp_path / "files").iterdir())


def test_a_state_that_was_not_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(OSError, match="directory"):
        file_store.write_whole(tmp_path / "x", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_batch_that_waits_is_cancelled_at_once(tmp_path: Path) -> None:
    engine = FakeEngineClient()
    engine.hold = True
    with Site(tmp_path, engine) as site:
        first, second = site.run([line("a")]), site.run([line("b")])
        client = site.client()
        until(lambda: client.batches.retrieve(second.id).status, lambda status: status == "in_progress")
        until(lambda: engine.n_open, lambda n: n == 1)
        client.batches.cancel(second.id)
        assert site.ended(second).status == "cancelled"
        assert client.batches.retrieve(first.id).status == "in_progress" and len(engine.requests) == 1
        third = site.run([line("c")])
        engine.hold = False
        assert site.ended(first).status == site.ended(third).status == "completed"


def test_a_batch_waits_for_a_server_that_has_its_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngineClient()
    engine.hold = True
    with Site(tmp_path, engine, api_key=("alice=a",)) as site:
        batch = site.run([line("a")], "a")
        until(lambda: engine.n_open, lambda n: n == 1)
    kept = tmp_path / "batches" / f"{batch.id}.json"
    before = kept.read_bytes()
    for keys, key in (({"api_key": ("child",)}, "child"), ({}, "none")):
        caplog.clear()
        with Site(tmp_path, **keys) as site:
            loop_runs(site, key)
            assert len(site.engine.requests) == 1, "the later batch's"
        assert "is of the key 'alice', and waits" in caplog.text and kept.read_bytes() == before
    with Site(tmp_path, api_key=("alice=a",)) as site:
        loop_runs(site, "a")
        assert site.ended(batch, "a").status == "completed"


def test_a_key_leaves_batches_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_runner, "MAX_BATCHES", 3)
    engine = FakeEngineClient()
    with Site(tmp_path, engine, api_key=("alice=a", "bob=b")) as site:
        bobs = site.run([line("1")], "b")
        site.ended(bobs, "b")
        alices = [site.ended(site.run([line("1")], "a"), "a").id for _ in range(2)]
        engine.hold = True
        alices += [site.run([line("1")], "a").id for _ in range(3)]
        assert {b.id for b in site.client("a").batches.list()} == set(alices[2:]), "hers make room"
        with pytest.raises(openai.ConflictError, match="3 batches are not finished"):
            site.run([line("1")], "a")
        assert site.client("b").batches.retrieve(bobs.id).status == "completed"
        site.run([line("1")], "b")
        engine.hold = False


def test_a_key_leaves_files_and_room_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Site(tmp_path, api_key=("alice=a", "bob=b"), batch_disk_gb=0.001) as site:
        full = b"x" * 499_000
        site.client("a").files.create(file=full, purpose="batch")
        with pytest.raises(openai.ConflictError, match="no room for more files"):
            site.upload([line("1")] * 10, "a")
        site.client("b").files.create(file=full, purpose="batch")
        monkeypatch.setattr(file_store, "MAX_FILES", 2)
    with Site(tmp_path, api_key=("alice=a", "bob=b"), batch_disk_gb=0.1) as site:
        site.upload([line("1")], "a")
        with pytest.raises(openai.ConflictError, match="2 files"):
            site.upload([line("1")], "a")
        site.upload([line("1")], "b")
    with Site(tmp_path, api_key=("bob=b",), batch_disk_gb=0.0015) as site:
        assert not site.runner.files.has_room("bob", 500_000), "alice's files are there"
        assert site.runner.files.has_room("bob", 400_000)


def test_files_are_noted_in_the_thread_that_lists_them(tmp_path: Path) -> None:
    """So that a list never changes while it is read."""
    files = file_store.FileStore(tmp_path / "d", 1)
    threads = set()

    class Cards(dict[str, file_store.Card]):
        def __setitem__(self, name: str, card: file_store.Card) -> None:
            threads.add(threading.get_ident())
            super().__setitem__(name, card)

    files._cards = Cards()
    part = files.part()
    part.write_bytes(b"")
    card = file_store.Card("file-1", "", 0, 0, 2**40, "f", "batch")
    asyncio.run(files.add(part, card))
    assert threads == {threading.get_ident()} and files.all("") == [card]
    files.close()


def test_a_keys_file_waits_for_one_check_of_anothers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for those of all its batches, of which there may be thousands."""
    may_check, checked, check = threading.Event(), [], lines.Input.check

    def slowly(self: lines.Input) -> Any:
        may_check.wait(30)
        checked.append(self)
        time.sleep(0.05)
        return check(self)

    monkeypatch.setattr(lines.Input, "check", slowly)
    with Site(tmp_path / "d", api_key=("alice=a", "bob=b")) as site:
        file = site.upload([line("r")], "a")
        for _ in range(20):
            site.client("a").batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        uploading = threading.Thread(target=site.upload, args=([line("r")], "b"))
        uploading.start()
        until(lambda: len(site.runner.files._worker._waiting), lambda n: n >= 20)
        may_check.set()
        uploading.join(30)
        assert len(checked) < 10, "an upload is some jobs, each behind one of the other key's"
