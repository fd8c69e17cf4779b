"""Muon and QK-Clip for JAX, Optax and Flax."""

import importlib.metadata

from ._attention import attention_fn as attention_fn
from ._attention_layers import AttentionLayer as AttentionLayer
from ._attention_layers import flax_attention_layers as flax_attention_layers
from ._attention_presets import flat_attention as flat_attention
from ._attention_presets import fused_attention as fused_attention
from ._attention_presets import latent_attention as latent_attention
from ._attention_presets import normalised_attention as normalised_attention
from ._attention_stats import combine_attention_stats as combine_attention_stats
from ._blockwise_attention import blockwise_attention as blockwise_attention
from ._coefficients import NS_COEFFS as NS_COEFFS
from ._describe import describe as describe
from ._dimension_numbers import flax_dimension_numbers as flax_dimension_numbers
from ._dimension_numbers import matrix_mask as matrix_mask
from ._head_leaf import HeadLeaf as HeadLeaf
from ._max_logits import max_logits as max_logits
from ._multi_steps import multi_steps as multi_steps
from ._multi_steps import MultiStepsState as MultiStepsState
from ._muon import muon as muon
from ._muonclip import muonclip as muonclip
from ._newton_schulz import newton_schulz as newton_schulz
from ._per_head import (
    per_head_dimension_numbers as per_head_dimension_numbers,
)
from ._qk_clip import clip_qk as clip_qk
from ._qk_clip import qk_clip as qk_clip
from ._qk_clip_state import qk_clip_metrics as qk_clip_metrics
from ._qk_clip_state import QKClipState as QKClipState
from ._residual_attention import residual_attention as residual_attention
from ._scale_by_muon import scale_by_muon as scale_by_muon
from ._scale_by_muon import ScaleByMuonState as ScaleByMuonState
from ._splash_attention import splash_attention as splash_attention


__version__ = importlib.metadata.version("muonclip_jax")
