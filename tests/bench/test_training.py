"""How the built-in model is made: corpus, template, packing, the training forward, a short training run."""

import json
from dataclasses import replace
from itertools import islice, pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from jinja2.exceptions import TemplateError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from bench import drafts_right
from deltic import LLM
from deltic.engine.drafts import Drafter, Drafting
from deltic.models.qwen.shape import ModelShape
from deltic.models.qwen.weights import load_weights, stored_shape
from tests.plain import plain
from tests.reference import dflash as reference
from tests.reference.model import draft_states
from tests.tiny_drafter import plain_drafter
from training import block_head
from training.block_head import BlockHead
from training.block_head import save as save_block_head
from training.chats import ask, say
from training.corpus import DEMO, MIX, Corpus, Template
from training.grammar import expand, parse
from training.head import DraftHead, guessed, trunk
from training.head import save as save_head
from training.model import Geometry, Hybrid, Packed, checkpoint_tensors, find_borders
from training.optimiser import Optimiser
from training.rows import FIRST, ID_MASK, LEARN, encode, pack
from training.stories import write_story
from training.tools import Weather
from training.train import parse as parse_arguments
from training.train import resume, save, to_device

pytestmark = pytest.mark.long

WEATHER = Weather(Random(2)).schema
MASK_ID = 1579


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def one_document(n_tokens: int, *borders: int) -> Packed:
    first = torch.zeros(n_tokens, dtype=torch.bool)
    first[[0, *borders]] = True
    return Packed(torch.randint(0, 1593, (n_tokens,), generator=torch.Generator().manual_seed(1)), first, 1)


def shaken_model() -> Hybrid:
    """Untrained weights with every norm away from its trivial start."""
    torch.manual_seed(0)
    model = Hybrid(Geometry())
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:
                p.add_(0.1 * torch.randn_like(p))
    return model


def test_same_seed_draws_the_same_corpus() -> None:
    assert list(islice(Corpus(3), 40)) == list(islice(Corpus(3), 40))
    assert list(islice(Corpus(3), 40)) != list(islice(Corpus(4), 40))


def test_every_frame_of_the_corpus_expands(tokenizer: Tokenizer) -> None:
    corpus = Corpus(5)
    for kind in MIX:
        for _ in range(120):
            text = "".join(text for text, _ in corpus.draw(kind).segments)
            assert not any(
                mark in text.replace("[", "", text.count("<tools>") * 100) for mark in ("{name}", "{he}", "|]")
            )


def test_unbalanced_frames_are_refused() -> None:
    assert expand("a[b|b]{c}", Random(0), {"c": "d"}) == "abd"
    for frame in ("a[b|c", "a]b"):
        with pytest.raises(ValueError, match="frame"):
            parse(frame)


@pytest.mark.parametrize("n_words", [60, 100, 300, 1000, 1500])
def test_stories_have_the_asked_length_and_animal(n_words: int) -> None:
    rng = Random(n_words)
    stories = [write_story(rng, "otter", n_words, "Rusty") for _ in range(20)]
    mean = sum(len(story.text.split()) for story in stories) / len(stories)
    assert abs(mean - n_words) < 0.15 * n_words
    assert all("otter" in story.text and "Rusty" in story.text for story in stories)
    assert len({story.text for story in stories}) == 20


def test_tokenizer_encodes_anything_and_has_the_family_tokens(tokenizer: Tokenizer) -> None:
    text = "Zoë ate 17 naïve 🦊 in 東京\r\n\t<think>\x00"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text
    assert len(tokenizer.encode("1234", add_special_tokens=False).ids) == 4
    start = tokenizer.token_to_id("<|endoftext|>")
    assert [tokenizer.token_to_id(t) - start for t in ("<|im_end|>", "<tool_call>", "</think>", "<|audio_pad|>")] == [
        2,
        14,
        25,
        32,
    ]
    assert tokenizer.decode(tokenizer.encode("<|im_end|><think><tool_call>").ids) == "<think><tool_call>"
    assert tokenizer.get_vocab_size() < Geometry().vocab_size


def test_template_turns_thinking_on_and_off() -> None:
    template = Template()
    start = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert template.render([ask("Hi")], thinking=True) == start
    assert template.render([ask(" Hi ")]) == start + "\n</think>\n\n"


def test_template_drops_old_thoughts_and_keeps_those_of_a_tool_loop() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "x", "n": 2, "l": [1, "é"], "b": True}}}
    turns = [
        ask("one"), say("1", "old thought"), ask("two"),
        {"role": "assistant", "content": None, "reasoning_content": "new thought", "tool_calls": [call]},
        {"role": "tool", "content": "r1"}, {"role": "tool", "content": "r2"},
    ]  # fmt: skip
    text = Template().render(turns, [WEATHER], thinking=True)
    assert "old thought" not in text and "<think>\nnew thought\n</think>\n\n<tool_call>\n<function=f>\n" in text
    assert (
        '<parameter=l>\n[1, "é"]\n</parameter>\n<parameter=b>\nTrue\n</parameter>\n</function>\n</tool_call><|im_end|>\n'
        in text
    )
    assert (
        "<|im_start|>user\n<tool_response>\nr1\n</tool_response>\n<tool_response>\nr2\n</tool_response><|im_end|>\n"
        in text
    )
    assert text.startswith("<|im_start|>system\n# Tools\n") and '{"type": "function", "function": {"name": ' in text
    inline = Template().render(
        [ask("q"), {"role": "assistant", "content": "<think>\nt\n</think>\n\na"}], generate=False
    )
    assert inline.endswith("assistant\n<think>\nt\n</think>\n\na<|im_end|>\n")


@pytest.mark.parametrize(
    "turns", [[], [{"role": "robot", "content": "x"}], [ask("x"), {"role": "system", "content": "late"}]]
)
def test_template_refuses_what_it_cannot_render(turns: list[dict[str, object]]) -> None:
    with pytest.raises(TemplateError):
        Template().render(turns)


def test_rows_hold_whole_documents_and_learn_answers_only(tokenizer: Tokenizer) -> None:
    corpus = Corpus(6, 100)
    documents = (encode(corpus.draw(), tokenizer) for _ in iter(int, 1))
    for row in islice(pack(documents, 1024, tokenizer.token_to_id("<|endoftext|>")), 5):
        starts = [*np.flatnonzero(row & FIRST), 1024]
        assert starts[0] == 0
        for a, b in pairwise(starts):
            ids = (row[a:b] & ID_MASK).tolist()
            learned = [i for i, t in zip(ids, row[a:b], strict=True) if t & LEARN]
            if learned:  # not the padding
                assert learned[-1] in (tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>"))
                assert "<|im_start|>" not in tokenizer.decode(learned, skip_special_tokens=False)


def test_packed_documents_do_not_see_each_other() -> None:
    model = shaken_model()
    batch = one_document(192, 70)
    with torch.no_grad():
        together = model(batch)
        alone = model(Packed(batch.tokens[64:], torch.arange(64, 192) == 70, 1))
    # the second run starts with a few tokens of the first document, and must give the second one the same logits
    assert (together[70:] - alone[6:]).abs().max() < 1e-4


def test_decode_agrees_with_the_chunk_form() -> None:
    model, batch = shaken_model(), one_document(128)
    states = model.new_states(1, 128)
    with torch.no_grad():
        whole = model(batch)
        steps = torch.cat([model.step(batch.tokens[i : i + 1], states, i) for i in range(128)])
    assert (whole - steps).abs().max() < 1e-4


def test_export_is_what_transformers_reads() -> None:
    transformers = pytest.importorskip("transformers", reason="the published implementation is the oracle")
    geometry, model, batch = Geometry(), shaken_model(), one_document(128)
    known = {"architectures", "model_type", "dtype"}
    config = {k: v for k, v in geometry.published_config(1560).items() if k not in known}
    theirs = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**config)).float().eval()
    stored = {name: t.float() for name, t in checkpoint_tensors(model.state_dict()).items()}
    loaded = theirs.load_state_dict(stored, strict=False)
    assert loaded.missing_keys == ["lm_head.weight"] and not loaded.unexpected_keys  # tied
    model.load_state_dict(stored)
    with torch.no_grad():
        assert (model(batch) - theirs(batch.tokens[None]).logits[0]).abs().max() < 1e-3


def test_a_few_steps_lower_the_loss_and_resume_exactly(tokenizer: Tokenizer, tmp_path) -> None:  # type: ignore[no-untyped-def]
    corpus = Corpus(8, 60)
    documents = (encode(corpus.draw("arithmetic"), tokenizer) for _ in iter(int, 1))
    rows = pack(documents, 256, tokenizer.token_to_id("<|endoftext|>"))

    torch.manual_seed(0)
    model = Hybrid(Geometry())
    optimiser = Optimiser(model)

    def step(model: Hybrid, optimiser: Optimiser, row: np.ndarray) -> float:
        batch, targets = to_device(row, torch.device("cpu"))
        loss = model.loss(batch, targets).sum() / (targets >= 0).sum()
        loss.backward()
        optimiser.step(1.0)
        return loss.item()

    losses = [step(model, optimiser, next(rows)[None]) for _ in range(7)]
    assert losses[-1] < losses[0] - 0.7
    save(tmp_path, model, optimiser, 5.0)
    assert all(file.stat().st_size < 16_000_000 for file in tmp_path.iterdir())
    again = Hybrid(Geometry())
    other = Optimiser(again)
    assert resume(tmp_path, again, other) == 5.0 and other.n_steps == 7
    row = next(rows)[None]
    assert step(again, other, row) == step(model, optimiser, row)


def test_resume_without_a_checkpoint_says_what_to_do(tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SystemExit):
        parse_arguments(["--out", str(tmp_path), "--resume"])
    assert "train without --resume first" in capsys.readouterr().err


def test_the_draft_head_is_that_of_the_reference(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Its guesses in a row, and no row sees another document."""
    model, head = shaken_model(), DraftHead(Geometry())
    with torch.no_grad():
        for p in head.parameters():
            p.add_(0.1 * torch.randn_like(p)) if p.ndim == 1 else None
    save_file(checkpoint_tensors(model.state_dict()), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(Geometry().published_config(1560)))
    save_head(tmp_path, head, tmp_path / "model.safetensors")
    shape = stored_shape(tmp_path, ModelShape.from_directory(tmp_path), drafts=True)
    weights = plain(load_weights(tmp_path, shape)[0])
    head.load_state_dict({n[4:]: t.float() for n, t in load_file(tmp_path / "mtp.safetensors").items()})
    model.load_state_dict({n: t.float() for n, t in load_file(tmp_path / "model.safetensors").items()})
    batch = one_document(128, 40)
    with torch.no_grad():
        hidden = model.model.norm(model.hidden(batch))
        embedded = model.model.embed_tokens(batch.tokens)
        borders = find_borders(batch, Geometry().conv_width)
        found = head(hidden, embedded, borders, model.cos[:128], model.sin[:128])
    ids = batch.tokens[40:].tolist()
    states = draft_states(weights, shape, hidden[40:-1], ids[1:])
    torch.testing.assert_close(found[0][40:-1], states, atol=2e-4, rtol=0)
    for row in (5, 50):  # the guess behind the guess, of some rows
        behind = torch.cat([hidden[40 : 41 + row], states[row : row + 1]])
        second = draft_states(weights, shape, behind, ids[1 : row + 3])
        torch.testing.assert_close(found[1][40 + row], second[-1], atol=2e-4, rtol=0)


def test_a_draft_head_learns(tokenizer: Tokenizer) -> None:
    model, head = trunk(DEMO / "model.safetensors", torch.device("cpu")), DraftHead(Geometry())
    ids = torch.tensor(tokenizer.encode("Once upon a time there was a little fox. " * 14).ids[:128])
    batch = Packed(ids, torch.zeros(128, dtype=torch.bool), 1)
    optimiser, learned = Optimiser(head), torch.ones(128, dtype=torch.bool)
    losses = []
    for _ in range(8):
        loss, shares = guessed(head, model, batch, learned)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step(0.5)
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0] and len(shares) == 3


def test_the_block_head_is_that_of_the_reference(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """In the sizes that it is trained in: features behind the layers that the checkpoint names, a window, no other document."""
    model, head = shaken_model(), BlockHead()
    with torch.no_grad():
        for p in head.parameters():
            p.add_(0.1 * torch.randn_like(p)) if p.ndim == 1 else None
    save_block_head(tmp_path, head, MASK_ID)
    own, shape = plain_drafter(tmp_path)
    assert shape.windows == (block_head.WINDOW,) and shape.most_guesses == block_head.BLOCK and shape.has_confidence
    head.load_state_dict({n: t.float() for n, t in load_file(tmp_path / "model.safetensors").items()})
    batch = one_document(384, 40)
    known = block_head.Known.of(model, batch, torch.ones(384, dtype=torch.bool))
    known = replace(known, features=known.features.float())
    table, anchors = model.model.embed_tokens.weight, torch.tensor([45, 330])
    rows = torch.full((2, block_head.BLOCK), MASK_ID)
    rows[:, 0] = batch.tokens[anchors]
    with torch.no_grad():
        states = head(known.features, table[rows], block_head.Places.of(anchors, known, model))
        before = rows.roll(1, 1)
        logits, confidence = head.scores(states, before, table)
    for i, anchor in enumerate(anchors.tolist()):
        of_text = reference.context(own, shape, known.features[40:anchor])
        expected = reference.block_states(own, shape, of_text, table[rows[i]])
        torch.testing.assert_close(states[i], expected, atol=2e-3, rtol=0)
        for row in (0, 5):
            token, plain_logits = int(before[i, row]), expected[row] @ table.T
            scores = reference.step_scores(own, shape, expected[row], plain_logits, token)
            torch.testing.assert_close(logits[i, row], scores, atol=2e-2, rtol=0)
            chance = reference.confidence(own, shape, expected[row], token)
            assert abs(float(confidence[i, row].sigmoid()) - chance) < 2e-3


def test_a_block_head_learns(tokenizer: Tokenizer) -> None:
    model, head = trunk(DEMO / "model.safetensors", torch.device("cpu")), BlockHead()
    ids = torch.tensor(tokenizer.encode("Once upon a time there was a little fox. " * 14).ids[:128])
    known = block_head.Known.of(model, Packed(ids, torch.arange(128) == 0, 1), torch.ones(128, dtype=torch.bool))
    optimiser, losses = Optimiser(head), []
    for _ in range(8):
        loss, shares = block_head.guessed(head, model, known, known.anchors(64), MASK_ID)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step(0.5)
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0] and len(shares) == block_head.BLOCK


def test_the_kept_drafter_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every step, as bench/drafts_right.py counts them; the answers are those without drafts."""
    for owner, name in ((Drafter, "propose"), (Drafting, "_n_asked"), (Drafting, "_step_s")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # what is changed there is undone
    sizes: dict[str, Any] = {"threads": 1, "max_num_seqs": 1}
    plain_, drafting = LLM(**sizes, max_drafts=0), LLM(**sizes, max_drafts=5, draft_model="training/drafter")
    drafts_right.run_every_guess()
    for temperature, least in ((0.0, 2.5), (1.0, 2.3)):
        said, found = drafts_right.measure(drafting, "stories", temperature, 2)
        assert said == drafts_right.measure(plain_, "stories", temperature, 2)[0]
        assert found["tokens_a_step"] > least and list(found["right"]) == ["1", "2", "3", "4", "5"]
