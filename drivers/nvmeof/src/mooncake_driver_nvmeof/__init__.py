"""Files, block devices and NVMe namespaces as regions of Mooncake engines.

The engine finds the driver by itself; nothing needs to be imported from here.
"""

from mooncake_driver_nvmeof.options import NvmeofOptions

__all__ = ["NvmeofOptions"]
