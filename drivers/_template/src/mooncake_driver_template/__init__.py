"""Moves bytes between Mooncake engines on one host through local sockets.

The engine finds the driver by itself; nothing needs to be imported from here.
"""

from mooncake_driver_template.options import TemplateOptions

__all__ = ["TemplateOptions"]
