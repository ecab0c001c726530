"""Files, block devices and NVMe namespaces as regions of Mooncake engines.

The engine finds the driver by itself. ``namespace()`` asks an NVMe/TCP target for a namespace to register.
"""

from mooncake_driver_nvmeof.namespaces import Namespace, namespace
from mooncake_driver_nvmeof.options import NvmeofOptions

__all__ = ["Namespace", "NvmeofOptions", "namespace"]
