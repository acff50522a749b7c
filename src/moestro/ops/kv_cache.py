"""The paged cache's layouts (``contracts.KvLayer``) read and written in the slow, obvious way, for
the reference ops and for tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moestro.ops.contracts import KvLayer

KEY_LANES = 16  # keys stored side by side in KvLayer.k
SCALE_CHANNELS = 32  # channels of a key or query that share a scale, in a cache of signed bytes


def store(cache: KvLayer, pages: Tensor, offsets: Tensor, keys: Tensor, values: Tensor) -> None:
    """Store keys, values [n, kv_heads, head_dim] at positions ``offsets`` [n] of ``pages`` [n]."""
    if cache.is_codes:
        _store_codes(cache, pages, offsets, keys, values)
        return
    tiles, lanes = offsets // KEY_LANES, offsets % KEY_LANES
    cache.k[pages, :, tiles, :, lanes] = keys.to(cache.k.dtype)
    cache.v[pages, :, offsets] = values.to(cache.v.dtype)


def gather(cache: KvLayer, pages: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [n, kv_heads, head_dim] as stored, those of signed bytes as float32."""
    tiles, lanes = offsets // KEY_LANES, offsets % KEY_LANES
    if cache.k_scale is None or cache.v_scale is None:
        return cache.k[pages, :, tiles, :, lanes], cache.v[pages, :, offsets]
    keys = cache.k[pages, :, tiles, :, lanes].flatten(2).float() - 128
    values = cache.v[pages, :, offsets // 4, :, offsets % 4].float() - 128
    key_scales = cache.k_scale[pages, :, tiles, :, lanes].float()
    key_scales = key_scales.repeat_interleave(SCALE_CHANNELS, dim=2)[..., : cache.head_dim]
    return keys * key_scales, values * cache.v_scale[pages, :, offsets, None].float()


def round_query(x: Tensor) -> Tensor:
    """x [.., head_dim] float32 rounded to signed bytes per 32 channels, as float32."""
    parts = torch.split(x, SCALE_CHANNELS, dim=-1)
    scales = [_amax(part) / 127 for part in parts]
    rounded = [_codes(p, s) * s for p, s in zip(parts, scales, strict=True)]
    return torch.cat(rounded, dim=-1)


def _store_codes(
    cache: KvLayer, pages: Tensor, offsets: Tensor, keys: Tensor, values: Tensor
) -> None:
    assert cache.k_scale is not None and cache.v_scale is not None
    tiles, lanes = offsets // KEY_LANES, offsets % KEY_LANES
    for group, part in enumerate(torch.split(keys, SCALE_CHANNELS, dim=-1)):
        scale = _stored_scale(part)
        codes = (_codes(part, scale.float()) + 128).to(torch.uint8)
        quad = group * SCALE_CHANNELS // 4
        quads = slice(quad, quad + part.shape[-1] // 4)
        cache.k[pages, :, tiles, quads, lanes] = codes.view(*codes.shape[:2], -1, 4)
        cache.k_scale[pages, :, tiles, group, lanes] = scale[..., 0]
    scale = _stored_scale(values)
    codes = (_codes(values, scale.float()) + 128).to(torch.uint8)
    cache.v[pages, :, offsets // 4, :, offsets % 4] = codes
    cache.v_scale[pages, :, offsets] = scale[..., 0]


def _amax(x: Tensor) -> Tensor:
    """The largest magnitude of the last dimension, NaN where there is one."""
    return x.abs().amax(-1, keepdim=True)


def _stored_scale(x: Tensor) -> Tensor:
    """amax / 127 as bfloat16, rounded up."""
    amax = _amax(x)
    bits = (amax / 127).view(torch.int32)
    up = ((bits.long() + 0xFFFF) >> 16 << 16).to(torch.int32).view(torch.float32)
    return torch.where(amax.isfinite(), up, amax).bfloat16()


def _codes(x: Tensor, scale: Tensor) -> Tensor:
    """round(x / scale), zero where the scale is zero or not finite."""
    usable = (scale > 0) & scale.isfinite()
    return torch.where(usable, x / scale, 0.0).round().clamp(-127, 127)
