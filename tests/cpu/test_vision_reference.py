"""The reference of the vision tower against the published one, in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

from tests.reference import vision
from tests.tiny_vision import ODD, PUBLISHED, TINY, random_tower, tower_of, vision_config

pytestmark = pytest.mark.usefixtures("one_thread")


def published(sizes: dict[str, Any], weights: dict[str, torch.Tensor]) -> Qwen3_5VisionModel:
    """The tower of transformers with these weights, in float32."""
    fields = vision_config(sizes)
    del fields["deepstack_visual_indexes"], fields["model_type"]
    model = Qwen3_5VisionModel(Qwen3_5VisionConfig(**fields, attn_implementation="eager"))
    model.load_state_dict({name: value.float() for name, value in weights.items()})
    return model.float().eval()


@pytest.mark.parametrize("grid", [(1, 2, 2), (1, 4, 6), (2, 6, 4), (1, 2, 40), (1, 50, 2)], ids=str)
@pytest.mark.parametrize("sizes", [*TINY.values(), ODD], ids=[*TINY, "odd"])
def test_tower(sizes: dict[str, Any], grid: tuple[int, int, int]) -> None:
    weights = random_tower(sizes)
    patches = torch.randn(grid[0] * grid[1] * grid[2], 1536)
    with torch.no_grad():
        expected = published(sizes, weights)(patches, torch.tensor([grid])).pooler_output
    found = vision.tower(patches, grid, weights, tower_of(sizes))
    assert expected.std() > 0.3
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_published_shape() -> None:
    """Twelve blocks: errors add up to some 1e-5."""
    weights, grid = random_tower(PUBLISHED), (1, 8, 6)
    patches = torch.rand(48, 1536) * 2 - 1
    with torch.no_grad():
        expected = published(PUBLISHED, weights)(patches, torch.tensor([grid])).pooler_output
    found = vision.tower(patches, grid, weights, tower_of(PUBLISHED))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
