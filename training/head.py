"""Train the built-in model's draft head: `python -m training.head --out DIR --minutes 20 --device cuda|cpu`.

The head is one attention layer that guesses the token after the next one, from the model's last hidden state and the
embedding of the next token (the `mtp.*` tensors of the published checkpoints). The model stays as it is. What the head
learns is the model's own distribution, not the corpus: a draft is right when the model would have drawn it. It learns
on its own guesses, too: DEPTH of them in a row, each from the hidden state that the head gave for the one before.

`--minutes` bounds the wall clock of the whole program; the learning rate follows it as in `training.train`. DIR gets
mtp.safetensors (bfloat16), the index that names it beside model.safetensors, and head.txt, the log. Needs torch, numpy,
tokenizers, safetensors, jinja2.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from training.corpus import DEMO
from training.model import Borders, Geometry, Hybrid, Layer, Norm, Packed, Projection, checkpoint_tensors, find_borders
from training.optimiser import Optimiser
from training.rows import LONG_ROW, SHORT_ROW, Batches, Row, Supply
from training.train import to_device

START = time.monotonic()
DEPTH = 3
WARM_UP_S, LOG_EVERY_S, SAVE_EVERY_S, FINISH_S = 30.0, 30.0, 300.0, 5.0


class DraftHead(nn.Module):
    """The head over whole rows; its state dict has the published names behind `mtp.`.

    Left out: caches. Row i of guess d stands for the draft of token i + d + 2.
    """

    def __init__(self, geo: Geometry):
        super().__init__()
        self.geo = geo
        self.fc = Projection(2 * geo.hidden_size, geo.hidden_size)
        self.layers = nn.ModuleList([Layer(geo, "full_attention")])
        self.norm = Norm(geo.hidden_size, geo.eps)
        self.pre_fc_norm_embedding = Norm(geo.hidden_size, geo.eps)
        self.pre_fc_norm_hidden = Norm(geo.hidden_size, geo.eps)

    def forward(self, hidden: Tensor, embedded: Tensor, borders: Borders, cos: Tensor, sin: Tensor) -> list[Tensor]:
        """hidden [N, H]: of the model, behind its final norm. embedded [N, H]: of the tokens. Gives DEPTH of [N, H]."""
        geo, layer = self.geo, self.layers[0]
        known: list[tuple[Tensor, Tensor]] = []
        found = []
        for depth in range(DEPTH):
            ahead = embedded.roll(-1 - depth, 0)
            x = self.fc(torch.cat([self.pre_fc_norm_embedding(ahead), self.pre_fc_norm_hidden(hidden)], -1)).float()
            q, gate, k, v = layer.self_attn.heads(layer.input_layernorm(x), cos.roll(-depth, 0), sin.roll(-depth, 0))
            rows = [t.unflatten(0, (borders.n_rows, -1)).transpose(1, 2) for t in (q, k, v)]
            known.append((rows[1], rows[2]))
            # The first guesses of earlier tokens, as they will be in the pages; of later ones only the row's own.
            own = torch.eye(rows[0].shape[2], dtype=torch.bool, device=q.device).expand_as(borders.mask)
            mask = torch.cat([borders.mask] + [own] * depth, -1)
            r = geo.n_q_heads // geo.n_kv_heads
            keys, values = (torch.cat(parts, 2).repeat_interleave(r, 1) for parts in zip(*known, strict=True))
            o = F.scaled_dot_product_attention(rows[0], keys, values, attn_mask=mask)
            x = x + layer.self_attn.finish(o.transpose(1, 2).flatten(0, 1), gate)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            hidden = self.norm(x)
            found.append(hidden)
        return found


def guessed(head: DraftHead, model: Hybrid, batch: Packed, learned: Tensor) -> tuple[Tensor, list[float]]:
    """The loss, and of each depth the part of tokens that the head guesses as the model's likeliest.

    learned [N] bool: tokens that the model was trained to write. Others are never drafted.
    """
    table = model.model.embed_tokens.weight
    with torch.no_grad():
        hidden = model.model.norm(model.hidden(batch))
        wanted = F.linear(hidden, table).float()
        embedded = F.embedding(batch.tokens, table).float()
        borders = find_borders(batch, model.geo.conv_width)
        document = batch.first.long().cumsum(0)
    cos, sin = (t[: batch.row_length].repeat(batch.n_rows, 1) for t in (model.cos, model.sin))
    loss, shares = torch.zeros((), device=hidden.device), []
    for depth, rows in enumerate(head(hidden, embedded, borders, cos, sin)):
        n = 1 + depth  # the model's row that draws the same token
        is_used = (learned & (document == document.roll(n + 1, 0))).roll(-n - 1, 0)
        is_used[-n - 1 :] = False
        logits = F.linear(rows, table).float()[is_used]
        target = wanted.roll(-n, 0)[is_used]
        loss = loss + F.cross_entropy(logits, target.softmax(-1)) * 0.8**depth
        shares.append((logits.argmax(-1) == target.argmax(-1)).float().mean().item())
    return loss, shares


def trunk(weights: Path, device: torch.device) -> Hybrid:
    """The built-in model, frozen."""
    model = Hybrid(Geometry())
    stored = {name: t.float() for name, t in load_file(weights).items()}
    model.load_state_dict({name: t for name, t in stored.items() if not name.startswith("mtp.")}, strict=True)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.to(device)


def save(directory: Path, head: DraftHead, weights: Path) -> None:
    """Writes mtp.safetensors, and the index of both files. weights: of the model."""
    tensors = checkpoint_tensors({f"mtp.{name}": t for name, t in head.state_dict().items()})
    save_file(tensors, directory / "mtp.safetensors", metadata={"format": "pt"})
    model = load_file(weights)
    files = dict.fromkeys(model, "model.safetensors") | dict.fromkeys(tensors, "mtp.safetensors")
    size = sum(t.nbytes for t in (*model.values(), *tensors.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def of_rows(rows: Row, device: torch.device) -> tuple[Packed, Tensor]:
    """A batch, and which of its tokens are learned."""
    batch, targets = to_device(rows, device)
    return batch, (targets >= 0).roll(1)


@dataclass
class Fit:
    """A run of a draft head's training: what it was given, the frozen model, its batches, log and clock."""

    given: argparse.Namespace
    log_name: str

    def __post_init__(self) -> None:
        given = self.given
        given.out.mkdir(parents=True, exist_ok=True)
        self.device = torch.device(given.device)
        self.batch_tokens = given.batch_tokens or (65536 if self.device.type == "cuda" else LONG_ROW)
        n_workers = 4 if self.device.type == "cuda" else 1
        self.supply = Supply(given.seed, self.batch_tokens, n_workers)  # forked before the device is touched
        held_out = Batches(7_000_003, 8 * LONG_ROW).draw(SHORT_ROW)
        torch.manual_seed(given.seed)
        torch.backends.cuda.enable_cudnn_sdp(False)  # as in training.train
        Projection.compute_dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.model, self.held_out = trunk(given.weights, self.device), of_rows(held_out, self.device)
        self.log = (given.out / self.log_name).open("a", encoding="utf-8")

    def draw(self) -> tuple[Packed, Tensor]:
        """The next batch, and which of its tokens are learned."""
        return of_rows(self.supply.draw(), self.device)

    def report(self, line: str) -> None:
        print(line, flush=True)
        self.log.write(line + "\n")
        self.log.flush()

    def run(
        self,
        head: nn.Module,
        step: Callable[[], tuple[Tensor, list[float]]],
        held_out: Callable[[], list[float]],
        keep: Callable[[], None],
    ) -> None:
        """Trains the head. step: gives the loss of a step, and the parts of tokens that are guessed right."""
        given, optimiser = self.given, Optimiser(head)
        size = f"{sum(p.numel() for p in head.parameters()):,} parameters"
        self.report(f"{size} on {self.device}, {self.batch_tokens:,} tokens a step")
        budget, logged, n_logged = given.minutes * 60, time.monotonic(), 0
        saved = logged
        while (elapsed := time.monotonic() - START) < budget - FINISH_S and optimiser.n_steps != (given.steps or -1):
            loss, shares = step()
            loss.backward()  # type: ignore[no-untyped-call]
            warm = min(1.0, (elapsed + 1) / WARM_UP_S)
            optimiser.step(warm * 0.5 * (1 + math.cos(math.pi * min(1.0, elapsed / budget))))
            if time.monotonic() - logged > LOG_EVERY_S:
                speed = (optimiser.n_steps - n_logged) * self.batch_tokens / (time.monotonic() - logged)
                done = f"{elapsed:6.0f} s  step {optimiser.n_steps}  loss {loss.item():.4f}"
                self.report(f"{done}  {parts(shares)}  {speed:,.0f} tokens/s")
                logged, n_logged = time.monotonic(), optimiser.n_steps
            if time.monotonic() - saved > SAVE_EVERY_S:
                keep()
                self.report(f"{elapsed:6.0f} s  saved; held out, guessed right by depth: {parts(held_out())}")
                saved = time.monotonic()
        keep()
        done = f"{time.monotonic() - START:6.0f} s  saved after step {optimiser.n_steps}"
        self.report(f"{done}; held out, guessed right by depth: {parts(held_out())}")


def parts(shares: list[float]) -> str:
    return " ".join(f"{share:.3f}" for share in shares)


def flags(doc: str | None, seed: int) -> argparse.ArgumentParser:
    """The flags of a draft head's training."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for the head")
    parser.add_argument("--weights", type=Path, default=DEMO / "model.safetensors", help="of the model")
    parser.add_argument("--minutes", type=float, default=20.0, help="wall clock of the whole program")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-tokens", type=int, default=0, help=f"tokens a step, a multiple of {LONG_ROW}")
    parser.add_argument("--steps", type=int, default=0, help="stop after this many steps")
    parser.add_argument("--seed", type=int, default=seed)
    return parser


def main() -> None:
    fit = Fit(flags(__doc__, seed=2).parse_args(), "head.txt")
    head = DraftHead(Geometry()).to(fit.device)

    @torch.no_grad()
    def held_out() -> list[float]:
        return guessed(head, fit.model, *fit.held_out)[1]

    fit.run(
        head,
        lambda: guessed(head, fit.model, *fit.draw()),
        held_out,
        lambda: save(fit.given.out, head, fit.given.weights),
    )


if __name__ == "__main__":
    main()
