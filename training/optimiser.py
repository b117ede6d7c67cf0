"""The optimiser: Muon for the matrices inside the layers, Adam for everything else.

Muon (Jordan et al., 2024): the momentum of a matrix is replaced by the nearest semi-orthogonal matrix, found by five
Newton-Schulz steps. Matrices of one shape go through it as one batch, so a step is a few dozen launches.
"""

from collections import defaultdict

import torch
from torch import Tensor, nn

MUON_RATE, MUON_MOMENTUM, MUON_DECAY = 0.02, 0.95, 0.05
ADAM_RATE, ADAM_BETAS, ADAM_EPS = 3e-3, (0.9, 0.95), 1e-10
MAX_NORM = 1.0


def orthogonalised(m: Tensor) -> Tensor:
    """[n, rows, columns], rows <= columns -> about U V^T of each."""
    x = m.to(torch.bfloat16 if m.is_cuda else torch.float32)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.float()


class Optimiser:
    """Steps a model's parameters; `state` and `load` carry it over to another run."""

    def __init__(self, model: nn.Module):
        self._matrices: dict[tuple[int, int], list[tuple[str, nn.Parameter]]] = defaultdict(list)
        self._others: list[tuple[str, nn.Parameter]] = []
        for name, p in model.named_parameters():
            is_table = "embed" in name or "markov" in name  # a row a token
            if p.ndim == 2 and min(p.shape) >= 16 and not is_table:
                self._matrices[(min(p.shape), max(p.shape))].append((name, p))
            else:
                self._others.append((name, p))
        self._momentum = {
            shape: torch.zeros(len(group), *shape, device=group[0][1].device) for shape, group in self._matrices.items()
        }
        self._mean = [torch.zeros_like(p) for _, p in self._others]
        self._square = [torch.zeros_like(p) for _, p in self._others]
        self.n_steps = 0

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """`rate` in 0..1 scales both learning rates. Gradients are consumed."""
        self.n_steps += 1
        for shape, group in self._matrices.items():
            grads = torch.stack([_wide(p.grad) for _, p in group if p.grad is not None])
            momentum = self._momentum[shape]
            momentum.lerp_(grads, 1 - MUON_MOMENTUM)
            update = orthogonalised(torch.lerp(grads, momentum, MUON_MOMENTUM))
            for (_, p), u in zip(group, update.unbind(), strict=True):
                scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                p.mul_(1 - rate * MUON_RATE * MUON_DECAY)
                p.add_(u if p.shape[0] <= p.shape[1] else u.mT, alpha=-rate * MUON_RATE * scale)
        self._adam(rate)
        for group in (*self._matrices.values(), self._others):
            for _, p in group:
                p.grad = None

    def _adam(self, rate: float) -> None:
        params = [p for _, p in self._others]
        grads = [p.grad for p in params if p.grad is not None]
        total = torch.stack(torch._foreach_norm(grads)).norm()
        factor = (MAX_NORM / (total + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(grads, factor)
        b1, b2 = ADAM_BETAS
        torch._foreach_lerp_(self._mean, grads, 1 - b1)
        torch._foreach_mul_(self._square, b2)
        torch._foreach_addcmul_(self._square, grads, grads, 1 - b2)
        denominators = torch._foreach_sqrt(self._square)
        torch._foreach_mul_(denominators, (1 - b2**self.n_steps) ** -0.5)
        torch._foreach_add_(denominators, ADAM_EPS)
        torch._foreach_addcdiv_(params, self._mean, denominators, -rate * ADAM_RATE / (1 - b1**self.n_steps))

    def state(self) -> dict[str, Tensor]:
        """Momenta by parameter name; those of the matrices in bfloat16."""
        out = {}
        for shape, group in self._matrices.items():
            for (name, _), m in zip(group, self._momentum[shape], strict=True):
                out[f"momentum.{name}"] = m.to(torch.bfloat16)
        for (name, _), mean, square in zip(self._others, self._mean, self._square, strict=True):
            out[f"mean.{name}"], out[f"square.{name}"] = mean, square
        return out

    def load(self, state: dict[str, Tensor], n_steps: int) -> None:
        """The reverse of `state`; KeyError names a missing tensor."""
        self.n_steps = n_steps
        for shape, group in self._matrices.items():
            for (name, _), m in zip(group, self._momentum[shape], strict=True):
                m.copy_(state[f"momentum.{name}"])
        for (name, _), mean, square in zip(self._others, self._mean, self._square, strict=True):
            mean.copy_(state[f"mean.{name}"])
            square.copy_(state[f"square.{name}"])


def _wide(m: Tensor) -> Tensor:
    return m if m.shape[0] <= m.shape[1] else m.mT
