"""`%dsv4` and `%%dsv4`, registered by `%load_ext dsv4nb`."""

from dsv4nb.magics.extension import Dsv4nb, load_ipython_extension, unload_ipython_extension

__all__ = ["Dsv4nb", "load_ipython_extension", "unload_ipython_extension"]
