"""The pictures and videos of a request, from what its parts name to what the engine takes.

An API puts a Sent in the place of each part that is a picture. Between the parsing of a body and its prompt
all of them are read (`PictureReader.read`). The template then writes a mark for each, which becomes as many
as it has tokens (template.py). A video is pairs of frames, each a Picture of its own behind the text of its
time.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from deltic.engine.messages import Handling, Picture, PictureInfo
from deltic.engine.turns import NamespaceShares
from deltic.json_types import JsonObject
from deltic.models.vision.shape import BLOCK
from deltic.ops.geometry import TOKEN_BYTES
from deltic.server.chat.pictures import MAX_PICTURE_BYTES, read_picture
from deltic.server.chat.videos import MAX_VIDEO_BYTES, Clip, VideoWish, needs_av, read_video
from deltic.server.errors import ApiError, bad_request, waited_too_long
from deltic.server.isolated import Refused
from deltic.server.limits import Ticket
from deltic.server.room import Held, Room
from deltic.server.urls import Hosts, UrlError, fetch, of_base64, of_data_url

MAX_PICTURES = 256
"""Pictures of a request, videos among them."""
VIDEO_SHARE = 0.75
"""The most of a context that the frames of all videos are fitted into, by making them smaller."""
MAX_FPS = 240.0
MAX_PIXEL_BYTES = 1 << 28
"""Bytes of a request's pictures together, once they are resized: 87,381 tokens."""
LOW_PIXELS = 512 * 512
"""The most of a picture with `detail: low`."""
MAX_KEPT_BYTES = 1 << 28
"""Bytes of pixels that are kept of pictures that were read before, in case their files come again."""
N_DECODING = 2
"""Pictures that the server decodes at once, each in a process of its own."""
N_FETCHING = 4
"""Pictures that a request has fetched at once; with videos, which are larger, N_DECODING."""
FEW_BYTES = 1 << 17
"""Bytes of a file that are taken out of base64, and hashed, in less time than a thread takes to begin."""
READ_S = 120.0
"""Seconds for all pictures of a request, the wait for others before them included."""

READS = "This server reads text and, where the model takes them, pictures and videos."
"""Message about a part that is something else."""

DETAILS = ("auto", "low", "high", "original")

T = TypeVar("T")
Pictures = dict[str, Picture | Clip]
"""Pictures and videos of a request, by `Sent.path`."""


class PictureBounds(Struct, forbid_unknown_fields=True):
    """A request's `mm_processor_kwargs`: pixels of each of its pictures and frames once they are resized, and
    which frames are taken of its files of video.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    fps: float | None = None
    num_frames: int | None = None
    do_sample_frames: bool | None = None
    """False: all frames."""


@dataclass(eq=False, slots=True)
class Sent:
    """A picture or a video as a request has it: one of url, encoded, data and frames is set, until it is
    read.
    """

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
    is_video: bool = False
    frames: list[Sent] = field(default_factory=list)
    """Pictures of a video that is a list of them."""
    fps: float | None = None
    """Frames a second of such a list."""

    @property
    def noun(self) -> str:
        return "video" if self.is_video else "picture"

    def part_of_message(self) -> JsonObject:
        """Returns the part of a message's content that stands for it."""
        return {"type": "video", "video": self} if self.is_video else {"type": "image", "image": self}

    def not_taken(self, why: str = "") -> ApiError:
        """The 400 of a model that takes no pictures. why: although it has a tower."""
        message = f"this server reads text only{f' ({why})' if why else ''}"
        if not self.kind:
            return bad_request(self.part, f"{message}. Leave it out.", "unsupported_field")
        return bad_request(f"{self.part}.type", f"{self.kind!r} is not supported: {message}")


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
        if isinstance(sent := part.get("image", part.get("video")), Sent):
            yield sent


def is_low(detail: object, path: str) -> bool:
    """detail: OpenAI's word for how closely a picture is to be looked at. Raises ApiError (400)."""
    if detail is not None and detail not in DETAILS:
        raise bad_request(path, f"expected one of {', '.join(DETAILS)}")
    return detail == "low"


class PictureReader:
    """Reads the pictures of all requests."""

    def __init__(self, hosts: Hosts, n_shares: int = 1) -> None:
        """hosts: those that pictures may be fetched from. n_shares: as of a Room, of the decoders."""
        self._hosts = hosts
        self._decoding = Room(lambda: N_DECODING, n_shares)
        self._kept = NamespaceShares[Picture](MAX_KEPT_BYTES, lambda picture: len(picture.pixels))
        """Pictures that were read before, by namespace: how soon one is read tells whether its own namespace
        sent it before, and nothing of others.
        """

    async def read(
        self,
        pictures: Sequence[Sent],
        info: PictureInfo | None,
        bounds: PictureBounds | None = None,
        context: int = 1 << 20,
        *,
        ticket: Ticket | None = None,
        room: Room | None = None,
        handling: Handling | None = None,
    ) -> Pictures:
        """info: how the model takes them; context: tokens of a prompt; ticket: of the request, which holds
        its part of the room for pixels from now on. handling: of the request, whose salt keeps what was read
        apart. Raises ApiError: 400 that names the picture at fault; 503
        when too many are read at once.
        """
        if info is None:
            raise pictures[0].not_taken()
        if len(pictures) > MAX_PICTURES:
            raise bad_request(pictures[MAX_PICTURES].path, f"a request may have {MAX_PICTURES} pictures at most")
        bounds = bounds or PictureBounds()
        least, most = _checked(bounds, info)
        salt = handling.cache_salt if handling else ""
        n_videos = sum(sent.is_video for sent in pictures)
        wish = _wish(bounds, info, most, int(VIDEO_SHARE * context) // max(1, n_videos))
        n_at_once = N_FETCHING if any(sent.url for sent in pictures) and not n_videos else N_DECODING
        n_at_once, ticket, most_bytes = min(n_at_once, len(pictures)), ticket or Ticket(), MAX_PIXEL_BYTES
        if room is not None:
            most_bytes = min(most_bytes, room.share)
            wanted = sum(wish.most_tokens if sent.is_video else info.max_tokens for sent in pictures)
            files = n_at_once * max(map(_most_bytes, pictures)) if self._hosts else 0
            ticket.held = await _in_time(ticket, room.take(ticket.turns, min(wanted * TOKEN_BYTES, most_bytes) + files))
        unread, by_path, n_bytes = iter(pictures), Pictures(), 0

        async def read_some() -> None:
            nonlocal n_bytes
            for sent in unread:
                if sent.is_video:
                    shown: Picture | Clip = await self._read_video(sent, wish, ticket)
                else:
                    top = max(least, min(most, LOW_PIXELS)) if sent.is_low else most
                    shown = await self._read(sent, least, top, ticket, salt)
                by_path[sent.path] = shown
                for picture in pictures_of(shown):
                    if picture.n_tokens > info.max_tokens:
                        message = f"has {picture.n_tokens} tokens. A picture may have {info.max_tokens} here."
                        raise bad_request(sent.path, message)
                    n_bytes += len(picture.pixels)
                if n_bytes > most_bytes:
                    most_tokens = most_bytes // TOKEN_BYTES
                    message = f"with it the pictures have more than {most_tokens} tokens. Send fewer or smaller ones."
                    raise bad_request(sent.path, message, "too_many_pixels")

        # One alone needs no task, whose end is seen some turns of the event loop later.
        tasks = [asyncio.create_task(read_some()) for _ in range(n_at_once)] if n_at_once > 1 else []
        try:
            async with asyncio.timeout(READ_S):
                await (asyncio.gather(*tasks) if tasks else read_some())
        except TimeoutError:
            message = f"the pictures were not read within {READ_S:g} s. Send fewer, or try again later."
            raise ApiError(503, message, code="pictures_timeout", headers={"retry-after": "10"}) from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if ticket.held is not None:
                ticket.held.shrink(min(n_bytes, ticket.held.size))
        return by_path

    async def _read(self, sent: Sent, least: int, most: int, ticket: Ticket, salt: str) -> Picture:
        try:
            data = await self._file(sent)
            sent.url = sent.encoded = ""
            sent.data = b""
            key = salt, await _away(len(data), _digest, data), least, most
            if (picture := self._kept.get(ticket.namespace, key)) is None:
                with await self._decoding.take(ticket.turns, 1):
                    picture = self._kept.get(ticket.namespace, key) or await read_picture(data, least, most)
                self._kept.put(ticket.namespace, key, picture)
            return picture
        except (Refused, UrlError) as error:
            raise bad_request(sent.path, str(error), "invalid_image") from None

    async def _read_video(self, sent: Sent, wish: VideoWish, ticket: Ticket) -> Clip:
        if not sent.frames and (message := needs_av()):
            raise bad_request(sent.path, message, "pictures_not_available")
        try:
            if sent.frames:
                if len(sent.frames) > wish.info.max_frames:
                    raise Refused(f"has {len(sent.frames)} frames. A video may have {wish.info.max_frames}.")
                wish = replace(wish, listed_fps=sent.fps or wish.info.fps)
                data: bytes | list[bytes] = await self._files(sent.frames)
            else:
                data = await self._file(sent)
            sent.url, sent.data = "", b""
            sent.frames.clear()
            with await self._decoding.take(ticket.turns, 1):
                return await read_video(data, wish)
        except (Refused, UrlError) as error:
            raise bad_request(sent.path, str(error), "invalid_video") from None

    async def _files(self, frames: list[Sent]) -> list[bytes]:
        """Raises UrlError that names the frame."""
        files: list[bytes] = []
        room = MAX_VIDEO_BYTES
        for i, frame in enumerate(frames):
            try:
                files.append(await self._file(frame))
            except UrlError as error:
                raise UrlError(f"frame {i}: {error}") from None
            frame.url, frame.data = "", b""
            if (room := room - len(files[-1])) < 0:
                raise UrlError(f"has frames of more than {MAX_VIDEO_BYTES // 1_000_000} MB together")
        return files

    async def _file(self, sent: Sent) -> bytes:
        """Raises UrlError."""
        scheme = sent.url[:6].partition(":")[0].lower()
        if scheme in ("http", "https"):
            if not self._hosts:
                raise UrlError(f"this server fetches no {sent.noun}s (--fetch-images-from). Send a data: URL.")
            return await fetch(sent.url, self._hosts, _most_bytes(sent))
        if sent.url and scheme != "data":
            raise UrlError("expected a data: URL" + ", or one of http or https" * bool(self._hosts))
        if sent.data:
            return sent.data
        return await _away(len(sent.url) + len(sent.encoded), _decoded, sent)


async def _in_time(ticket: Ticket, taking: Awaitable[Held]) -> Held:
    """Waits as a request waits for its place. Raises ApiError (503)."""
    limits = [ticket.queue_timeout_s or None, ticket.left_s()]
    wait_s = min((limit for limit in limits if limit is not None), default=None)
    try:
        async with asyncio.timeout(wait_s):
            return await taking
    except TimeoutError:
        raise waited_too_long(wait_s or 0.0) from None


async def _away(n_bytes: int, work: Callable[[T], bytes], given: T) -> bytes:
    """Does work on so many bytes in a thread, unless they are few: on a busy server each way to a thread and
    back takes longer.
    """
    return work(given) if n_bytes <= FEW_BYTES else await asyncio.to_thread(work, given)


def _decoded(sent: Sent) -> bytes:
    """Raises UrlError."""
    kind = "video" if sent.is_video else "image"
    return of_base64(of_data_url(sent.url, kind) if sent.url else sent.encoded, _most_bytes(sent))


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=16).digest()


def _most_bytes(sent: Sent) -> int:
    return MAX_VIDEO_BYTES if sent.is_video else MAX_PICTURE_BYTES


def pictures_of(shown: Picture | Clip) -> list[Picture]:
    """Pictures as the engine takes them: the one, or those of a clip."""
    return [shown] if isinstance(shown, Picture) else shown.pairs


def _checked(bounds: PictureBounds, info: PictureInfo) -> tuple[int, int]:
    """Pixels of a picture: the least and the most. Raises ApiError (400)."""
    for name in ("min_pixels", "max_pixels"):
        given = getattr(bounds, name)
        if given is not None and not info.min_pixels <= given <= info.max_pixels:
            message = f"must be from {info.min_pixels} to {info.max_pixels}"
            raise bad_request(f"mm_processor_kwargs.{name}", message)
    least = info.min_pixels if bounds.min_pixels is None else bounds.min_pixels
    most = info.max_pixels if bounds.max_pixels is None else bounds.max_pixels
    if least > most:
        raise bad_request("mm_processor_kwargs.min_pixels", "is more than max_pixels")
    return least, most


def _wish(bounds: PictureBounds, info: PictureInfo, frame_pixels: int, most_tokens: int) -> VideoWish:
    """Raises ApiError (400)."""
    if bounds.fps is not None and not 0 < bounds.fps <= MAX_FPS:
        raise bad_request("mm_processor_kwargs.fps", f"must be above 0, and at most {MAX_FPS:g}")
    if bounds.num_frames is not None:
        if not 1 <= bounds.num_frames <= info.video.max_frames:
            raise bad_request("mm_processor_kwargs.num_frames", f"must be from 1 to {info.video.max_frames}")
        if bounds.fps is not None:
            raise bad_request("mm_processor_kwargs.num_frames", "excludes fps")
    return VideoWish(
        info=info.video,
        frame_pixels=frame_pixels,
        most_tokens=most_tokens,
        least_pixels=bounds.min_pixels or 0,
        fps=bounds.fps,
        num_frames=bounds.num_frames,
        takes_all=bounds.do_sample_frames is False,
    )


Marks = tuple[int | None, int | None]
"""The ids that the template writes for a picture and for a pair of frames."""


def expanded(ids: list[int], marks: Marks, pictures: Sequence[Picture]) -> tuple[list[int], list[Picture]]:
    """Ids of a prompt with as many marks for each picture as it has tokens, and the pictures in their places.

    Raises ApiError (400) where the template does not write them.
    """
    known = {mark for mark in marks if mark is not None}
    places = [at for at, token_id in enumerate(ids) if token_id in known]
    if [ids[at] for at in places] != [marks[picture.n_frames - 1] for picture in pictures]:
        raise not_shown(len(places), len(pictures))
    whole: list[int] = []
    placed, end = [], 0
    for place, picture in zip(places, pictures, strict=True):
        whole += ids[end:place]
        placed.append(replace(picture, first=len(whole)))
        whole += [ids[place]] * picture.n_tokens
        end = place + 1
    return whole + ids[end:], placed


def not_shown(n_shown: int, n: int) -> ApiError:
    """The 400 for a template that shows other pictures than there are."""
    message = f"the chat template shows {n_shown} of {n} pictures. It is not made for them."
    return bad_request("messages", message, "pictures_not_shown")


def check_room(shown: Sequence[Picture | Clip], sent: Sequence[Sent], n_prompt: int, limit: int) -> None:
    """Says which picture alone is too large, if one is, of a prompt of n_prompt tokens, too long for a
    context of `limit`. Raises ApiError (400).
    """
    room = limit - 1 - n_prompt + sum(picture.n_tokens for picture in shown)
    for part, picture in zip(sent, shown, strict=True):
        if picture.n_tokens > room > 0:
            message = f"has {picture.n_tokens} tokens, and beside the text this model's context of {limit} tokens has room for {room}. "
            if isinstance(picture, Clip):
                n, most = len(picture.pairs), max(1, room // len(picture.pairs)) * BLOCK**2
                message += f"Send fewer than its {n} pairs of frames, or mm_processor_kwargs with max_pixels of {most}."
            else:
                message += f"Send a smaller one, or mm_processor_kwargs with max_pixels of at most {room * BLOCK**2}."
            raise bad_request(part.path, message, "context_length_exceeded")
