"""`python -m dsv4nb.kernelspec install --user`."""

import sys

from dsv4nb.kernelspec.install import main

sys.exit(main())
