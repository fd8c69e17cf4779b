"""Muon and QK-Clip for JAX, Optax and Flax."""

import importlib.metadata

from ._attention import attention_fn as attention_fn
from ._attention_layers import AttentionLayer as AttentionLayer
from ._attention_layers import flax_attention_layers as flax_attention_layers
from ._attention_presets import flat_attention as flat_attention
from ._attention_presets import fused_attention as fused_attention
from ._attention_presets import latent_attention as latent_attention
from ._attention_stats import combine_attention_stats as combine_attention_stats
from ._coefficients import NS_COEFFS as NS_COEFFS
from ._describe import describe as describe
from ._dimension_numbers import flax_dimension_numbers as flax_dimension_numbers
from ._dimension_numbers import matrix_mask as matrix_mask
from ._head_leaf import HeadLeaf as HeadLeaf
from ._max_logits import max_logits as max_logits
from ._muon import muon as muon
from ._muon import scale_by_muon as scale_by_muon
from ._muon import ScaleByMuonState as ScaleByMuonState
from ._muonclip import muonclip as muonclip
from ._newton_schulz import newton_schulz as newton_schulz
from ._qk_clip import clip_qk as clip_qk
from ._qk_clip import qk_clip as qk_clip
from ._qk_clip import QKClipState as QKClipState


__version__ = importlib.metadata.version("muonclip_jax")
