"""Softmax attention of query heads over the int8 keys and values of their KV head, in float64."""

from __future__ import annotations

from dataclasses import dataclass
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

    query [N, G, D] float64; codes [N, L, D]; scales float64 [N, L]. Where a vector has several
    scales, `value_scales` holds the smallest that is not zero, `value_scale_peaks` [N, L] the
    largest, and `value_codes` what the smallest leaves of the values.
    """

    query: Floats
    key_codes: Array
    key_scales: Floats
    value_codes: Array
    value_scales: Floats
    softmax_scale: float
    value_scale_peaks: Floats | None = None

    def tokens(self, start: int, stop: int) -> HeadGroups:
        """The same heads over tokens `start` to `stop` - 1 only."""
        return HeadGroups(
            query=self.query,
            key_codes=self.key_codes[:, start:stop],
            key_scales=self.key_scales[:, start:stop],
            value_codes=self.value_codes[:, start:stop],
            value_scales=self.value_scales[:, start:stop],
            softmax_scale=self.softmax_scale,
            value_scale_peaks=None
            if self.value_scale_peaks is None
            else self.value_scale_peaks[:, start:stop],
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
    """Natural-base logits [N, G, L]: the integer-code dot product, then both scales."""
    dots = heads.query @ heads.key_codes.astype(np.float64).swapaxes(-1, -2)
    result: Floats = dots * (heads.softmax_scale * heads.key_scales)[:, None, :]
    return result


def attend(heads: HeadGroups, z: Floats | None = None) -> Partial:
    """Attention of N x G heads over their tokens; `z` are their logits, if known already."""
    z = logits(heads) if z is None else z
    peak = z.max(axis=-1, initial=LOWEST)
    weights = np.exp(z - peak[..., None])
    mixture = (weights * heads.value_scales[:, None, :]) @ heads.value_codes.astype(np.float64)
    return Partial(peak=peak, weight=weights.sum(axis=-1), mixture=mixture)


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
