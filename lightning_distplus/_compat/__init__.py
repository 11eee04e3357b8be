"""The one place that touches private names of torch, Lightning and DeepSpeed. Each is probed before it is used.

When an upstream name has vanished, the feature behind it is switched off with one warning and training goes on.
``tests/unit/test_compat.py`` fails loudly for every name, so that we hear of it first.
"""

from lightning_distplus._compat.engines import *
from lightning_distplus._compat.lightning import *
from lightning_distplus._compat.probing import *
from lightning_distplus._compat.torch import *
