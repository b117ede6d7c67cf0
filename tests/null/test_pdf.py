"""POST /pdf/text: the text of a PDF, by pages, and files that have none, mean no good, or are too much."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zlib

import httpx
import pytest

from deltic.server import pdf
from tests.fake_engine import FakeEngineClient, make_app, served
from tests.null.test_http import error_of

pypdf = pytest.importorskip("pypdf")


def written(*pages: str | bytes) -> bytes:
    """A PDF with a line of text on each page, or what it draws, which is compressed."""
    n = len(pages)
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(n))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {n} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
    ]
    for i, text in enumerate(pages):
        line = text if isinstance(text, bytes) else f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode("cp1252")
        data = zlib.compress(line)
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] "
            b"/Resources << /Font << /F1 3 0 R >> >> /Contents %d 0 R >>" % (5 + 2 * i)
        )
        objects.append(b"<< /Length %d /Filter /FlateDecode >>\nstream\n%b\nendstream" % (len(data), data))
    file = bytearray(b"%PDF-1.4\n")
    places = []
    for number, body in enumerate(objects, 1):
        places.append(len(file))
        file += b"%d 0 obj\n%b\nendobj\n" % (number, body)
    start = len(file)
    file += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    file += b"".join(b"%010d 00000 n \n" % place for place in places)
    file += b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, start)
    return bytes(file)


def locked(data: bytes, password: str) -> bytes:
    writer = pypdf.PdfWriter(io.BytesIO(data))
    writer.encrypt(password, algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def test_text_by_pages() -> None:
    told = json.loads(pdf._read(written("The first page.", "Caf\xe9 on the second.", "")))
    assert told == {"pages": ["The first page.", "Café on the second.", ""], "n_pages": 3, "unread": []}
    assert json.loads(pdf._read(locked(written("Open to all."), "")))["pages"] == ["Open to all."]


def test_the_first_pages_of_one_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(*(f"Page {i}" for i in range(6)))
    monkeypatch.setattr(pdf, "MAX_PAGES", 4)
    assert json.loads(pdf._read(file)) == {"pages": [f"Page {i}" for i in range(4)], "n_pages": 6, "unread": []}
    monkeypatch.setattr(pdf, "MAX_CHARACTERS", 13)
    assert json.loads(pdf._read(file))["pages"] == ["Page 0", "Page 1"]
    monkeypatch.setattr(pdf, "ENOUGH_S", -1.0)
    assert json.loads(pdf._read(file))["pages"] == ["Page 0"]


def damaged(data: bytes, page: int) -> bytes:
    """The file with a page, from 1 on, that no reader can decompress."""
    head, *rest = data.split(b"/FlateDecode")
    return head + b"".join((b"/FlateDecodX" if i == page else b"/FlateDecode") + part for i, part in enumerate(rest, 1))


def test_a_page_that_cannot_be_read_is_told_and_the_others_are_read() -> None:
    told = json.loads(pdf._read(damaged(written("one", "two", "three"), 2)))
    assert told == {"pages": ["one", "", "three"], "n_pages": 3, "unread": [2]}
    lost = written("one", "two", "three").replace(b"6 0 R 8 0 R", b"6 0 R 99 0")  # a page that is not in the file
    assert json.loads(pdf._read(lost))["pages"][:2] == ["one", "two"]
    with pytest.raises(pdf.Refused, match="its pages are damaged"):
        pdf._read(damaged(written("one"), 1))


SLOW = b"BT /F1 12 Tf\n" + b"1 0 0 1 72 720 Tm (word) Tj\n" * 300_000 + b"ET"
"""A page that takes a reader seconds."""


def test_a_page_that_takes_too_long_is_told_and_the_others_are_read() -> None:
    def read(*pages: str | bytes) -> bytes:
        program = "from deltic.server import pdf; pdf.PAGE_S = 0.5; raise SystemExit(pdf.main())"
        return subprocess.run([sys.executable, "-c", program], input=written(*pages), stdout=subprocess.PIPE).stdout

    told = json.loads(read("one", SLOW, "three"))
    assert told == {"pages": ["one", "", "three"], "n_pages": 3, "unread": [2]}
    assert b"take too long" in read(SLOW)
    assert pdf.PAGE_S + pdf.ENOUGH_S < pdf.READ_S, "else the file ends with its page"


REFUSED = {
    "no PDF": (b"GIF89a", "is no PDF"),
    "nothing": (b"", "is no PDF"),
    "cut off": (written("Hello")[:200], "damaged"),
    "pictures": (written("", ""), "has no text"),
    "locked": (locked(written("Secret"), "password"), "encrypted"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_without_a_text(name: str) -> None:
    data, reason = REFUSED[name]
    with pytest.raises(pdf.Refused, match=reason):
        pdf._read(data)


def test_route() -> None:
    def send(url: str, data: bytes, **headers: str) -> httpx.Response:
        return httpx.post(f"{url}/pdf/text", content=data, headers={"content-type": "application/pdf", **headers})

    with served(make_app(FakeEngineClient(), max_body_mb=1.0)) as url:
        answer = send(url, written("Hello there."))
        assert answer.status_code == 200 and answer.json() == {"pages": ["Hello there."], "n_pages": 1, "unread": []}
        refused = send(url, b"no")
        assert refused.status_code == 400 and error_of(refused)["code"] == "invalid_pdf"
        assert error_of(refused)["message"] == "body: is no PDF. Send a PDF file as it is."
        assert send(url, bytes(1_000_001)).status_code == 413
        assert send(url, written("Hello"), origin="http://elsewhere.example").status_code == 403
        bomb = send(url, written(b"\0" * 400_000_000))
        assert bomb.status_code == 400, bomb.text
    with served(make_app(FakeEngineClient(), api_key=("secret",))) as url:
        assert send(url, written("Hello")).status_code == 401


def test_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdf, "find_spec", lambda name: None)
    with served(make_app(FakeEngineClient())) as url:
        answer = httpx.post(f"{url}/pdf/text", content=b"%PDF-", headers={"content-type": "application/pdf"})
    assert answer.status_code == 501 and "pip install 'deltic[pdf]'" in error_of(answer)["message"]
