"""The layout in which kernels are exchanged.

Keras stores matrices as [in, out]. A blockwise method cuts the flattened matrix into blocks with a scale each, so
a block would mix several outputs, such as frequent and rare words. Such a method therefore gets matrices as [out, in],
PyTorch's layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import keras

from grace.core import Array
from grace.engine.session import Grace
from grace.keras.names import names_for
from grace.keras.toolkits import Toolkit

_KERNELS: WeakKeyDictionary[Grace, dict[Any, bool]] = WeakKeyDictionary()
# For each Grace, by variable: whether it is a kernel. The first call decides, since later ones may pass the tf.Variable
# of the same Keras variable.


def transposed(kit: Toolkit, grace: Grace, variables: Sequence[Any]) -> list[bool]:
    """Whether to exchange each variable transposed: True for Keras's 2-D kernels if the method is blockwise.

    The first call before there are tensors decides for the whole run; see `Setup.choose_layout`.
    """
    blockwise, known = grace.setup.choose_layout(), _KERNELS.setdefault(grace, {})
    return [blockwise and known.setdefault(kit.identity(variable), _is_kernel(variable)) for variable in variables]


def described(kit: Toolkit, grace: Grace, variables: Sequence[Any]) -> dict[str, Array]:
    """Variables for `Grace.build`, by name: arrays or specs of the shapes that are exchanged."""
    named = zip(names_for(kit, grace, variables), variables, transposed(kit, grace, variables), strict=True)
    return {name: kit.like(variable, turned) for name, variable, turned in named}


def _is_kernel(variable: Any) -> bool:
    if not isinstance(variable, keras.Variable) or len(variable.shape) != 2:
        return False
    name = variable.path.rpartition("/")[2]
    return bool(name == "kernel" or name.endswith("_kernel"))
