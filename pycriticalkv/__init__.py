"""llama-cpp-python's ``Llama`` with a KV cache that stays small.

Importing this package makes ``llama_cpp`` use the patched llama.cpp libraries that it carries, so it has to be imported
before ``llama_cpp``; ``from pycriticalkv import llama_cpp`` is always right.
"""

from pycriticalkv import _library

_library.bind()

import llama_cpp  # noqa: E402

from pycriticalkv.llama import Llama  # noqa: E402  (llama_cpp may be imported only after bind())
from pycriticalkv.policy import PRESETS, KVPolicy  # noqa: E402
from pycriticalkv.prefill import Stream  # noqa: E402
from pycriticalkv.stats import KVStats  # noqa: E402

__all__ = ["PRESETS", "KVPolicy", "KVStats", "Llama", "Stream", "llama_cpp"]
__version__ = "0.1.0"
