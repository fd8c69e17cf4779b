"""A model's reading, given as `model=` to what needs to know its attention."""

from .._parameters.given import Model, numbers_of
from .attention_layers import Attention


def attention_of(model: Model | None, attention: Attention | None) -> Attention | None:
    """The attention layers: as given, else as read.

    **Raises:** `ValueError` for a reading with logits that no parameter scales.
    """
    if attention is not None or model is None:
        return attention
    numbers_of(model, None)  # raises for what is no reading
    if refused := list(model.refused):
        raise ValueError(
            "QK-Clip cannot scale the logits of\n  "
            + "\n  ".join(refused)
            + "\nFor the other layers alone give attention=reading.attention"
        )
    return list(model.attention)
