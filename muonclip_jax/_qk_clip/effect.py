"""Heads whose logit does not follow their weights, so that clipping is of no use.

Where query and key are normalised after the projection, under a name that nobody
knows, clipping only shrinks the weights, step after step. Weights that regrow between
clips, as those of any head do that stays at the threshold, tell the two apart.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from .reading import HeadReading


#: How far clips scale a head down, and how many of them, before they are judged. A
#: head that does follow is over the threshold again only if the largest logits of two
#: batches differ by as much.
_JUDGED_AT = math.log(16.0)
_CLIPS = 2

#: The least share of a scaling that a logit ignored where clips have no effect: 1 if it
#: ignored all of it, 0 if it followed.
_MISSED = 0.75

#: Steps without a clip after which the count begins anew.
_FORGOTTEN_AFTER = 100


class ClipRecord(NamedTuple):
    """What clips have done to each head since the count began, `(all heads,)`."""

    logit_by_size: jax.Array  # float32; log of S by |W_q| |W_k| when the count began
    clips: jax.Array  # int32; since then
    clipped_by: jax.Array  # float32; minus the log of all their gammas
    ineffective: jax.Array  # bool; for good


def first_record(heads: int) -> ClipRecord:
    return ClipRecord(
        jnp.zeros(heads, jnp.float32),
        jnp.zeros(heads, jnp.int32),
        jnp.zeros(heads, jnp.float32),
        jnp.zeros(heads, bool),
    )


def judge(
    record: ClipRecord, heads: HeadReading, log_sizes: jax.Array, since: jax.Array
) -> tuple[ClipRecord, HeadReading]:
    """The record with this step in it, and what is left to clip.

    `log_sizes` are those of the weights that the logits come from, `since` is the
    number of steps since the last clip of each head.
    """
    logit_by_size = jnp.log(jnp.where(heads.clipped, heads.max_logits, 1)) - log_sizes
    clips = jnp.where(since > _FORGOTTEN_AFTER, 0, record.clips)
    due = heads.clipped & (clips >= _CLIPS) & (record.clipped_by >= _JUDGED_AT)
    grown = logit_by_size - record.logit_by_size
    ineffective = record.ineffective | due & (grown >= _MISSED * record.clipped_by)
    begins = heads.clipped & (due | (clips == 0))
    after = ClipRecord(
        jnp.where(begins, logit_by_size, record.logit_by_size),
        jnp.where(begins, 0, clips) + heads.clipped.astype(jnp.int32),
        jnp.where(begins, 0, record.clipped_by) - jnp.log(heads.gamma),
        ineffective,
    )
    return after, heads.without(ineffective)
