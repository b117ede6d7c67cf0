"""Rounding of a recurrent state to bfloat16: up or down at random, as csrc/gdn.cpp and
`tests.reference.layers.stochastic_bfloat16` do it.

The nearer value would swallow every change below half of a value's last bit, and with it a slow decay. The
random bits are a hash of the position of the token behind which the state is stored, of the layer, the head
(of its part, in a model that is cut) and the element: of the tokens alone, whatever else a step runs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mixed(x):
    """uint32 of which each bit depends on all of x, uint32, too."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def rounding_seed(position, layer, i_head):
    """Seed with which the hashes of a head's elements begin. layer: its number among those with a state."""
    return _mixed(position.to(tl.uint32) ^ _mixed((layer * 65536 + i_head).to(tl.uint32)))


@triton.jit
def noisy(b_state, b_mask, o_key, o_row, seed):
    """The bits of float32 values of a state, uint32, plus 16 random ones: their high halves are the rounded
    values.

    o_key: the key of each element; o_row: where its row of values begins. Two neighbouring keys share a hash,
    and have a half of it each. The compiler knows the last bit of a key, and computes a hash once for both;
    it would not if keys were shifted. b_mask: 0 where nothing is to be added, since that could make a number
    of what is none; else all ones.
    """
    x = (o_row + (o_key & -2)).to(tl.uint32) * 0x9E3779B9 + seed
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) & b_mask
    return b_state.to(tl.uint32, bitcast=True) + tl.where((o_key & 1) == 0, x & 0xFFFF, x >> 16)


@triton.jit
def cut(b_bits):
    """Cuts what `noisy` gives to the rounded values, in float32."""
    return (b_bits & 0xFFFF0000).to(tl.float32, bitcast=True)
