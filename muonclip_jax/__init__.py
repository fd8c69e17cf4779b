"""Muon and QK-Clip for JAX, Optax and Flax.

The system: `muonclip`, with `multi_steps` for micro-batches.
Its parts: `muon`, `scale_by_muon`, `newton_schulz`; `qk_clip`, `clip_qk`.
Steps to chain: `normalize_neurons` (NorMuon), `add_cautious_decayed_weights`.
Attention that records: `attention_fn`, `max_logits`, `blockwise_attention`, ...
A model read from its trace: `read_model`, `record_attention`, `attention_rule`.
What a model means by its names: `describe`, `param_labels`, ...
"""

import importlib.metadata

from optax.contrib import MuonDimensionNumbers as MuonDimensionNumbers

from ._attention.attention_fn import attention_fn as attention_fn
from ._attention.blockwise import blockwise_attention as blockwise_attention
from ._attention.max_logits import max_logits as max_logits
from ._attention.splash import splash_attention as splash_attention
from ._describe import describe as describe
from ._matrices.axes import MatrixAxes as MatrixAxes
from ._model.attention_layers import AttentionLayer as AttentionLayer
from ._model.attention_layers import flax_attention_layers as flax_attention_layers
from ._model.head_leaf import HeadLeaf as HeadLeaf
from ._muon.momentum import ScaleByMuonState as ScaleByMuonState
from ._muon.muon import muon as muon
from ._muon.normalize_neurons import normalize_neurons as normalize_neurons
from ._muon.normalize_neurons import NormalizeNeuronsState as NormalizeNeuronsState
from ._muon.scale_by_muon import scale_by_muon as scale_by_muon
from ._muon.weight_decay import (
    add_cautious_decayed_weights as add_cautious_decayed_weights,
)
from ._muonclip import muonclip as muonclip
from ._newton_schulz.coefficients import NS_COEFFS as NS_COEFFS
from ._newton_schulz.newton_schulz import newton_schulz as newton_schulz
from ._newton_schulz.newton_schulz import NewtonSchulz as NewtonSchulz
from ._parameters.dimension_numbers import (
    flax_dimension_numbers as flax_dimension_numbers,
)
from ._parameters.dimension_numbers import matrix_mask as matrix_mask
from ._parameters.dimension_numbers import param_labels as param_labels
from ._qk_clip.multi_steps import multi_steps as multi_steps
from ._qk_clip.multi_steps import MultiStepsState as MultiStepsState
from ._qk_clip.qk_clip import clip_qk as clip_qk
from ._qk_clip.qk_clip import qk_clip as qk_clip
from ._qk_clip.qk_clip import QKClipState as QKClipState
from ._reading.kernels import attention_rule as attention_rule
from ._reading.reading import ModelReading as ModelReading
from ._reading.reading import read_model as read_model
from ._reading.recorded import record_attention as record_attention
from ._scalars import scalars as scalars


__version__ = importlib.metadata.version("muonclip_jax")
