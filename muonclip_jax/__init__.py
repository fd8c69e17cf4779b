"""Muon and QK-Clip for JAX, Optax and Flax.

The system: `muonclip`, with `multi_steps` for micro-batches.
Its parts: `muon`, `scale_by_muon`, `newton_schulz`; `qk_clip`, `clip_qk`.
Steps to chain: `normalize_neurons` (NorMuon), `add_cautious_decayed_weights`.
Attention that records: `attention_fn`, `max_logits`, `blockwise_attention`, ...
A model read from its trace: `read_model`, `record_attention`, `attention_rule`.
A model seen by its names: `describe`, `param_labels`, ...
"""

import importlib.metadata
from typing import Any, TYPE_CHECKING

from optax.contrib import MuonDimensionNumbers

from ._attention.blockwise import blockwise_attention
from ._attention.max_logits import max_logits
from ._attention.splash import splash_attention
from ._describe import describe
from ._matrices.axes import MatrixAxes
from ._model.attention_layers import AttentionLayer, flax_attention_layers
from ._model.head_leaf import HeadLeaf
from ._model.labels import matrix_mask, param_labels
from ._model.model_reading import ModelReading
from ._muon.momentum import ScaleByMuonState
from ._muon.muon import muon
from ._muon.normalize_neurons import normalize_neurons, NormalizeNeuronsState
from ._muon.scale_by_muon import scale_by_muon
from ._muon.weight_decay import add_cautious_decayed_weights
from ._muonclip import muonclip
from ._newton_schulz.coefficients import NS_COEFFS
from ._newton_schulz.newton_schulz import newton_schulz, NewtonSchulz
from ._parameters.dimension_numbers import flax_dimension_numbers
from ._qk_clip.multi_steps import multi_steps, MultiStepsState
from ._qk_clip.qk_clip import clip_qk, qk_clip, QKClipState
from ._reading.kernels import attention_rule
from ._reading.reading import read_model
from ._reading.recorded import record_attention
from ._scalars import scalars


if TYPE_CHECKING:
    from ._attention.attention_fn import attention_fn


__version__ = importlib.metadata.version("muonclip_jax")
# fmt: off
__all__ = [
    "NS_COEFFS", "AttentionLayer", "HeadLeaf", "MatrixAxes", "ModelReading",
    "MultiStepsState", "MuonDimensionNumbers", "NewtonSchulz", "NormalizeNeuronsState",
    "QKClipState", "ScaleByMuonState", "add_cautious_decayed_weights", "attention_fn",
    "attention_rule", "blockwise_attention", "clip_qk", "describe",
    "flax_attention_layers", "flax_dimension_numbers", "matrix_mask", "max_logits",
    "multi_steps", "muon", "muonclip", "newton_schulz", "normalize_neurons",
    "param_labels", "qk_clip", "read_model", "record_attention", "scalars",
    "scale_by_muon", "splash_attention",
]
# fmt: on


def __getattr__(name: str) -> Any:
    # The one name that imports Flax, which takes longer than all the rest and which
    # users of Equinox and Haiku do without.
    if name == "attention_fn":
        from ._attention.attention_fn import attention_fn

        return attention_fn
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
