"""Pictures of a prompt: their pixels are those of the published processor, bit for bit; hostile files harm nobody."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import uvloop

pytest.importorskip("PIL")

from PIL import Image, ImageOps

from deltic.engine.messages import Picture
from deltic.models.fields import UnsupportedModelError
from deltic.models.rotary import PromptPositions
from deltic.models.vision.pixels import Patches, PictureRules
from deltic.models.vision.shape import BLOCK
from deltic.server import isolated
from deltic.server.chat import pictures
from deltic.server.chat.pictures import fitted, of_pixels, read_picture
from deltic.server.errors import ApiError
from deltic.server.isolated import ForkServer, Refused
from tests.decoders import DECODER
from tests.pictures import FORMS, doubtful, file_of, png, refused, rgb, scene, whole, zeros
from tests.waiting import until

SMALL = PictureRules(min_pixels=4096, max_pixels=20_000)


def decoded(data: bytes, rules: PictureRules = SMALL) -> Picture:
    """In this process."""
    image = pictures._decode(data, rules.min_pixels, rules.max_pixels)
    return of_pixels(image.tobytes(), image.height, image.width)


def pixels_of(picture: Picture) -> np.ndarray:
    """uint8 [height, width, 3]."""
    return np.frombuffer(picture.pixels, np.uint8).reshape(32 * picture.rows, 32 * picture.columns, 3)


def published(image: Image.Image, rules: PictureRules = SMALL) -> tuple[np.ndarray, list[int]]:
    """Patches and grid of the published processor."""
    transformers = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    processor = transformers.Qwen2VLImageProcessorPil(
        size={"shortest_edge": rules.min_pixels, "longest_edge": rules.max_pixels},
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
        image_mean=list(rules.mean),
        image_std=list(rules.std),
    )
    made = processor(ImageOps.exif_transpose(image), return_tensors="np")
    return made["pixel_values"], made["image_grid_thw"][0].tolist()


def same(data: bytes, rules: PictureRules = SMALL) -> None:
    """The bytes of a file, as the published processor has them."""
    with Image.open(io.BytesIO(data)) as image:
        values, grid = published(image, rules)
    picture = decoded(data, rules)
    found = Patches(pixels_of(picture)[None], rules)[:]
    assert [1, 2 * picture.rows, 2 * picture.columns] == grid and picture.n_tokens == len(values) // 4
    assert found.dtype == np.float32 and (found.view(np.int32) == values.astype(np.float32).view(np.int32)).all()


@pytest.mark.parametrize("form", FORMS)
def test_every_format(form: str) -> None:
    same(whole()[form])


@pytest.mark.parametrize(
    ("width", "height"), [(1, 1), (3, 500), (500, 3), (64, 64), (63, 65), (300, 500), (47, 48), (48, 80), (1, 200)]
)
def test_sizes(width: int, height: int) -> None:
    same(file_of(rgb(width, height), "PNG"))
    if width * height > 9:
        same(file_of(rgb(width, height), "PNG"), PictureRules())


def test_patches_are_made_as_they_are_read() -> None:
    frames = np.stack([scene(96, 64, 3), scene(96, 64, 3)[::-1]])
    rules = PictureRules()
    both = Patches(frames, rules)
    whole, first, second = both[:], *(Patches(frame[None], rules)[:] for frame in frames)
    assert both.shape == whole.shape == (24, 1536)
    split = [x.reshape(24, 3, 2, 256) for x in (whole, first, second)]
    assert (split[0][:, :, 0] == split[1][:, :, 0]).all() and (split[0][:, :, 1] == split[2][:, :, 1]).all()
    for begin in range(0, 24, 4):
        for end in range(begin, 25, 4):
            assert (both[begin:end] == whole[begin:end]).all() and len(both[begin:end]) == end - begin


def test_other_numbers_of_a_model() -> None:
    rules = PictureRules(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711))
    same(file_of(rgb(), "PNG"), rules)


def transparent(mode: str) -> bytes:
    image = Image.fromarray(scene(61, 43, 4))
    if mode == "P":
        return file_of(rgb().quantize(16), "PNG", transparency=3)
    if mode == "L":
        return file_of(rgb().convert("L"), "PNG", transparency=70)
    return file_of(image.convert(mode), "PNG")


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L"])
def test_what_is_transparent_is_white(mode: str) -> None:
    same(transparent(mode))
    clear = file_of(Image.new("RGBA", (64, 64), (9, 9, 9, 0)), "PNG")
    assert (pixels_of(decoded(clear)) == 255).all()


@pytest.mark.parametrize("form", ["WEBP", "GIF", "TIFF", "AVIF"])
def test_transparent_files_of_other_formats(form: str) -> None:
    image = Image.fromarray(scene(61, 43, 4))
    image.putalpha(image.getchannel(0).point(lambda level: 255 * (level > 90)))
    same(file_of(image, form))


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr"])
def test_modes(mode: str) -> None:
    form = "PNG" if mode in ("1", "L", "P") else "JPEG" if mode == "CMYK" else "TIFF"
    same(file_of(rgb().convert(mode), form))


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_sixteen_bits_lose_their_lower_byte(form: str) -> None:
    """Grey as colours do, which Pillow's own conversion clips."""
    grey = scene(64, 64, 1)[:, :, 0]
    wide = Image.fromarray(grey.astype(np.uint16) * 256 + 77)
    assert (pixels_of(decoded(file_of(wide, form))) == grey[:, :, None]).all()
    if form == "PNG":
        clear = pixels_of(decoded(file_of(wide, form, transparency=int(grey[5, 5]) * 256 + 77)))
        assert (clear[5, 5] == 255).all() and (clear == 255).mean() < 0.2


@pytest.mark.parametrize("orientation", range(10))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_orientation(form: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    same(file_of(rgb(90, 40), form, exif=exif))


def test_a_palette_is_turned_with_its_transparency() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    same(file_of(rgb(90, 40).quantize(16), "PNG", transparency=3, exif=exif))


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG", "TIFF", "AVIF"])
def test_the_first_frame_is_taken(form: str) -> None:
    frames = [rgb(seed=i) for i in range(3)]
    same(file_of(frames[0], form, save_all=True, append_images=frames[1:]))


def test_a_picture_is_read_by_a_process_of_its_own() -> None:
    data = file_of(rgb(300, 500), "PNG")
    picture = asyncio.run(read_picture(data, SMALL.min_pixels, SMALL.max_pixels))
    assert picture == decoded(data)
    assert (picture.rows, picture.columns, picture.n_tokens) == (5, 3, 15)
    assert len(Patches(pixels_of(picture)[None], SMALL)) == 60
    other = of_pixels(picture.pixels, 32 * 3, 32 * 5)
    assert other.key != picture.key, "the same bytes as another picture"


def test_published_sizes() -> None:
    """The example of the specification; and rounding, which is to even."""
    assert fitted(300, 500, 65_536, 16_777_216) == (288, 512)
    assert fitted(16, 16, 65_536, 16_777_216) == (256, 256)
    assert fitted(5000, 5000, 65_536, 16_777_216) == (4096, 4096)
    assert fitted(336, 400, 65_536, 16_777_216) == (320, 384)
    transformers = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    generator = np.random.default_rng(0)
    for _ in range(3000):
        height, width = (int(10 ** generator.uniform(0, 4)) for _ in range(2))
        rules = PictureRules(int(10 ** generator.uniform(2, 5)), int(10 ** generator.uniform(5, 7)))
        limits = rules.min_pixels, rules.max_pixels
        try:
            expected = transformers.smart_resize(height, width, 32, *limits)
        except ValueError:
            with pytest.raises(Refused, match="200 times"):
                fitted(height, width, rules.min_pixels, rules.max_pixels)
        else:
            assert fitted(height, width, rules.min_pixels, rules.max_pixels) == expected


def test_rules() -> None:
    assert PictureRules.from_config({}) == PictureRules()
    size = {"shortest_edge": 1024, "longest_edge": 4096}
    config: dict[str, Any] = {"size": size, "patch_size": 16, "merge_size": 2, "image_mean": [0.1, 0.2, 0.3]}
    assert PictureRules.from_config(config) == PictureRules(1024, 4096, mean=(0.1, 0.2, 0.3))
    assert PictureRules.from_config({"min_pixels": 1024, "max_pixels": 4096}) == PictureRules(1024, 4096)
    for field, value in (
        ("patch_size", 14),
        ("merge_size", 4),
        ("resample", 2),
        ("do_convert_rgb", False),
        ("image_std", [0.5, 0.0, 0.5]),
        ("image_mean", [0.5]),
        ("rescale_factor", -1),
        ("size", [3]),
        ("size", {"shortest_edge": 9, "longest_edge": 5}),
    ):
        with pytest.raises(UnsupportedModelError, match=field if field != "image_std" else "image_std"):
            PictureRules.from_config({field: value})


HOSTILE = list(refused())
DOUBTFUL = list(doubtful())


def test_there_are_many_hostile_files() -> None:
    assert len(HOSTILE) + len(DOUBTFUL) >= 60


@pytest.mark.parametrize(("data", "said"), [each[1:] for each in HOSTILE], ids=[each[0] for each in HOSTILE])
def test_hostile_files_are_refused(data: bytes, said: str) -> None:
    before_s = time.monotonic()
    with pytest.raises(Refused, match=said) as refusal:
        asyncio.run(read_picture(data, 65_536, 16_777_216))
    assert str(refusal.value).isprintable() and len(str(refusal.value)) < 300
    assert time.monotonic() - before_s < 15


@pytest.mark.parametrize("data", [each[1] for each in DOUBTFUL], ids=[each[0] for each in DOUBTFUL])
def test_doubtful_files_are_refused_or_read(data: bytes) -> None:
    try:
        picture = asyncio.run(read_picture(data, SMALL.min_pixels, SMALL.max_pixels))
    except Refused as error:
        assert str(error)
    else:
        assert np.isfinite(Patches(pixels_of(picture)[None], SMALL)[:]).all()


def test_what_is_broken_beside_the_pixels_is_passed_over() -> None:
    for name, data in DOUBTFUL:
        if name.startswith("exif"):
            assert pixels_of(decoded(data)).size


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "cannot be decoded. Send PNG"),
        ("x = bytearray(1 << 50)", "cannot be decoded. Send PNG"),
        ("import time; time.sleep(60)", "within 1.5 s"),
    ],
    ids=range(3),
)
def test_a_decoder_that_fails_takes_nobody_with_it(
    program: str, said: str, forks: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "PROGRAM", (DECODER, program))
    monkeypatch.setattr(pictures, "DECODE_S", 0.5)
    before_s = time.monotonic()
    with pytest.raises(Refused, match=said):
        asyncio.run(read_picture(whole()["png"], SMALL.min_pixels, SMALL.max_pixels))
    assert time.monotonic() - before_s < 5


def test_a_decoder_makes_way_if_it_takes_long_and_is_the_first_that_the_kernel_ends(forks: ForkServer) -> None:
    code = """if True:
        import os, time
        from deltic.server.isolated import QUICK_CPU_S, answer
        def niceness():  # nice(0) writes what it has read, and so may undo what the server has set meanwhile
            return os.getpriority(os.PRIO_PROCESS, 0)
        before = niceness()
        def tell(_):
            time.sleep(2 * QUICK_CPU_S)
            waited = niceness()
            while niceness() == before and time.process_time() < 5:
                pass
            return f"{waited - before} {niceness()} {open('/proc/self/oom_score_adj').read()}".encode()
        status = answer(tell, limit_s=4, memory=1 << 30, most_bytes=9)"""
    begun_s = time.monotonic()
    told = asyncio.run(isolated.ask((DECODER, code), b"", 60, "died"))  # by a busy machine's clock
    assert time.monotonic() - begun_s >= isolated.QUICK_CPU_S, "a small picture is decoded as soon as may be"
    nice = min(19, os.nice(0) + isolated.NICENESS)
    assert [int(one) for one in told.split()] == [0, nice, 1000], "nor does it count to wait for a processor"
    spin = code.replace("return f", "\n            while True: pass\n            return f").replace("_s=4", "_s=1")
    with pytest.raises(Refused, match="within 20 s"):  # its own limit, of a processor's time, is lower
        asyncio.run(isolated.ask((DECODER, spin), b"", 20, "died"))


def test_libraries_are_imported_once_for_all_pictures() -> None:
    async def go() -> None:
        asked = (whole()["png"], SMALL.min_pixels, SMALL.max_pixels)
        first = await read_picture(*asked)
        took_s = []
        for _ in range(9):
            begun_s = time.perf_counter()
            assert await read_picture(*asked) == first
            took_s.append(time.perf_counter() - begun_s)
        importing_s = min(_importing_s() for _ in range(3))
        assert min(took_s) < importing_s / 2, "each picture had to wait for Pillow"

    asyncio.run(go())


def _importing_s() -> float:
    begun_s = time.perf_counter()
    subprocess.run([sys.executable, "-I", "-c", "import numpy, PIL.Image"], check=True)
    return time.perf_counter() - begun_s


def test_what_a_decoder_made_is_taken_in_few_turns_of_the_event_loop(forks: ForkServer) -> None:
    """Each is behind all other requests; a picture of 1,024 tokens took 17."""
    program = DECODER, "import sys; sys.stdout.buffer.write(bytes(1024 * 3072)); sys.stdout.flush()"

    async def go() -> int:
        await isolated.ask(program, b"", 60, "died")
        asked, n_turns = asyncio.create_task(isolated.ask(program, b"", 60, "died")), 0
        while not asked.done():
            n_turns += 1
            time.sleep(0.1)
            await asyncio.sleep(0)
        assert await asked == bytes(1024 * 3072)
        return n_turns

    assert uvloop.run(go()) <= 10


def test_a_fork_server_that_was_ended_is_started_again(forks: ForkServer) -> None:
    program = DECODER, "print(end='done')"

    async def go() -> None:
        assert await isolated.ask(program, b"", 10, "died") == b"done"
        first = forks._process
        assert first is not None
        lasting = asyncio.create_task(isolated.ask((DECODER, "import time; time.sleep(60)"), b"", 60, "died"))
        await asyncio.sleep(0.3)
        first.kill()
        first.wait()
        assert await isolated.ask(program, b"", 10, "died") == b"done" and forks._process is not first
        lasting.cancel()

    asyncio.run(go())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_file_is_decoded_while_the_server_drains_and_never_called_bad(
    forks: ForkServer, number: int, tmp_path: Path
) -> None:
    """A service manager sends its signal to every process."""
    begun = tmp_path / "begun"

    async def go() -> None:
        code = (
            f"import time; open({str(begun)!r}, 'w'); print('x' * 99, flush=True); time.sleep(0.5); print(end='done')"
        )
        asked = asyncio.create_task(isolated.ask((DECODER, code), b"", 10, "died"))
        await until(begun.exists)
        assert forks._process is not None
        forks._process.send_signal(number)
        if number != signal.SIGKILL:
            assert (await asked).endswith(b"done")
        else:
            with pytest.raises(ApiError, match="ended while a file"):
                await asked

    asyncio.run(go())


def test_forks_end_with_their_server(forks: ForkServer) -> None:
    async def go() -> None:
        code = "import os, time; print(os.getpid(), end=' ', flush=True); time.sleep(60)"
        with forks.connect((DECODER, code)) as channel:
            pid = int(await asyncio.get_running_loop().sock_recv(channel, 99))
            forks.stop()
            for _ in range(100):
                if not Path(f"/proc/{pid}").exists():
                    return
                await asyncio.sleep(0.05)
        raise AssertionError("it goes on")

    asyncio.run(go())


def test_a_file_is_not_lost_where_no_process_can_be_forked(forks: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(subprocess, "Popen", no_room)
    with pytest.raises(ApiError, match="Too many open files") as refused:
        asyncio.run(isolated.ask((DECODER, ""), b"", 10, "died"))
    assert refused.value.status == 503
    monkeypatch.undo()
    monkeypatch.setattr(isolated, "FORKS", forks)
    unable = "import os\ndef fork(): raise BlockingIOError\nos.fork = fork"
    monkeypatch.setattr(isolated, "COMMAND", (sys.executable, "-I", "-c", f"{unable}\n{isolated.COMMAND[-1]}"))
    with pytest.raises(ApiError, match="memory ran out") as refused:
        asyncio.run(isolated.ask(("deltic.server.chat.pictures",), b"", 10, "died"))
    assert refused.value.status == 503


def test_the_fork_server_starts_at_once_from_a_large_server() -> None:
    """uvloop's own way forks: of 400 MB it took 0.2 s, in which nobody was answered, and longer on a busy machine."""
    code = """if True:
        import asyncio, time, uvloop
        from deltic.server.isolated import ForkServer
        large = bytearray(b"x") * 400_000_000
        took = []
        async def go():
            for _ in range(9):
                server = ForkServer()
                before = time.perf_counter()
                server.connect(("deltic.server.chat.pictures", "1", "1")).close()
                took.append(time.perf_counter() - before)
                server.stop()
        uvloop.run(go())
        print(min(took))"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(told.stdout) < 0.05


def test_a_decoder_ends_with_who_asked(forks: ForkServer, tmp_path: Path) -> None:
    told = tmp_path / "pid"
    code = f"import os, time; open({str(told)!r}, 'w').write(str(os.getpid())); time.sleep(60)"

    async def go() -> None:
        asked = asyncio.create_task(isolated.ask((DECODER, code), b"x" * 2_000_000, 60, "died"))
        while not (told.exists() and told.read_text()):
            await asyncio.sleep(0.05)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        while Path(f"/proc/{told.read_text()}").exists():
            await asyncio.sleep(0.05)

    asyncio.run(asyncio.wait_for(go(), 10))


def test_answers_of_any_size_and_many_at_once(forks: ForkServer) -> None:
    code = """if True:
        import sys
        from deltic.server.isolated import answer
        status = answer(lambda data: data * 3, limit_s=9, memory=1 << 30, most_bytes=1 << 24)"""

    async def go() -> None:
        files = [os.urandom(size) for size in (0, 1, 3, 4, 70_000, 5_000_000) for _ in range(4)]
        made = await asyncio.gather(*(isolated.ask((DECODER, code), data, 9, "died") for data in files))
        assert made == [3 * data for data in files]

    asyncio.run(go())


def test_the_program_of_pictures_imports_little() -> None:
    """The fork server holds it: nothing of ours but itself and what isolates it, and the same squares."""
    listed = "import sys, deltic.server.chat.pictures; print(*sorted(sys.modules))"
    told = subprocess.run(
        [sys.executable, "-I", "-c", listed], capture_output=True, text=True, check=True
    ).stdout.split()
    ours = {name for name in told if name.startswith("deltic")} - {"deltic", "deltic.server", "deltic.server.chat"}
    assert ours == {"deltic.server.chat.pictures", "deltic.server.isolated"}
    assert not {"msgspec", "numpy", "asyncio", "inspect", "pathlib"} & {*told} and pictures.BLOCK == BLOCK


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
@pytest.mark.parametrize("size", [(97, 61), (301, 33), (33, 301)])
def test_a_strip_at_a_time_gives_the_same_pixels(mode: str, size: tuple[int, int], monkeypatch: Any) -> None:
    image = rgb(*size)
    image = image.convert("L").convert("I;16") if mode == "I;16" else image.convert(mode)
    if mode == "P":
        image.info["transparency"] = 3
    whole = pictures._in_colours(image)
    for height, width in ((64, 96), (32, 32), (320, 64), (size[1], 64), (64, size[0])):
        wanted = whole.resize((width, height), Image.Resampling.BICUBIC)
        for n in (1 << 20, 7 * size[0], 1):
            monkeypatch.setattr(pictures, "STRIP_PIXELS", n)
            assert pictures.resized(image.copy(), height, width).tobytes() == wanted.tobytes()


def test_a_large_picture_is_in_memory_once() -> None:
    """Its transparency and its colours are seen to, and it is made smaller, a strip at a time."""
    code = """if True:
        import resource, sys
        from deltic.server.chat import pictures
        from PIL import Image
        data = sys.stdin.buffer.read()
        pictures._decode(data, 1024, 1 << 20)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"""

    def peak(side: int) -> int:
        data = png(side, side, colour=6, data=zeros((4 * side + 1) * side))
        said = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True).stdout
        return int(said) * 1024

    assert peak(3072) - peak(64) < 1.6 * 4 * 3072**2


def test_a_decoders_words_are_not_repeated() -> None:
    """They may have addresses of this process in them."""
    with pytest.raises(Refused) as error, pictures.decoding():
        raise OSError("cannot identify <_io.BytesIO object at 0x7f3a5c0b1d50>")
    assert str(error.value) == "cannot be decoded. Is it whole?"


def test_every_install_takes_pictures() -> None:
    """A model that sees is advertised as one: so what decodes is no extra."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert any(each.startswith("pillow") for each in project["dependencies"])


def test_the_server_does_not_load_pillow() -> None:
    import subprocess

    code = "import deltic.server.chat.pictures, sys; sys.exit('PIL' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_positions_of_a_prompt() -> None:
    prompt = PromptPositions([(2, 2, 3)])
    positions, inside = prompt.of(0, 10)
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert inside.tolist() == [False] * 2 + [True] * 6 + [False] * 2
    for start in range(10):
        part, is_picture = prompt.of(start, 12)
        assert (part[:, : 10 - start] == positions[:, start:]).all() and (
            is_picture[: 10 - start] == inside[start:]
        ).all()
    assert part[:, -1].tolist() == [8, 8, 8]
    plain, inside = PromptPositions([]).of(4, 7)
    assert plain.tolist() == [[4, 5, 6]] * 3 and not inside.any()
    for wrong in ([(0, 2, 2), (3, 1, 1)], [(0, 0, 2)], [(-1, 1, 1)]):
        with pytest.raises(ValueError, match="a picture of"):
            PromptPositions(wrong)


def test_positions_are_the_published_ones() -> None:
    torch = pytest.importorskip("torch")
    modelling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    from types import SimpleNamespace

    model = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)), get_vision_position_ids=None
    )
    kind = modelling.Qwen3_5Model
    model.get_vision_position_ids = lambda *args, **more: kind.get_vision_position_ids(model, *args, **more)
    generator = np.random.default_rng(0)
    for _ in range(50):
        types: list[int] = []
        placed, grids = [], {1: [], 2: []}
        for _ in range(generator.integers(1, 6)):
            types += [0] * int(generator.integers(1, 9))
            kind_of = int(generator.integers(1, 3))
            rows, columns = (int(n) for n in generator.integers(1, 7, 2))
            placed.append((len(types), rows, columns))
            grids[kind_of].append([1, 2 * rows, 2 * columns])
            types += [kind_of] * (rows * columns)
        types += [0] * int(generator.integers(0, 5))
        ids = torch.zeros(1, len(types), dtype=torch.long)
        images, videos = (torch.tensor(grids[i]) if grids[i] else None for i in (1, 2))
        expected, delta = kind.get_rope_index(model, ids, torch.tensor([types]), images, videos)
        found, inside = PromptPositions(placed).of(0, len(types) + 1)
        assert (found[:, :-1] == expected[:, 0].numpy()).all() and (found[:, -1] == len(types) + int(delta)).all()
        assert (inside[:-1] == (np.array(types) > 0)).all()
