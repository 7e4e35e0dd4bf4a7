"""The attention operation; it needs only torch and numpy. Other packages use these names alone.

The letters of sizes, everywhere in this package:

| letter | what                                                           |
|--------|----------------------------------------------------------------|
| B      | batch                                                          |
| H      | query heads                                                    |
| Hkv    | key/value heads                                                |
| R      | query heads of a key/value head, ``H / Hkv``                   |
| X      | all key/value heads, ``B * Hkv``                               |
| T      | queries                                                        |
| S      | keys                                                           |
| L      | tokens of a block or a chunk                                   |
| D      | width of queries and keys                                      |
| E      | width of values                                                |
| C      | value channels: ``E``, and one of ones for a row sum           |
| M      | monomials; in a state its rows                                 |
| N      | order: the highest power of a series                           |
| P      | powers that have magnitudes                                    |

``G`` is the running sum of log decays and nothing else.
"""

from __future__ import annotations

from softmax_rnn.ops.decay import fade_, per_key_decay
from softmax_rnn.ops.feature_maps import FEATURE_MAPS
from softmax_rnn.ops.finish import SUM_GUARD
from softmax_rnn.ops.forms.chunks.magnitudes import powers
from softmax_rnn.ops.forms.gpu.proof import proofs
from softmax_rnn.ops.forms.row_sums import compute_dtype, visible
from softmax_rnn.ops.inputs import is_per_key, require_first_keys
from softmax_rnn.ops.layer.attention import Attention
from softmax_rnn.ops.layer.core import AttentionCore, Mapped, Projected
from softmax_rnn.ops.layer.maps import key_widths
from softmax_rnn.ops.layer.parts import LayerPart
from softmax_rnn.ops.monomials import degrees, dimension, state_size
from softmax_rnn.ops.options import LayerOptions
from softmax_rnn.ops.padding import hidden_first, taken
from softmax_rnn.ops.segments import Segments, segments_of
from softmax_rnn.ops.series import MAX_RADIUS, PowerSeries, order_for
from softmax_rnn.ops.spec import INVERSE_SQRT, AttentionSpec, Denominator
from softmax_rnn.ops.state import State
from softmax_rnn.ops.systems import Variant
from softmax_rnn.ops.variants import ALIASES, FAMILIES, layer_options, resolve, resolve_layer

__all__ = [
    "ALIASES",
    "FAMILIES",
    "FEATURE_MAPS",
    "INVERSE_SQRT",
    "MAX_RADIUS",
    "SUM_GUARD",
    "Attention",
    "AttentionCore",
    "AttentionSpec",
    "Denominator",
    "LayerOptions",
    "LayerPart",
    "Mapped",
    "PowerSeries",
    "Projected",
    "Segments",
    "State",
    "Variant",
    "compute_dtype",
    "degrees",
    "dimension",
    "fade_",
    "hidden_first",
    "is_per_key",
    "key_widths",
    "layer_options",
    "order_for",
    "per_key_decay",
    "powers",
    "proofs",
    "require_first_keys",
    "resolve",
    "resolve_layer",
    "segments_of",
    "state_size",
    "taken",
    "visible",
]
