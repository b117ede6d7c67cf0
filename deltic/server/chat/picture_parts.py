"""The pictures of a request, from what its parts name to what the engine takes.

A door puts a Sent in the place of each part that is a picture. Between the parsing of a body and its prompt
all of them are read (`PictureReader.read`). The template then writes a mark for each, which becomes as many
as it has tokens (template.py).
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from deltic.engine.messages import Picture, PictureInfo
from deltic.models.vision.shape import BLOCK
from deltic.server.chat.pictures import MAX_PICTURE_BYTES, PictureError, needs_pillow, read_picture
from deltic.server.errors import ApiError, bad_request
from deltic.server.urls import Hosts, UrlError, fetch, of_base64, of_data_url

MAX_PICTURES = 256
"""Of a request."""
MAX_PIXEL_BYTES = 1 << 28
"""Of a request's pictures together, once they are resized: 87,381 tokens."""
LOW_PIXELS = 512 * 512
"""The most of a picture with `detail: low`."""
MAX_HELD_BYTES = 1 << 30
"""Of pixels of all requests whose pictures are being read: with more, only the oldest of them goes on."""
N_DECODING = 2
"""Pictures that the server decodes at once, each in a process of its own."""
N_FETCHING = 4
"""Pictures that a request has fetched at once."""
READ_S = 120.0
"""For all pictures of a request, those before them included."""

READS = "this server reads text and, where the model takes them, pictures"
"""Of a part that is something else."""

DETAILS = ("auto", "low", "high", "original")

Pictures = dict[str, Picture]
"""Of a request, by `Sent.path`."""


class PictureBounds(Struct, forbid_unknown_fields=True):
    """A request's `mm_processor_kwargs`: pixels of each of its pictures once it is resized."""

    min_pixels: int | None = None
    max_pixels: int | None = None


@dataclass(eq=False, slots=True)
class Sent:
    """A picture as a request has it: one of url, encoded and data is set, until it is read."""

    path: str
    """The field that names it, for errors."""
    part: str
    """Path of what stands for it in the body."""
    kind: str = ""
    """The type of that part, where it has one."""
    url: str = ""
    encoded: str = ""
    """Base64."""
    data: bytes = b""
    is_low: bool = False

    def part_of_message(self) -> dict[str, Any]:
        """As a part of a message's content."""
        return {"type": "image", "image": self}

    def not_taken(self) -> ApiError:
        """The 400 of a model that takes no pictures."""
        if not self.kind:
            return bad_request(self.part, "this server reads text only; leave it out", "unsupported_field")
        return bad_request(f"{self.part}.type", f"{self.kind!r} is not supported; this server reads text only")


def file_of(image: Any) -> bytes:
    """A picture of the Python API as a file: one of Pillow's, bytes of a file, or a path. Raises ValueError,
    OSError.
    """
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | Path):
        return Path(image).read_bytes()
    if not hasattr(image, "save") or not hasattr(image, "convert"):
        raise ValueError(f"expected a picture of Pillow, bytes or a path, not {type(image).__name__}")
    plain = image if image.mode in ("1", "L", "LA", "I;16", "P", "RGB", "RGBA") else image.convert("RGB")
    file = io.BytesIO()
    plain.save(file, "PNG", compress_level=1, exif=image.getexif())
    return file.getvalue()


def sent_in(content: object) -> Iterator[Sent]:
    """The pictures of a message's content."""
    for part in content if isinstance(content, list) else ():
        if isinstance(sent := part.get("image"), Sent):
            yield sent


def is_low(detail: object, path: str) -> bool:
    """detail: OpenAI's word for how closely a picture is to be looked at. Raises ApiError (400)."""
    if detail is not None and detail not in DETAILS:
        raise bad_request(path, f"expected one of {', '.join(DETAILS)}")
    return detail == "low"


class PictureReader:
    """Reads the pictures of all requests."""

    def __init__(self, hosts: Hosts) -> None:
        """hosts: those that pictures may be fetched from."""
        self._hosts = hosts
        self._decoding = asyncio.Semaphore(N_DECODING)  # whoever waits first is first
        self._reads: list[object] = []
        """Those under way, the oldest first."""
        self._n_held = 0
        self._ended = asyncio.Event()
        """One of them has ended, since somebody began to wait for that."""

    async def read(
        self, pictures: Sequence[Sent], info: PictureInfo | None, bounds: PictureBounds | None = None
    ) -> Pictures:
        """info: how the model takes them. Raises ApiError: 400 that names the picture at fault; 503 when too
        many are read at once.
        """
        if info is None:
            raise pictures[0].not_taken()
        if said := needs_pillow():
            raise bad_request(pictures[0].path, said, "pictures_not_available")
        if len(pictures) > MAX_PICTURES:
            raise bad_request(pictures[MAX_PICTURES].path, f"a request may have {MAX_PICTURES} pictures at most")
        least, most = _checked(bounds or PictureBounds(), info)
        unread, found, n_bytes, mine = iter(pictures), Pictures(), 0, object()

        async def read_some() -> None:
            nonlocal n_bytes
            for sent in unread:
                await self._room(mine)
                top = max(least, min(most, LOW_PIXELS)) if sent.is_low else most
                found[sent.path] = picture = await self._read(sent, least, top)
                if picture.n_tokens > info.max_tokens:
                    said = f"has {picture.n_tokens} tokens; a picture may have {info.max_tokens} here"
                    raise bad_request(sent.path, said)
                n_bytes += len(picture.pixels)
                self._n_held += len(picture.pixels)
                if n_bytes > MAX_PIXEL_BYTES:
                    said = f"with it the pictures have more than {MAX_PIXEL_BYTES // BLOCK**2 // 3} tokens; send fewer or smaller"
                    raise bad_request(sent.path, said, "too_many_pixels")

        self._reads.append(mine)
        n_at_once = N_FETCHING if any(sent.url for sent in pictures) else N_DECODING
        tasks = [asyncio.create_task(read_some()) for _ in range(min(n_at_once, len(pictures)))]
        try:
            async with asyncio.timeout(READ_S):
                await asyncio.gather(*tasks)
        except TimeoutError:
            said = f"the pictures were not read within {READ_S:g} s; send fewer, or try again later"
            raise ApiError(503, said, code="pictures_timeout", headers={"retry-after": "10"}) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._reads.remove(mine)
            self._n_held -= n_bytes
            self._ended.set()
        return found

    async def _room(self, mine: object) -> None:
        """Waits until one more picture may be held."""
        while self._n_held >= MAX_HELD_BYTES and self._reads[0] is not mine:
            self._ended.clear()
            await self._ended.wait()

    async def _read(self, sent: Sent, least: int, most: int) -> Picture:
        try:
            data = await self._file(sent)
            sent.url = sent.encoded = ""
            sent.data = b""
            async with self._decoding:
                return await read_picture(data, least, most)
        except (PictureError, UrlError) as error:
            raise bad_request(sent.path, str(error), "invalid_image") from None

    async def _file(self, sent: Sent) -> bytes:
        """Raises UrlError."""
        scheme = sent.url[:6].partition(":")[0].lower()
        if scheme in ("http", "https"):
            if not self._hosts:
                raise UrlError("this server fetches no pictures (--fetch-images-from); send a data: URL")
            return await fetch(sent.url, self._hosts, MAX_PICTURE_BYTES)
        if sent.url and scheme != "data":
            raise UrlError("expected a data: URL" + ", or one of http or https" * bool(self._hosts))
        if sent.data:
            return sent.data
        return await asyncio.to_thread(_decoded, sent)


def _decoded(sent: Sent) -> bytes:
    """Raises UrlError."""
    return of_base64(of_data_url(sent.url, "image") if sent.url else sent.encoded, MAX_PICTURE_BYTES)


def _checked(bounds: PictureBounds, info: PictureInfo) -> tuple[int, int]:
    """Least and most pixels of a picture. Raises ApiError (400)."""
    for name in ("min_pixels", "max_pixels"):
        given = getattr(bounds, name)
        if given is not None and not info.min_pixels <= given <= info.max_pixels:
            said = f"must be from {info.min_pixels} to {info.max_pixels}"
            raise bad_request(f"mm_processor_kwargs.{name}", said)
    least = info.min_pixels if bounds.min_pixels is None else bounds.min_pixels
    most = info.max_pixels if bounds.max_pixels is None else bounds.max_pixels
    if least > most:
        raise bad_request("mm_processor_kwargs.min_pixels", "is more than max_pixels")
    return least, most


def expanded(ids: list[int], mark: int | None, pictures: Sequence[Picture]) -> tuple[list[int], list[Picture]]:
    """Ids of a prompt with as many marks for each picture as it has tokens, and the pictures in their places.

    mark: the id that the template writes for a picture. Raises ApiError (400) where it does not do so.
    """
    places = [at for at, token_id in enumerate(ids) if token_id == mark]
    if mark is None or len(places) != len(pictures):
        said = f"the chat template shows {len(places)} of {len(pictures)} pictures; it is not made for them"
        raise bad_request("messages", said, "pictures_not_shown")
    whole: list[int] = []
    placed, end = [], 0
    for place, picture in zip(places, pictures, strict=True):
        whole += ids[end:place]
        placed.append(replace(picture, first=len(whole)))
        whole += [mark] * picture.n_tokens
        end = place + 1
    return whole + ids[end:], placed


def check_room(pictures: Sequence[Picture], sent: Sequence[Sent], n_prompt: int, limit: int) -> None:
    """Says which picture alone is too large, if one is, of a prompt of n_prompt tokens, too long for a
    context of `limit`. Raises ApiError (400).
    """
    room = limit - 1 - n_prompt + sum(picture.n_tokens for picture in pictures)
    for one, picture in zip(sent, pictures, strict=True):
        if picture.n_tokens > room > 0:
            said = (
                f"has {picture.n_tokens} tokens, and beside the text this model's context of {limit} tokens has room for {room}; "
                f"send a smaller one, or mm_processor_kwargs with max_pixels of at most {room * BLOCK**2}"
            )
            raise bad_request(one.path, said, "context_length_exceeded")
