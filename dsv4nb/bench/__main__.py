"""`python -m dsv4nb.bench decode --model toy`."""

import sys

from dsv4nb.bench.commands import main

sys.exit(main())
