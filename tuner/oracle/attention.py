"""Softmax attention of query heads over the keys and values of their KV head, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]

LOWEST = float(np.finfo(np.float32).min)
"""Where maxima start; what a part without tokens has as its maximum."""
EPSILON = 1e-6
"""Added to the sum of weights, so that an empty context divides 0 by something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadGroups:
    """N KV heads of one sequence with the G query heads that share each, over L tokens.

    query [N, G, D] float64; key codes [N, L, D], value codes [N, L, Dv]; scales float64 [N, L].
    Caches of floats have these for codes, and scales of 1. Where a vector has several scales,
    `value_scales` holds the smallest that is not zero, `value_scale_peaks` [N, L] the largest, and
    `value_codes` what the smallest leaves of the values.

    Beyond plain attention: `softcap` c makes a logit z into c tanh(z / c), 0 leaves it; `biases`
    [N, G, L] are added to logits then; `sinks` [N, G] are logits that have no value, but are in the
    maximum and the sum of weights.
    """

    query: Floats
    key_codes: Array
    key_scales: Floats
    value_codes: Array
    value_scales: Floats
    softmax_scale: float
    value_scale_peaks: Floats | None = None
    softcap: float = 0.0
    biases: Floats | None = None
    sinks: Floats | None = None

    def tokens(self, start: int, stop: int) -> HeadGroups:
        """The same heads over tokens `start` to `stop` - 1 only."""
        return replace(
            self,
            key_codes=self.key_codes[:, start:stop],
            key_scales=self.key_scales[:, start:stop],
            value_codes=self.value_codes[:, start:stop],
            value_scales=self.value_scales[:, start:stop],
            value_scale_peaks=None
            if self.value_scale_peaks is None
            else self.value_scale_peaks[:, start:stop],
            biases=None if self.biases is None else self.biases[..., start:stop],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Partial:
    """Attention over some tokens, before it is normalised.

    `peak` [...] is the largest logit m (natural base), `weight` [...] the sum of exp(z - m), and
    `mixture` [..., D] the sum of exp(z - m) v. Without tokens they are `LOWEST`, 0 and 0.
    """

    peak: Floats
    weight: Floats
    mixture: Floats

    @property
    def out(self) -> Floats:
        """Attention output [..., D]; zeros where there are no tokens."""
        result: Floats = self.mixture / (self.weight + EPSILON)[..., None]
        return result


def logits(heads: HeadGroups) -> Floats:
    """Natural-base logits [N, G, L]: the code dot product, both scales, the cap, the bias."""
    dots = heads.query @ heads.key_codes.astype(np.float64, copy=False).swapaxes(-1, -2)
    result: Floats = dots * (heads.softmax_scale * heads.key_scales)[:, None, :]
    if heads.softcap:
        result = heads.softcap * np.tanh(result / heads.softcap)
    return result if heads.biases is None else result + heads.biases


def attend(heads: HeadGroups, z: Floats | None = None) -> Partial:
    """Attention of N x G heads over their tokens; `z` are their logits, if known already."""
    z = logits(heads) if z is None else z
    peak = z.max(axis=-1, initial=LOWEST)
    if heads.sinks is not None:
        peak = np.maximum(peak, heads.sinks)
    weights = np.exp(z - peak[..., None])
    weight = weights.sum(axis=-1)
    if heads.sinks is not None:
        weight += np.exp(heads.sinks - peak)
    mixture = (weights * heads.value_scales[:, None, :]) @ heads.value_codes.astype(
        np.float64, copy=False
    )
    return Partial(peak=peak, weight=weight, mixture=mixture)


def merge(parts: Partial) -> Partial:
    """Join the NS parts of a context, the last axis of `peak` and `weight`, into the whole.

    Any order and any cut give the same: each part is scaled from its own maximum to the common one.
    A part without tokens adds nothing, since no infinity enters its maximum.
    """
    peak = parts.peak.max(axis=-1, initial=LOWEST)
    factors = np.exp(parts.peak - peak[..., None])
    return Partial(
        peak=peak,
        weight=(factors * parts.weight).sum(axis=-1),
        mixture=(factors[..., None] * parts.mixture).sum(axis=-2),
    )
