"""Prompts with pictures on tiny models: the published model's logits, and the same bits whatever happens beside them."""

from __future__ import annotations

import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from deltic import LLM
from deltic.config import ConfigError, EngineConfig
from deltic.engine.checks import RequestError
from deltic.engine.engine import Engine
from deltic.engine.messages import Picture, Request, SamplingParams
from deltic.models.fields import CheckpointError
from deltic.models.packed import pack_model
from deltic.models.vision.pixels import Patches, PictureRules
from deltic.ops.cpu.index import GROUP
from deltic.ops.geometry import PAGE_SIZE
from deltic.runtime.build import build_runner
from deltic.runtime.cpu.device import Cpu
from deltic.runtime.cpu.text import Runner
from deltic.server.chat.pictures import of_pixels
from tests.cpu.grid import grid
from tests.cpu.test_prefix_bits import Watched
from tests.cpu.test_reference import needs_transformers, published_model
from tests.tiny import TOWER, tiny_checkpoint
from tests.tiny_config import N_REAL_VOCAB, TOKEN_ID
from tests.tiny_gguf import write_gguf
from tests.tiny_mmproj import write_mmproj
from tests.tiny_vision import random_tower

PAD, VIDEO_PAD = TOKEN_ID["<|image_pad|>"], TOKEN_ID["<|video_pad|>"]


@cache
def picture(rows: int, columns: int, seed: int = 0, n_frames: int = 1) -> Picture:
    """Of so many tokens: stripes and noise."""
    size = n_frames, 32 * rows, 32 * columns, 3
    pixels = np.random.default_rng(seed).integers(0, 256, size).astype(np.uint8)
    pixels[:, :, ::7] = 40 * (seed % 6)
    return of_pixels(pixels.tobytes(), size[1], size[2], n_frames)


def prompt_of(*parts: str | Picture) -> tuple[list[int], list[Picture]]:
    """Bytes of texts, and pictures with the tokens around them."""
    ids: list[int] = []
    pictures: list[Picture] = []
    for part in parts:
        if isinstance(part, str):
            ids += part.encode()
            continue
        ids.append(TOKEN_ID["<|vision_start|>"])
        pictures.append(Picture(**{name: getattr(part, name) for name in part.__struct_fields__} | {"first": len(ids)}))
        ids += [PAD if part.n_frames == 1 else VIDEO_PAD] * part.n_tokens + [TOKEN_ID["<|vision_end|>"]]
    return ids, pictures


def request(name: str, *parts: str | Picture, max_tokens: int = 8, **params: Any) -> Request:
    ids, pictures = prompt_of(*parts)
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **({"temperature": 0.0} | params))
    return Request(id=name, prompt_ids=ids, pictures=pictures, params=sampling)


def build(kind: str = "dense", **settings: Any) -> Runner:
    config = {
        "model": str(tiny_checkpoint(kind, has_tower=True, has_mtp=True)),
        "threads": 1,
        "max_num_seqs": 4,
        "max_model_len": 1024,
        "max_step_tokens": 320,
        "n_pages": 120,
        "n_checkpoints": 24,
        "max_picture_tokens": 256,
    } | settings
    runner = build_runner(EngineConfig(**config), lambda stage, done: None, Cpu())
    assert isinstance(runner, Runner)
    return runner


def run(watched: Watched, *requests: Request) -> None:
    for each in requests:
        watched.engine.add(each)
    for _ in range(5000):
        if not watched.engine.has_work():
            break
        watched.engine.step()
        watched.engine.check()
    assert not watched.engine.has_work()


PROMPTS: dict[str, list[str | Picture]] = {
    "one": ["Look at this: ", picture(3, 5), " What is it?"],
    "three": [
        "A",
        picture(2, 2, 1),
        picture(8, 9, 2),
        "and some text between them, more than a few words",
        picture(1, 40, 3),
        "?",
    ],
    "first": [picture(9, 8, 4), "said"],
    "last": ["ends in a picture ", picture(4, 4, 5)],
    "video": ["<0.3 seconds>", picture(4, 6, 6, 2), "<1.3 seconds>", picture(4, 6, 7, 2), "What happens?"],
}


@needs_transformers
@pytest.mark.parametrize("kind", ["dense", "moe", "flash"])
def test_logits_are_those_of_the_published_model(kind: str) -> None:
    """In float32 there, bfloat16 products here: as far apart as for text (test_engine.py)."""
    published = published_model(tiny_checkpoint(kind, has_tower=True, has_mtp=True))
    watched = Watched(build(kind))
    for name, parts in PROMPTS.items():
        ids, pictures = prompt_of(*parts)
        run(watched, request(name, *parts))
        answer = watched.answers[name, 0]
        expected = published_logits(published, ids, pictures)
        found = torch.from_numpy(answer.rows[0])
        gap = (found - expected).abs()
        scale = expected.std()
        assert gap.max() < (0.2 if kind == "dense" else 0.6) * scale, f"{name}: {gap.max()} of {scale}"
        blind = published_logits(published, ids, [])
        assert (blind - expected).abs().max() > 0.5 * scale, "the picture matters"


@torch.no_grad()
def published_logits(model: Any, ids: list[int], pictures: list[Picture]) -> torch.Tensor:
    """Of the last token. A video's pairs of frames are passed as videos of their own."""
    given: dict[str, Any] = {}
    kinds = torch.zeros(1, len(ids), dtype=torch.long)
    tokens = torch.tensor([ids])
    for n_frames, prefix, values, kind, pad in (
        (1, "image", "pixel_values", 1, "<|image_pad|>"),
        (2, "video", "pixel_values_videos", 2, "<|video_pad|>"),
    ):
        some = [p for p in pictures if p.n_frames == n_frames]
        if not some:
            continue
        given[values] = torch.from_numpy(np.concatenate([patches_of(p) for p in some]))
        given[f"{prefix}_grid_thw"] = torch.tensor([[1, 2 * p.rows, 2 * p.columns] for p in some])
        for p in some:
            kinds[0, p.first : p.end] = kind
            tokens[0, p.first : p.end] = TOKEN_ID[pad]
    return model(input_ids=tokens, mm_token_type_ids=kinds, **given).logits[0, -1]


def patches_of(one: Picture) -> np.ndarray:
    pixels = np.frombuffer(one.pixels, np.uint8).reshape(one.n_frames, 32 * one.rows, 32 * one.columns, 3)
    return Patches(pixels, PictureRules())[:]


@needs_transformers
def test_generated_tokens_stand_where_the_published_model_has_them() -> None:
    """Behind a picture positions are fewer than tokens. Where the two best are apart the next token is the same."""
    published = published_model(tiny_checkpoint("dense", has_tower=True, has_mtp=True))
    watched = Watched(build())
    n_clear = 0
    for name in ("one", "three", "last"):
        run(watched, request(name, *PROMPTS[name], max_tokens=64))
        answer = watched.answers[name, 0]
        rows = torch.from_numpy(np.stack(answer.rows))
        drawn = rows[:, :N_REAL_VOCAB].argmax(-1).tolist()
        ids, pictures = prompt_of(*PROMPTS[name])
        for n in (1, 3, 7, 15, 31, 47, 63):
            expected = published_logits(published, ids + drawn[:n], pictures)
            best, second = expected[:N_REAL_VOCAB].topk(2).values.tolist()
            gap = float((rows[n] - expected).abs().max())
            assert gap < 0.2
            if best - second > 2 * gap:
                n_clear += 1
                assert drawn[n] == int(expected[:N_REAL_VOCAB].argmax())
    assert n_clear > 8


def cold(kind: str = "dense", **settings: Any) -> Watched:
    return Watched(build(kind, prefix_cache=False, **settings))


def same_answers(found: Watched, expected: Watched, name: str) -> None:
    mine, theirs = found.answers[name, 0].rows, expected.answers[name, 0].rows
    assert len(mine) == len(theirs)
    for i, (row, other) in enumerate(zip(mine, theirs, strict=True)):
        assert (row.view(np.int32) == other.view(np.int32)).all(), f"{name}: token {i}"


LONG = "A long text before the picture, so that it is on another page. " * 3


def conversation(generator: random.Random) -> list[str | Picture]:
    """Parts that others begin with, too."""
    parts: list[str | Picture] = [LONG[: generator.choice([10, 70, 190])]]
    for _ in range(generator.randrange(1, 4)):
        rows, columns = generator.choice([(2, 2), (3, 5), (8, 9), (12, 7)])
        parts += [picture(rows, columns, generator.randrange(2)), LONG[: generator.choice([1, 5, 80])]]
    return parts


@pytest.mark.parametrize(
    ("kind", "quantize"),
    grid([("dense", None), ("moe", None), ("dense", "int8"), ("flash", None)], [("dense", None)], pytest.mark.long),
)
def test_no_bit_depends_on_company_or_cache(kind: str, quantize: str | None, tmp_path: Path) -> None:
    """Prefix hits before, in and behind pictures, chunks, preemption, aborts, host memory, a restart from disk; a pool of the
    tower's rows that holds few of the pictures.
    """
    generator = random.Random(1)
    settings = {"n_pages": 16, "n_checkpoints": 12, "cache_host_gb": 0.003, "cache_dir": tmp_path}
    settings |= {"max_picture_tokens": 90, "quantize": quantize}  # n_blocks = 4 * 2 + 64
    asked: dict[str, Request] = {}
    alone = cold(kind, max_step_tokens=128, quantize=quantize)
    for life in range(2):
        watched = Watched(build(kind, **settings))
        assert watched.engine.pictures is not None
        for turn in range(12):
            some = {f"{life} {turn} {i}": conversation(generator) for i in range(generator.randrange(1, 6))}
            requests = [request(name, *parts, max_tokens=generator.randrange(2, 130)) for name, parts in some.items()]
            for each in requests:
                watched.engine.add(each)
                for _ in range(generator.randrange(4)):
                    watched.engine.step()
            if turn % 4 == 3:
                watched.engine.abort(requests[0].id)
                requests = requests[1:]
            run(watched)
            asked |= {each.id: each for each in requests}
        assert watched.engine.scheduler.n_preemptions and watched.engine.pictures.n_hits
        stats = watched.engine.stats().cache
        assert stats.n_hit_tokens and (not life or stats.read_bytes.get("disk"))
        for name, each in asked.items():
            if name.startswith(f"{life} "):
                alone.engine.add(each)
                run(alone)
                same_answers(watched, alone, name)
        watched.engine.close(10.0)


def test_another_picture_of_the_same_size_is_another_prompt() -> None:
    watched = Watched(build())
    first, second = picture(8, 9, 1), picture(8, 9, 2)
    for name, which in (("a", first), ("b", second), ("c", first)):
        run(watched, request(name, LONG, which, "What is it?"))
    a, b, c = (np.stack(watched.answers[name, 0].rows) for name in "abc")
    assert (a == c).all() and (a != b).any()
    pictures = watched.engine.pictures
    assert pictures is not None and (pictures.n_encoded, pictures.n_hits) == (2, 0), (
        "the third found it in the prefix cache"
    )


def test_a_picture_is_encoded_once_for_different_prompts() -> None:
    watched = Watched(build())
    for name, text in (("a", "Once "), ("b", "Upon a "), ("c", "time ")):
        run(watched, request(name, text, picture(8, 9, 1), "What is it?"))
    pictures = watched.engine.pictures
    assert pictures is not None and (pictures.n_encoded, pictures.n_hits) == (1, 2)
    expected = cold()
    run(expected, request("c", "time ", picture(8, 9, 1), "What is it?"))
    same_answers(watched, expected, "c")


def test_a_prompt_has_more_pictures_than_the_pool() -> None:
    """They are encoded as it comes to them."""
    parts: list[str | Picture] = [part for i in range(40) for part in (picture(4, 4, i), "and ")]
    watched = Watched(build(max_picture_tokens=64, n_pages=40))
    run(watched, request("many", *parts), request("beside", "x", picture(8, 8, 50), "y"))
    pictures = watched.engine.pictures
    assert pictures is not None and pictures.pool.n < 4 + 64 + 1
    expected = cold(max_picture_tokens=256)
    run(expected, request("many", *parts))
    same_answers(watched, expected, "many")


def test_the_heads_index_is_the_same_in_any_company() -> None:
    """Keys of groups of the draft head's layer, in and behind pictures, which guesses are made of."""
    parts = ["abcde", picture(5, 6, 1), "x", picture(2, 3, 2)]

    def keys_of(*company: Request) -> set[bytes]:
        runner = build("flash", max_drafts=4)
        run(Watched(runner), *company, request("a", *parts, max_tokens=12))
        index = runner.memory.index_pages
        assert index is not None
        groups = index[:, -1, PAGE_SIZE:].reshape(len(index), -1, PAGE_SIZE // GROUP, 2).swapaxes(1, 2)
        return {group.tobytes() for group in groups.reshape(-1, groups.shape[2] * 2)}

    alone, others = keys_of(), [request("b", "See ", picture(3, 4, 3), "and say.", max_tokens=12)]
    assert len(alone) > 12 and alone <= keys_of(*others)


def test_drafts_change_no_bit() -> None:
    parts = ["Say it again: again again again ", picture(3, 5), " again again again again again"]
    watched, plain = Watched(build(max_drafts=4)), cold(max_drafts=0)
    drafted = []
    for engine in (watched, plain):
        engine.engine.add(request("a", *parts, max_tokens=60))
        tokens: list[int] = []
        while engine.engine.has_work():
            for output in engine.engine.step():
                tokens += output.token_ids
        drafted.append(tokens)
    assert drafted[0] == drafted[1] and watched.engine.scheduler.drafting.drafted


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"first": 70}, "has room"),
        ({"rows": 4}, "bytes are not"),
        ({"n_frames": 3}, "bytes are not"),
        ({"key": b"short"}, "bytes are not"),
        ({"rows": 0, "pixels": b""}, "bytes are not"),
    ],
)
def test_pictures_that_do_not_fit_are_refused(change: dict[str, Any], words: str) -> None:
    engine = Engine(_runner())
    asked = request("a", "see ", picture(3, 5), "?")
    one = asked.pictures[0]
    asked.pictures[0] = Picture(**{name: getattr(one, name) for name in one.__struct_fields__} | change)
    with pytest.raises(RequestError, match=words):
        engine.add(asked)


@cache
def _runner() -> Runner:
    return build()


def test_a_picture_larger_than_the_largest_is_refused() -> None:
    with pytest.raises(RequestError, match="272 tokens, and this server takes 256 at most"):
        Engine(_runner()).add(request("a", picture(16, 17)))
    with pytest.raises(RequestError, match="text only"):
        Engine(build(max_picture_tokens=0)).add(request("a", picture(2, 2)))


@needs_transformers
def test_a_gguf_model_and_its_tower_beside_it(tmp_path: Path) -> None:
    """In BF16 as the checkpoint: as near to the published model; without the mmproj file it reads text only."""
    source = tiny_checkpoint("dense", layout="flat", experts="fused")
    model = write_gguf(source, tmp_path / "tiny-BF16.gguf", "BF16")
    blind = build(model=str(model), max_picture_tokens=None)
    assert blind.info.pictures is None and blind.pictures is None
    with pytest.raises(ConfigError, match="no vision tower"):
        build(model=str(model))
    write_mmproj(tmp_path / "mmproj-BF16.gguf", random_tower(TOWER, seed=3), TOWER)
    watched = Watched(build(model=str(model)))
    published = published_model(tiny_checkpoint("dense", has_tower=True, has_mtp=True))
    for name in ("one", "three"):
        run(watched, request(name, *PROMPTS[name]))
        expected = published_logits(published, *prompt_of(*PROMPTS[name]))
        gap = (torch.from_numpy(watched.answers[name, 0].rows[0]) - expected).abs().max()
        assert gap < 0.15 * expected.std()


def test_a_packed_model_keeps_its_tower(tmp_path: Path) -> None:
    source = tiny_checkpoint("dense", has_tower=True, has_mtp=True)
    pack_model(EngineConfig(model=str(source)), tmp_path / "packed", lambda stage, done: None)
    expected, found = cold(), cold(model=str(tmp_path / "packed"))
    assert not [notice for notice in found.info.notices if "vision" in notice]
    for watched in (expected, found):
        run(watched, request("a", *PROMPTS["one"]))
    same_answers(found, expected, "a")


def test_a_tower_that_is_not_whole_costs_the_pictures_alone(tmp_path: Path) -> None:
    """The model serves text, and says why it sees nothing; who asks for pictures is told before anything is loaded."""
    path = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("dense", has_tower=True, has_mtp=True), path)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.visual.merger.norm.weight"]
    save_file(tensors, path / "model.safetensors")
    runner = build(model=str(path), max_picture_tokens=None)
    assert runner.pictures is None
    assert any("pictures are refused" in notice and "merger.norm.weight" in notice for notice in runner.info.notices)
    with pytest.raises(CheckpointError, match=r"merger\.norm\.weight"):
        build(model=str(path))


@needs_transformers
def test_a_video_of_a_chat_is_answered_as_by_the_published_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """From frames to the first token, and its probability."""
    image = pytest.importorskip("PIL.Image")
    path = tiny_checkpoint("dense", has_tower=True, has_mtp=True)
    llm = LLM(str(path), threads=1, max_num_seqs=2, max_model_len=1024, n_pages=60, n_checkpoints=8)
    added: list[Request] = []
    add = llm._engine.add

    def noted(request: Request) -> None:
        added.append(request)
        add(request)

    monkeypatch.setattr(llm._engine, "add", noted)
    frames = [np.frombuffer(picture(4, 6, seed).pixels, np.uint8).reshape(128, 192, 3) for seed in range(5)]
    video = {"type": "video", "video": [image.fromarray(frame) for frame in frames], "fps": 1}
    content = [video, {"type": "text", "text": "What happens?"}]
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1, ignore_eos=True)
    (answer,) = llm.chat([{"role": "user", "content": content}], params)
    (sent,) = added
    assert [(one.n_frames, one.rows, one.columns) for one in sent.pictures] == [(2, 4, 6)] * 3
    pixels = b"".join(one.pixels for one in sent.pictures)
    assert pixels == b"".join(frames[i].tobytes() for i in (0, 1, 2, 3, 4, 4))
    expected = published_logits(published_model(path), sent.prompt_ids, sent.pictures)
    assert answer.logprobs is not None
    token, logprob = answer.token_ids[0], answer.logprobs[0].logprob
    theirs = torch.log_softmax(expected[:N_REAL_VOCAB], -1)
    assert abs(theirs[token] - logprob) < 0.15 * expected.std() and theirs.max() - theirs[token] < 0.3 * expected.std()
